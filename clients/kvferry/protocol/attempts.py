"""Attempts at a request, of the engine that reads, and why one is refused."""

from __future__ import annotations

from typing import TypeAlias

from kvferry.errors import Conflict, Forbidden, Full, NotFound, PeerFailed, Unavailable
from kvferry.protocol.frozen import frozen

Key: TypeAlias = tuple[str, str, str]
"""Engine, epoch, request."""
HIGHER = "give every attempt at a request a higher number, the same on all ranks"
ELSEWHERE = "send the request to another decode worker"


@frozen
class Attempt:
    """An attempt at a request, the same on all ranks of the engine that reads.

    number: from 1; 0 where the reservation is still to say it. by: empty where the engine has numbered it; otherwise an
    order has brought its tables, and this instance of rank 0's daemon counts those.
    """

    number: int
    by: str = ""

    def before(self, other: Attempt) -> bool:
        """Whether the other has taken its place."""
        return self.by == other.by and self.number < other.number

    def __str__(self) -> str:
        return f"attempt {self.number}"


NO_ATTEMPT = Attempt(0)


@frozen
class ReadingRank:
    """A rank of an engine that reads. life: of what it has registered, never given again by its daemon."""

    engine_id: str
    epoch: str
    rank: int
    life: int

    def key(self, request_id: str) -> Key:
        return self.engine_id, self.epoch, request_id


@frozen
class Limits:
    """transfers: whose part on this rank has not ended. history: that are over, and still known. tables: whether an
    order may bring them."""

    transfers: int
    history: int
    tables: bool = True


def conflict(request_id: str, why: str) -> Conflict:
    remedy = "use one request id for one order, or a higher `attempt`"
    why = f"request {request_id} {why}"
    return Conflict("order_conflict", why, field="request_id", value=request_id, remedy=remedy)


def stale(request_id: str, newest: Attempt) -> Conflict:
    why = f"request {request_id} is in {newest} by now"
    return Conflict("stale_attempt", why, field="attempt", value=newest.number, remedy=HIGHER)


def superseded(request_id: str, by: Attempt) -> Conflict:
    return Conflict("superseded", f"{by} of request {request_id} took the place of this one")


def reserved_otherwise(request_id: str) -> Conflict:
    why, remedy = f"request {request_id} has other blocks reserved already", "abort it before reserving other blocks"
    return Conflict("receive_conflict", why, field="request_id", value=request_id, remedy=remedy)


def lease_of_some(request_id: str, lease: object) -> Conflict:
    """Rank 0 has handed its order on without a lease, and this rank's engine names one: they may not be the same."""
    why = f"the engine names a lease of request {request_id} on this rank, and none on rank 0"
    remedy = "name the same lease on all ranks, or on none"
    return Conflict("order_conflict", why, field="source.lease", value=lease, remedy=remedy)


def given_already(order_id: str, how: str) -> Conflict:
    why, remedy = f"order {order_id} was given already, {how}", "give another order another order_id"
    return Conflict("order_conflict", why, field="order_id", value=order_id, remedy=remedy)


def another_kind(request_id: str, newest: Attempt) -> Conflict:
    how = "its orders bring tables" if newest.by else "its engine reserves blocks for it"
    return conflict(request_id, f"has another kind of attempts: {how}")


def tables_not_allowed() -> Forbidden:
    why = "this daemon writes only blocks that the engine itself has reserved"
    remedy = "leave the tables to the engine, or set order_tables = true"
    return Forbidden("tables_not_allowed", why, field="destination.tables", remedy=remedy)


def full(most: int) -> Full:
    why, remedy = f"{most} transfers are under way", f"try again shortly, or {ELSEWHERE}"
    return Full("full", why, field="max_transfers", value=most, remedy=remedy)


def draining(rank: int, where: str) -> Unavailable:
    """`where` names this rank among several; empty where the engine has one."""
    if not where:
        return Unavailable("draining", "the daemon is draining and takes no new transfers", remedy=ELSEWHERE)
    why = f"{where} is draining, and the engine takes no new transfers"
    return Unavailable("draining", why, field="rank", value=rank, remedy=ELSEWHERE)


def engine_gone(engine_id: str) -> NotFound:
    why = f"engine {engine_id} is gone; only what it published is still here"
    return NotFound("unknown_engine", why, field="engine_id", value=engine_id, remedy=ELSEWHERE)


def replaced(request_id: str, weights: str, now: str) -> Conflict:
    """The engine has other weights than those for which the request was to be received."""
    why = f"request {request_id} was to be received for weights {weights!r}, and the engine has {now!r} now"
    remedy = "receive it anew; its prefill must have the same weights"
    return Conflict("other_weights", why, field="weights", value=weights, remedy=remedy)


def leader_lost() -> PeerFailed:
    why = "rank 0 of the same engine, which handed the order on, was started anew"
    return PeerFailed("rank_failed", why, field="rank", value=0, remedy="try again, in a new attempt")
