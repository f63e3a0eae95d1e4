"""The two state machines, each one table. Every illegal move raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from kvferry.schemas import LeaseState as L
from kvferry.schemas import TransferState as T

State = TypeVar("State", L, T)

TRANSFER: Mapping[T, frozenset[T]] = {
    T.WAITING: frozenset({T.CONNECTING, T.FAILED, T.ABORTED}),
    T.CONNECTING: frozenset({T.READING, T.FAILED, T.ABORTED}),
    T.READING: frozenset({T.VERIFYING, T.CONNECTING, T.FAILED, T.ABORTED}),
    T.VERIFYING: frozenset({T.DONE, T.CONNECTING, T.FAILED, T.ABORTED}),
    T.DONE: frozenset(),
    T.FAILED: frozenset(),
    T.ABORTED: frozenset(),
}
"""waiting: for the order or the reservation. connecting: handshake and lease; once more when an announcement of the
lease turns out to be out of date. reading: bytes move. verifying: whether the lease held throughout; done follows only
from it.
"""

LEASE: Mapping[L, frozenset[L]] = {
    L.PUBLISHING: frozenset({L.PUBLISHING, L.PUBLISHED, L.EXPIRED, L.REVOKED}),
    L.PUBLISHED: frozenset({L.RELEASED, L.EXPIRED, L.REVOKED}),
    L.RELEASED: frozenset(),
    L.EXPIRED: frozenset(),
    L.REVOKED: frozenset(),
}
"""publishing: more tokens will follow. published: all are there. released: the expected readers have read."""


class IllegalMove(AssertionError):
    """A bug of ours: a state machine was asked for a move that its table does not have."""


class Machine(Generic[State]):
    """Where one lease or transfer stands."""

    def __init__(self, table: Mapping[State, frozenset[State]], start: State) -> None:
        self._table: Mapping[State, frozenset[State]] = table
        self.state: State = start

    def move(self, to: State) -> None:
        if to not in self._table[self.state]:
            raise IllegalMove(f"{type(to).__name__}: {self.state.value} -> {to.value}")
        self.state = to
