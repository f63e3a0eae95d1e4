"""The folder that the daemons of a node share: a peer fetches descriptors there for a ticket, once, and gives none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleet import until

import kvferryd.memory.node
from kvferry.errors import KvferryError
from kvferry.file import File
from kvferry.memory.handover import SUFFIX, fetch, hand_over, open_pipe
from kvferryd.api.node import MOST, NodeSocket
from kvferryd.config import Config
from kvferryd.host import places
from kvferryd.memory.node import NodeDir
from support import refused

pytestmark = pytest.mark.anyio
GPU, OTHER = "GPU-0", "GPU-1"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeSocket]:
    socket = NodeSocket(NodeDir(tmp_path), GPU)
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


async def held(file: File, times: int) -> bool:
    """Whether this process has so many descriptors of it. Others may come and go meanwhile."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has gone
            found += os.path.samestat(os.stat(int(number)), os.fstat(file.fileno()))
    return found == times


async def test_a_peer_fetches_what_it_was_told_of_once(tmp_path: Path, node: NodeSocket, file: File) -> None:
    ticket = node.offer("call", [file, file])
    held = await fetched(tmp_path, node, "call", ticket, 2)
    assert [os.pread(each.fileno(), 100, 0) for each in held] == [b"of the source"] * 2
    File.close_all(held)
    with refused("unknown_ticket"):
        await fetched(tmp_path, node, "call", ticket, 2)


async def test_a_ticket_is_good_with_its_session_alone_and_for_so_many(
    tmp_path: Path, node: NodeSocket, file: File
) -> None:
    ticket = node.offer("call", [file])
    with refused("unknown_ticket"):
        await fetched(tmp_path, node, "another", ticket)
    with pytest.raises(KvferryError) as caught:
        await fetched(tmp_path, node, "call", ticket, 2)
    assert caught.value.code == "handover_failed" and "1 files came instead of 2" in caught.value.message
    await until(lambda: held(file, 1), "what was offered is closed")


async def test_what_nobody_has_fetched_is_closed_with_its_call(tmp_path: Path, node: NodeSocket, file: File) -> None:
    tickets = [node.offer("call", [file] * 200) for _ in range(3)]
    other = node.offer("another", [file])
    node.withdraw("call")
    node.withdraw("call")
    assert await held(file, 2)
    for ticket in tickets:
        with refused("unknown_ticket"):
            await fetched(tmp_path, node, "call", ticket, 200)
    File.close_all(await fetched(tmp_path, node, "another", other))


