"""A daemon whose keeper does not answer says so, at each allocation."""

from __future__ import annotations

import socket

import pytest

from kvferry.errors import KvferryError
from kvferryd.memory import kept
from kvferryd.memory.kept import Keeper


def test_a_keeper_that_does_not_answer_is_gone_for_every_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.signal, "SIGKILL", 0)  # this process outlives whoever started it
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = Keeper(ours.detach())
    theirs.close()
    for _ in range(2):
        with pytest.raises(KvferryError) as caught:
            keeper.allocate("cuda:0", 4096)
        assert caught.value.code == "keeper_gone"
