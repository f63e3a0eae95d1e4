"""How a lease stands, as one table. A move that the table does not have raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping


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


class IllegalMove(AssertionError):
    """A bug of ours: a state machine was asked for a move that its table does not have."""


def moved(start: LeaseState, to: LeaseState) -> LeaseState:
    if to not in LEASE[start]:
        raise IllegalMove(f"LeaseState: {start.value} -> {to.value}")
    return to
