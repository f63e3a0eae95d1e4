"""A keeper's allocations and frees for its daemon, and signals from before it hears any."""

from __future__ import annotations

import errno
import functools
import json
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.errors import KvferryError
from kvferry.memory.cuda import Exported
from kvferryd.memory import kept
from kvferryd.memory.kept import Keeper
from kvferryd.process import keeper
from kvferryd.process.held import Held
from support import refused


def test_a_keeper_that_does_not_answer_is_gone_for_every_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.signal, "SIGKILL", 0)  # this process outlives whoever started it
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = Keeper(ours.detach())
    theirs.close()
    for _ in range(2):
        with refused("keeper_gone"):
            keeper.allocate("cuda:0", 4096)


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


@pytest.fixture
def held() -> Iterator[tuple[Held, selectors.BaseSelector, list[str]]]:
    reported: list[str] = []
    with selectors.DefaultSelector() as selector:
        yield Held(selector, reported.append), selector, reported


def test_a_keeper_that_is_short_of_descriptors_says_so_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, held: tuple[Held, selectors.BaseSelector, list[str]]
) -> None:
    monkeypatch.setattr(kept.signal, "SIGKILL", 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (holder, selector, _), gpu = held, Gpu()
    monkeypatch.setattr(holder, "_gpu", lambda _: gpu, raising=False)
    asking = Keeper(ours.detach())

    def short(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def answer() -> None:
        assert select.select([theirs], [], [], 60)[0]
        asked = json.loads(theirs.recv(4096))
        holder.allocate(asked["device"], asked["nbytes"], functools.partial(keeper._say, theirs))

    with ThreadPoolExecutor() as thread, theirs:
        for where, name in ((socket, "socketpair"), (selector, "register")):
            asked = thread.submit(asking.allocate, "cuda:0", 4096)
            with monkeypatch.context() as shortage:
                shortage.setattr(where, name, short)
                answer()
            with pytest.raises(KvferryError, match="Too many open files") as caught:
                asked.result(60)
            assert (caught.value.code, gpu.held) == ("out_of_memory", [])
        asked = thread.submit(asking.allocate, "cuda:0", 4096)
        answer()
        asked.result(60)[1].close()
        assert gpu.held == [4096], "the keeper answers as before"
        ((key, _),) = selector.select(60)
        key.data()
    assert gpu.held == []


def test_memory_that_cannot_be_freed_is_reported_and_ends_no_keeper(
    held: tuple[Held, selectors.BaseSelector, list[str]],
) -> None:
    holder, selector, reported = held
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def free() -> None:
        raise KvferryError("out_of_memory", "cuMemFree failed: an illegal address was encountered")

    selector.register(theirs, select.EPOLLIN)
    ours.close()
    holder._let_go(theirs, free)
    assert "illegal address" in reported[0] and theirs.fileno() == -1


def test_a_signal_that_was_kept_back_is_heard_by_the_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish that comes before the keeper can hear it would be its death."""
    script = """if True:
        import os, signal, sys
        os.kill(os.getpid(), signal.SIGHUP)
        from kvferryd.process.keeper import Keeper
        sys.executable = "/bin/true"  # its daemon
        keeper = Keeper([])
        status = keeper.run()
        print(keeper._machine.wishes.upgrade)
        sys.exit(status)
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (process.communicate(timeout=60)[0].strip(), process.returncode) == (b"2", 0)
