"""A transfer of this rank together with what the other ranks of its engine make of the same request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.errors import KvferryError
from kvferry.schemas import RankTransfer, SourceBody, TransferRecord, TransferState
from kvferryd.transfer.transfer import Order, Reservation, Transfer


@dataclass(frozen=True, slots=True)
class Origin:
    """The rank whose order this is, and which attempt at the request: a request id may come again after a failure."""

    rank: int
    attempt: str
    again: bool | None = None
    """Whether that rank has tried the request before, or goes on though it was told `order_late`; None from a daemon
    that is too old to say."""


@dataclass(slots=True, eq=False)
class Job:
    """A transfer of this rank, and what the other ranks said of theirs if the order came in here."""

    transfer: Transfer
    ranks: dict[int, RankTransfer] = field(default_factory=dict)
    brought: Mapping[int, Reservation] = field(default_factory=dict)
    """Reservations that came with the order, by rank."""
    origins: dict[int, str] = field(default_factory=dict)
    """Attempts, by the rank whose order reached this one."""
    past: frozenset[str] = frozenset()
    """Attempts of the same request that are over: what still comes of them is not meant for this job."""
    again: bool = False
    """Whether this rank has tried the request before, in this epoch."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    fan_out: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self.transfer.ended.is_set() and all(rank.state.ended for rank in self.ranks.values())

    @property
    def state(self) -> TransferState:
        """Done when every rank is, failed or aborted when one is, otherwise where the slowest stands."""
        states = [self.transfer.state, *(rank.state for rank in self.ranks.values())]
        for verdict in (TransferState.FAILED, TransferState.ABORTED):
            if verdict in states:
                return verdict
        return min(states, key=list(TransferState).index)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def record(self) -> TransferRecord:
        transfer, order = self.transfer, self.transfer.order
        own = transfer.share()
        ranks = sorted([own, *self.ranks.values()], key=lambda share: share.rank)
        source = (
            SourceBody(engine_id=order.engine_id, address=order.address, epoch=order.epoch or None) if order else None
        )
        return TransferRecord(
            transfer_id=transfer.transfer_id,
            request_id=transfer.request_id,
            engine_id=transfer.engine.engine_id,
            source=source,
            state=self.state,
            bytes=sum(share.bytes for share in ranks),
            descriptors=sum(share.descriptors for share in ranks),
            path=next((share.path for share in ranks if share.path), ""),
            transport=next((share.transport for share in ranks if share.transport), ""),
            estimate_ms=own.estimate_ms,
            tokens=transfer.tokens,
            phases_ms=own.phases_ms,
            ranks=ranks,
            error=next((share.error for share in ranks if share.error), None),
            created_at=transfer.created_at,
        )

    def ordered(self, order: Order, *, exactly: bool) -> bool:
        """Whether the job has this order. Raises KvferryError (`order_conflict`) when it has another.

        Orders of one request that reach a rank in several ways need only agree on the source (`exactly` false).
        """
        known = self.transfer.order
        if known is None:
            return False
        if known.engine_id != order.engine_id or (exactly and known != order):
            raise self.conflict(f"was ordered already, otherwise, from {known.engine_id} at {known.address}")
        return True

    def check_reserved(self, reservation: Reservation | None) -> None:
        """Raise KvferryError (`receive_conflict`) when other blocks are reserved."""
        held = self.transfer.reservation
        if reservation is not None and held is not None and held != reservation:
            raise KvferryError(
                "receive_conflict",
                f"request {self.transfer.request_id} has other blocks reserved already",
                field="request_id",
                value=self.transfer.request_id,
                remedy="abort it before reserving other blocks",
            )

    def conflict(self, why: str) -> KvferryError:
        return KvferryError(
            "order_conflict",
            f"request {self.transfer.request_id} {why}",
            field="request_id",
            value=self.transfer.request_id,
            remedy="use one request id for one order",
        )

    def join(self, origin: Origin) -> None:
        """An attempt of another rank takes part in this job."""
        before = self.origins.get(origin.rank)
        if before is not None and before != origin.attempt:
            self.past |= {before}
        self.origins[origin.rank] = origin.attempt

    def outlived_by(self, origin: Origin) -> bool:
        """Whether the attempt is a later one than this job, which has ended, was part of."""
        before = self.origins.get(origin.rank)
        unheard_of = before is None and bool(origin.again) and not self.again
        later = self.transfer.order is None or unheard_of or (before is not None and before != origin.attempt)
        return self.transfer.ended.is_set() and later

    def outlives(self, origin: Origin) -> bool:
        """Whether the attempt seems to be of a time before this job: that rank's first, where this rank tries again."""
        return self.again and origin.again is False

    def meant_by(self, origin: Origin) -> bool:
        """Whether what is said of this attempt concerns this job."""
        return self.origins.get(origin.rank) == origin.attempt
