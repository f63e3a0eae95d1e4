"""A daemon whose keeper does not answer, or cannot, says so at each allocation."""

from __future__ import annotations

import errno
import os
import select
import socket
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