async def test_a_call_is_offered_so_many(node: NodeSocket, file: File) -> None:
    for _ in range(MOST // 200):
        node.offer("call", [file] * 200)
    with refused("too_many_files"):
        node.offer("call", [file] * 200)
    node.withdraw("call")


def test_daemons_of_one_folder_and_kernel_have_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(device="cuda:0", node_dir=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = [each.id for each in pool.map(NodeDir.of, [config] * 8) if each]
    assert len(made) == 8 and len(set(made)) == 1 and len(made[0]) == 32
    assert not os.listdir(tmp_path), "a cleaner finds nothing whose loss would part them"
    beside = tmp_path / "beside"
    beside.mkdir()
    assert NodeDir(beside).id not in ("", made[0])
    with another_kernel(tmp_path, monkeypatch):
        assert NodeDir(tmp_path).id not in ("", made[0]), "a folder of a network filesystem is seen on several nodes"
    assert NodeDir.of(Config(node_dir=tmp_path)) is None, "host memory is mapped by nobody"
    with refused("bad_config", field="node_dir"):
        NodeDir.of(Config(device="cuda:0", node_dir=tmp_path / "none"))


@contextlib.contextmanager
def another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another node's, or an earlier start of this one."""
    boot = tmp_path.with_suffix(".boot")
    boot.write_text("another kernel's")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kvferryd.memory.node, "BOOT", boot)
        yield


@pytest.mark.parametrize("removed", ["the socket", "the folder", "another's file is in its place"])
async def test_a_socket_that_a_cleaner_has_removed_is_made_again(tmp_path: Path, file: File, removed: str) -> None:
    folder = tmp_path / "n"
    folder.mkdir()
    node = NodeSocket(NodeDir(folder), GPU)
    path, before = folder / f"{node.name}{SUFFIX}", NodeDir(folder).id
    async with node.serving():
        for _ in range(3):
            path.unlink()
            if removed == "the folder":
                folder.rename(tmp_path / "before")
                folder.mkdir()
                (tmp_path / "before").rmdir()
            elif removed != "the socket":
                path.touch()
            File.close_all(await fetched(folder, node, "call", node.offer("call", [file])))
            assert path.stat().st_mode & 0o777 == 0o600
            File.close_all(await fetched(folder, node, "call", node.offer("call", [file])))
        assert len(os.listdir(folder)) == 1
    assert not os.listdir(folder) and NodeDir(folder).id
    assert removed == "the folder" or NodeDir(folder).id == before


async def test_a_socket_that_cannot_be_made_again_is_named(tmp_path: Path, file: File) -> None:
    folder = tmp_path / "n"
    folder.mkdir()
    node = NodeSocket(NodeDir(folder), GPU)
    async with node.serving():
        (folder / f"{node.name}{SUFFIX}").unlink()
        folder.rmdir()
        assert not NodeDir(folder).id
        with pytest.raises(KvferryError) as caught:
            node.offer("call", [file])
        assert caught.value.code == "handover_failed" and str(folder) in str(caught.value)


async def test_a_socket_is_made_again_once_what_was_in_its_way_has_gone(tmp_path: Path, file: File) -> None:
    node = NodeSocket(NodeDir(tmp_path), GPU)
    path = tmp_path / f"{node.name}{SUFFIX}"
    async with node.serving():
        path.unlink()
        (path / "in the way").mkdir(parents=True)
        for _ in range(2):
            with pytest.raises(KvferryError) as caught:
                node.offer("call", [file])
            assert "Is a directory" in caught.value.message
        (path / "in the way").rmdir()
        path.rmdir()
        File.close_all(await fetched(tmp_path, node, "call", node.offer("call", [file])))
    assert not os.listdir(tmp_path)


async def test_what_cannot_be_removed_keeps_no_daemon_from_starting(
    tmp_path: Path, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another_kernel(tmp_path, monkeypatch):
        left = tmp_path / f"{NodeDir(tmp_path).socket_name(GPU)}{SUFFIX}"
    left.mkdir()
    node = NodeSocket(NodeDir(tmp_path), GPU)
    async with node.serving():
        File.close_all(await fetched(tmp_path, node, "call", node.offer("call", [file])))
    assert left.is_dir()


async def test_peers_give_no_files_and_open_no_pipe(tmp_path: Path, node: NodeSocket, file: File) -> None:
    for call in (hand_over, lambda path, session, _: open_pipe(path, session)):
        with pytest.raises(KvferryError) as caught:
            await asyncio.to_thread(call, str(tmp_path / node.name), "call", [file.fileno()])
        assert caught.value.code == "malformed_handover" and "give none" in caught.value.message


async def test_what_dead_daemons_have_left_is_removed_and_nothing_of_living_ones_and_of_other_nodes(
    tmp_path: Path, node: NodeSocket, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets of an earlier start of the machine are dead if their GPU is here now: a GPU is in one machine."""
    folder = NodeDir(tmp_path)
    dead, beginning = folder.socket_name(OTHER) + SUFFIX, folder.socket_name(GPU)
    with another_kernel(tmp_path, monkeypatch):
        earlier, begun, elsewhere = folder.socket_name(GPU) + SUFFIX, folder.socket_name(GPU), folder.socket_name(OTHER)
    stay = {beginning, elsewhere, elsewhere + SUFFIX, "no-socket-of-ours"}
    for name in (dead, earlier, begun, *stay):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / name))
    ticket = node.offer("call", [file])
    async with NodeSocket(folder, GPU).serving() as _:
        left_there = set(os.listdir(tmp_path))
        assert stay < left_there and not {dead, earlier, begun} & left_there
        File.close_all(await fetched(tmp_path, node, "call", ticket))
    for name in stay:
        (tmp_path / name).unlink()


def test_a_host_that_has_ended_leaves_no_socket_of_its_gpus(tmp_path: Path) -> None:
    """Its daemons may have been killed. What is beside another GPU is not its own."""
    folder, run = NodeDir(tmp_path / "n"), tmp_path / "run"
    for each in (folder.folder, run):
        each.mkdir()
    (run / places.NOTED).write_text(str(folder.folder / f"{GPU}.json"))
    own = {
        f"{GPU}.json",
        f"{GPU}.sock",
        f"{GPU}.sock{SUFFIX}",
        folder.socket_name(GPU) + SUFFIX,
        folder.socket_name(GPU),
    }
    others = {f"{OTHER}.json", f"{OTHER}.sock", folder.socket_name(OTHER) + SUFFIX}
    for name in own | others:
        (folder.folder / name).touch()
    places.leave(run)
    assert set(os.listdir(folder.folder)) == others


async def test_a_host_that_has_ended_leaves_the_socket_of_a_daemon_of_another_ones_beside_its_gpu(
    tmp_path: Path, node: NodeSocket, file: File
) -> None:
    run = tmp_path.with_suffix(".run")
    run.mkdir()
    (run / places.NOTED).write_text(str(tmp_path / f"{GPU}.json"))
    (tmp_path / (NodeDir(tmp_path).socket_name(GPU) + SUFFIX)).touch()
    ticket = node.offer("call", [file])
    places.leave(run)
    assert os.listdir(tmp_path) == [node.name + SUFFIX]
    File.close_all(await fetched(tmp_path, node, "call", ticket))


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused("bad_config", field="node_dir"):
        async with NodeSocket(NodeDir(tmp_path / "none"), GPU).serving():
            pytest.fail("it serves")
