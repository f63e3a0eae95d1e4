"""The folder that the daemons of a node share: a peer fetches descriptors there for a ticket, once, and gives none."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvferry.errors import KvferryError
from kvferry.file import File
from kvferry.memory.handover import SUFFIX, fetch, hand_over, open_pipe
from kvferryd.api.node import NodeSocket

pytestmark = pytest.mark.anyio


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeSocket]:
    socket = NodeSocket(tmp_path)
    async with socket.serving():
        yield socket
    assert not os.listdir(tmp_path)


@pytest.fixture
def file(request: pytest.FixtureRequest) -> File:
    file = File(os.memfd_create(request.node.name))
    os.write(file.fileno(), b"of the source")
    return file


async def fetched(folder: Path, node: NodeSocket, session: str, ticket: str, count: int = 1) -> list[File]:
    return await asyncio.to_thread(fetch, str(folder / node.name), session, ticket, count)


async def test_a_peer_fetches_what_it_was_told_of_once(tmp_path: Path, node: NodeSocket, file: File) -> None:
    ticket = node.offer("call", [file, file])
    held = await fetched(tmp_path, node, "call", ticket, 2)
    assert [os.pread(each.fileno(), 100, 0) for each in held] == [b"of the source"] * 2
    File.close_all(held)
    with pytest.raises(KvferryError) as refused:
        await fetched(tmp_path, node, "call", ticket, 2)
    assert refused.value.code == "unknown_ticket"


async def test_a_ticket_is_good_with_its_session_alone_and_for_so_many(
    tmp_path: Path, node: NodeSocket, file: File
) -> None:
    ticket, before = node.offer("call", [file]), len(os.listdir("/proc/self/fd"))
    with pytest.raises(KvferryError) as refused:
        await fetched(tmp_path, node, "another", ticket)
    assert refused.value.code == "unknown_ticket"
    with pytest.raises(KvferryError) as refused:
        await fetched(tmp_path, node, "call", ticket, 2)
    assert refused.value.code == "handover_failed" and "1 files came instead of 2" in refused.value.message
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_peers_give_no_files_and_open_no_pipe(tmp_path: Path, node: NodeSocket, file: File) -> None:
    for call in (hand_over, lambda path, session, _: open_pipe(path, session)):
        with pytest.raises(KvferryError) as refused:
            await asyncio.to_thread(call, str(tmp_path / node.name), "call", [file.fileno()])
        assert refused.value.code == "malformed_handover" and "give none" in refused.value.message


async def test_sockets_of_dead_daemons_are_removed_and_those_of_living_ones_stay(
    tmp_path: Path, node: NodeSocket, file: File
) -> None:
    dead, other = tmp_path / f"node-dead{SUFFIX}", tmp_path / "theirs"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    other.touch()
    ticket = node.offer("call", [file])
    async with NodeSocket(tmp_path).serving():
        assert not dead.exists() and other.exists()
        File.close_all(await fetched(tmp_path, node, "call", ticket))
    other.unlink()


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvferryError) as refused:
        async with NodeSocket(tmp_path / "none").serving():
            pytest.fail("it serves")
    assert (refused.value.code, refused.value.field) == ("bad_config", "node_dir")
