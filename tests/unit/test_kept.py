"""A keeper, without processes: what it allocates and frees for its daemon, and the wishes that it keeps."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.errors import KvferryError
from kvferry.memory.cuda import Exported
from kvferryd.memory import kept
from kvferryd.memory.kept import Keeper
from kvferryd.process import keeper


def test_a_keeper_that_does_not_answer_is_gone_for_every_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.signal, "SIGKILL", 0)  # this process outlives whoever started it
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = Keeper(ours.detach())
    theirs.close()
    for _ in range(2):
        with pytest.raises(KvferryError) as caught:
            keeper.allocate("cuda:0", 4096)
        assert caught.value.code == "keeper_gone"


class Gpu:
    """As much of one as a keeper uses."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def alloc(self, nbytes: int) -> int:
        self.held.append(nbytes)
        return nbytes

    def free(self, address: int) -> None:
        self.held.remove(address)

    def export(self, address: int) -> Exported:
        return Exported(b"handle", 0, address, "GPU-0")


def test_a_keeper_that_is_short_of_descriptors_says_so_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.signal, "SIGKILL", 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon: Any = keeper.Daemon(None, theirs, 0.0)  # type: ignore[arg-type]  # it has no process
    monkeypatch.setattr(keeper.Keeper, "_started", lambda _: daemon)
    holder, gpu = keeper.Keeper([]), Gpu()
    monkeypatch.setattr(holder, "_gpu", lambda _: gpu, raising=False)
    assert ours.recv(keeper.MOST) == b'""', "its turn"
    asking = Keeper(ours.detach())

    def short(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with ThreadPoolExecutor() as thread:
        for where, name in ((keeper.socket, "socketpair"), (holder._selector, "register")):
            with monkeypatch.context() as shortage:
                shortage.setattr(where, name, short)
                asked = thread.submit(asking.allocate, "cuda:0", 4096)
                assert select.select([theirs], [], [], 60)[0]
                holder._heard(daemon)
                with pytest.raises(KvferryError, match="Too many open files") as caught:
                    asked.result(60)
            assert (caught.value.code, gpu.held) == ("out_of_memory", [])
        asked = thread.submit(asking.allocate, "cuda:0", 4096)
        assert select.select([theirs], [], [], 60)[0]
        holder._heard(daemon)
        os.close(asked.result(60)[1])
    assert gpu.held == [4096], "the keeper answers as before"


def test_memory_that_cannot_be_freed_is_reported_and_ends_no_keeper(holder: keeper.Keeper) -> None:
    reported: list[str] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def free() -> None:
        raise KvferryError("out_of_memory", "cuMemFree failed: an illegal address was encountered")

    holder._report = reported.append  # type: ignore[method-assign]
    holder._selector.register(theirs, select.EPOLLIN)
    ours.close()
    holder._let_go(theirs, free)
    assert "illegal address" in reported[0] and theirs.fileno() == -1


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> keeper.Keeper:
    """Of daemons that are sockets alone; `signalled` has what each was sent."""

    def started(_: object) -> keeper.Daemon:
        _, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers.append(len(numbers) + 1)
        return keeper.Daemon(types.SimpleNamespace(pid=numbers[-1], returncode=None), theirs, 0.0)  # type: ignore[arg-type]

    numbers: list[int] = []
    monkeypatch.setattr(keeper.Keeper, "_started", started)
    monkeypatch.setattr(keeper.Daemon, "signal", lambda *_: None)
    return keeper.Keeper([])


def test_an_upgrade_wished_for_before_the_next_daemon_serves_comes_when_it_does(holder: keeper.Keeper) -> None:
    holder._signalled(bytes([signal.SIGHUP]))
    assert not holder._upgrading
    holder._says(holder._current, b'"serving"')
    new = holder._standby
    assert holder._upgrading and new is not None
    holder._says(new, b'"loaded"')
    assert holder._current.told


def test_a_new_daemon_that_dies_while_the_old_one_drains_for_it_is_loaded_again(
    holder: keeper.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    holder._report = reported.append  # type: ignore[method-assign]
    holder._says(holder._current, b'"serving"')
    holder._signalled(bytes([signal.SIGHUP]))
    new = holder._standby
    assert new is not None
    holder._says(new, b'"loaded"')
    dead = iter([(new.process.pid, signal.SIGKILL), (0, 0)])
    monkeypatch.setattr(keeper.os, "waitpid", lambda *_: next(dead))
    holder._signalled(bytes([signal.SIGCHLD]))
    assert "stays" not in reported[0] and holder._next_standby is not None and holder._upgrading
