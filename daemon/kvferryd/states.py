"""How a transfer stands, as one table. Every illegal move raises. (A lease: kvferry.protocol.states.)"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from kvferry.protocol.states import IllegalMove
from kvferry.schemas import TransferState as T

State = TypeVar("State", bound=enum.StrEnum)

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


class Machine(Generic[State]):
    """Where one transfer stands."""

    def __init__(self, table: Mapping[State, frozenset[State]], start: State) -> None:
        self._table: Mapping[State, frozenset[State]] = table
        self.state: State = start

    def move(self, to: State) -> None:
        if to not in self._table[self.state]:
            raise IllegalMove(f"{type(to).__name__}: {self.state.value} -> {to.value}")
        self.state = to
