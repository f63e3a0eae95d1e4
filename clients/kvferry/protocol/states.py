"""How a lease stands, and how a transfer does, as tables. A move that a table does not have raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar


class LeaseState(enum.StrEnum):
    """Source side."""

    PUBLISHING = "publishing"
    PUBLISHED = "published"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"

    @property
    def ended(self) -> bool:
        return self in (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED)


L = LeaseState
LEASE: Mapping[L, frozenset[L]] = {
    L.PUBLISHING: frozenset({L.PUBLISHING, L.PUBLISHED, L.EXPIRED, L.REVOKED}),
    L.PUBLISHED: frozenset({L.RELEASED, L.EXPIRED, L.REVOKED}),
    L.RELEASED: frozenset(),
    L.EXPIRED: frozenset(),
    L.REVOKED: frozenset(),
}
"""publishing: more tokens will follow. published: all are there. released: the expected readers have read."""


class TransferState(enum.StrEnum):
    """Destination side."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    READING = "reading"
    VERIFYING = "verifying"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        return self in (TransferState.DONE, TransferState.FAILED, TransferState.ABORTED)


T = TransferState
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
STEP: Mapping[T, int] = {state: step for step, state in enumerate(T)}
"""How far a transfer is."""
State = TypeVar("State", LeaseState, TransferState)


class IllegalMove(AssertionError):
    """A bug of ours: a state machine was asked for a move that its table does not have."""


def moved(start: State, to: State) -> State:
    table: Mapping[Any, frozenset[Any]] = LEASE if isinstance(start, LeaseState) else TRANSFER
    if to not in table[start]:
        raise IllegalMove(f"{type(to).__name__}: {start.value} -> {to.value}")
    return to
