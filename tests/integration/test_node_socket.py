"""The folder that the daemons of a node share: a peer fetches descriptors there for a ticket, once, and gives none."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvferryd.memory.node
from kvferry.errors import KvferryError
from kvferry.file import File
from kvferry.memory.handover import SUFFIX, fetch, hand_over, open_pipe
from kvferryd.api.node import MOST, NodeSocket
from kvferryd.config import Config
from kvferryd.memory.node import NodeDir

pytestmark = pytest.mark.anyio
ID = "0" * 32


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeSocket]:
    socket = NodeSocket(NodeDir(tmp_path, ID))
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


async def test_what_nobody_has_fetched_is_closed_with_its_call(tmp_path: Path, node: NodeSocket, file: File) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tickets = [node.offer("call", [file] * 200) for _ in range(3)]
    other = node.offer("another", [file])
    node.withdraw("call")
    node.withdraw("call")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for ticket in tickets:
        with pytest.raises(KvferryError) as refused:
            await fetched(tmp_path, node, "call", ticket, 200)
        assert refused.value.code == "unknown_ticket"
    File.close_all(await fetched(tmp_path, node, "another", other))


async def test_a_call_is_offered_so_many(node: NodeSocket, file: File) -> None:
    for _ in range(MOST // 200):
        node.offer("call", [file] * 200)
    with pytest.raises(KvferryError) as refused:
        node.offer("call", [file] * 200)
    assert refused.value.code == "too_many_files"
    node.withdraw("call")


def test_daemons_of_one_folder_and_kernel_have_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(device="cuda:0", node_dir=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = [each.id for each in pool.map(NodeDir.of, [config] * 8) if each]
    assert len(made) == 8 and len(set(made)) == 1 and len(made[0]) == 32
    assert os.listdir(tmp_path) == ["node-id"]
    boot = tmp_path.with_suffix(".boot")
    boot.write_text("another kernel's")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kvferryd.memory.node, "BOOT", boot)
        (there,) = filter(None, [NodeDir.of(config)])
    assert there.id != made[0], "a folder of a network filesystem is seen on several nodes"
    assert NodeDir.of(Config(node_dir=tmp_path)) is None, "host memory is mapped by nobody"
    for damaged in ("no id", "ab"):
        (tmp_path / "node-id").write_text(damaged)
        with pytest.raises(KvferryError) as refused:
            NodeDir.of(config)
        assert (refused.value.code, refused.value.field) == ("bad_config", "node_dir")


async def test_peers_give_no_files_and_open_no_pipe(tmp_path: Path, node: NodeSocket, file: File) -> None:
    for call in (hand_over, lambda path, session, _: open_pipe(path, session)):
        with pytest.raises(KvferryError) as refused:
            await asyncio.to_thread(call, str(tmp_path / node.name), "call", [file.fileno()])
        assert refused.value.code == "malformed_handover" and "give none" in refused.value.message


async def test_sockets_of_dead_daemons_are_removed_and_those_of_living_ones_and_of_other_nodes_stay(
    tmp_path: Path, node: NodeSocket, file: File
) -> None:
    dead = tmp_path / f"{NodeDir(tmp_path, ID).socket_name()}{SUFFIX}"
    other = tmp_path / f"{NodeDir(tmp_path, '1' * 32).socket_name()}{SUFFIX}"
    for path in (dead, other):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    ticket = node.offer("call", [file])
    async with NodeSocket(NodeDir(tmp_path, ID)).serving():
        assert not dead.exists() and other.exists()
        File.close_all(await fetched(tmp_path, node, "call", ticket))
    other.unlink()


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvferryError) as refused:
        async with NodeSocket(NodeDir(tmp_path / "none", ID)).serving():
            pytest.fail("it serves")
    assert (refused.value.code, refused.value.field) == ("bad_config", "node_dir")
