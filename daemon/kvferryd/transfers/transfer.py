"""The destination side: one attempt at one request, as it is known, and told in its record."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable

from kvferry.errors import KvferryError
from kvferry.protocol import transfer_events as t
from kvferry.protocol.attempts import Attempt
from kvferry.protocol.states import STEP
from kvferry.protocol.transfer import Progress
from kvferry.protocol.transfer_events import LeaseId
from kvferry.schemas import Awaited, RankTransfer, TransferState
from kvferry.v1 import peer_pb2
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.paths import Flight, PathName
from kvferryd.paths.move import Waits
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.work import Surroundings, Was, Work


class Course:
    """Milliseconds of each state, of the waits in them, and of what moved the bytes. Times are monotonic, but for
    `created_at` and `over_at`: Unix time, of which the second is told by the first, since that clock may be set
    meanwhile."""

    def __init__(self) -> None:
        self.created_at = time.time()
        self.over_at: float | None = None
        """All ranks' parts have ended."""
        self.ms: defaultdict[str, float] = defaultdict(float)
        self.began = self._state_began = now = time.monotonic()
        self.ordered_at = math.inf
        self.unpublished_since: float | None = None
        """Set while the source has nothing, or nothing more, to read."""
        self.late_half = Awaited.ORDER
        """The half that comes last."""
        self.waits = Waits(now)
        self.path: PathName | None = None
        self.transport = ""
        self.descriptors = 0

    def order_came(self, *, reserved: bool) -> None:
        """reserved: the other half is there."""
        self.ordered_at = time.monotonic()
        if not reserved:
            self.late_half = Awaited.RESERVATION

    def leave(self, state: TransferState, now: float) -> None:
        """The next state begins. A wait for a publish that goes on is booked so far, and begins anew."""
        awaited = self.await_publish(now, awaited=False)
        self.ms[state.value] += 1e3 * (now - self._state_began)
        self._state_began = now
        self.await_publish(now, awaited=awaited)

    def await_publish(self, now: float, *, awaited: bool) -> bool:
        """Whether that is new. The wait is booked as such, and not as time of the state in which it was waited."""
        if awaited is (self.unpublished_since is not None):
            return False
        if self.unpublished_since is not None:
            self.ms["waiting_publish"] += 1e3 * (now - self.unpublished_since)
            self._state_began += now - self.unpublished_since
        self.unpublished_since = now if awaited else None
        return True

    def moved(self, began: float) -> None:
        """A move that began then is over, however it went."""
        self.ms["moving"] += 1e3 * (time.monotonic() - began)

    def flew(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self.ms[flight.phase] += 1e3 * flight.seconds

    def end(self) -> None:
        """The last state has been entered."""
        self.ms["total"] = 1e3 * (self._state_began - self.began)

    def over(self) -> None:
        """All ranks' parts have ended."""
        self.over_at = self.created_at + time.monotonic() - self.began

    @property
    def took_ms(self) -> float:
        """From the order to the last state; 0 where none came."""
        return round(1e3 * max(0.0, self._state_began - self.ordered_at), 3)

    def told(self) -> dict[str, float]:
        """The phases, with `waiting` as a whole and what it was for."""
        phases, unpublished = dict(self.ms), self.ms.get("waiting_publish", 0.0)
        if (half := phases.get("waiting")) is not None:
            phases |= {f"waiting_{self.late_half.value}": half, "waiting": half + unpublished}
        return {name: round(ms, 3) for name, ms in phases.items()}


class Transfer:
    """An attempt at a request: its KV on its way into this rank, and how far the engine's other ranks are with theirs.

    Its work holds the engine, the peer and the tables until nothing can be written any more. The rest is kept for the
    record.
    """

    def __init__(
        self, engine: Engine, request_id: str, attempt: Attempt, around: Surroundings, deadline_s: float | None = None,
        part: int = 0,
    ) -> None:  # fmt: skip
        """attempt: NO_ATTEMPT until the reservation that an order waits for says it. deadline_s: the engine's own.
        part: its number in the machine of requests."""
        self.transfer_id = uuid.uuid4().hex
        self.own, self.request_id = engine.session.rank, request_id
        self.attempt, self.part = attempt, part
        self.order: Order | None = None
        self.reader: peer_pb2.Reader | None = None
        """This engine, as the order's source knows it."""
        self.deadline = self.ordered_s = 0.0
        """For all ranks, on the loop's clock; and how long after the order it was."""
        self.state = TransferState.WAITING
        """The state of this rank's part."""
        self.problem: KvferryError | None = None
        self.ranks: dict[int, RankTransfer] = {}
        """The other ranks' parts, on a rank that hands the order on."""
        self.course = Course()
        self.over_number = 0
        """Which one it was of all that were over, from 1; 0 while it is not."""
        self.ended = asyncio.Event()
        """This rank's part has ended."""
        self.quiet = asyncio.Event()
        """No read can write to the destination blocks any more."""
        self.encoded: tuple[object, bytes] | None = None
        """The record as JSON, and what it was made of besides what `wake` tells of."""
        self._changed: asyncio.Event | None = None
        self.work: Work | None = Work(self, engine, around, deadline_s)
        """Until it is quiet."""
        self.read: Progress | t.Past = self.work.machine

    # ---- the rendezvous ----

    def take_order(self, order: Order, reader: peer_pb2.Reader, *, handed: bool = False) -> None:
        """handed: by rank 0."""
        self.order, self.reader = order, reader
        if handed:
            self.follow(order)
        if self.work is not None:
            self.work.take_order(order)

    def follow(self, order: Order) -> None:
        """Rank 0 reads by this order, and has handed it on."""
        if order.lease_id is not None:
            self.led(order.lease_id)

    def led(self, read: LeaseId) -> None:
        """Rank 0 reads this lease, or is done with it."""
        if self.work is not None:
            self.work.tell(t.Led(read))

    def take_reservation(self, reservation: Reservation, weights: str) -> None:
        """weights: the engine's now. KV of other weights is not read."""
        if self.work is not None:
            self.work.take_reservation(reservation, weights)

    def stop(self, state: TransferState, why: KvferryError) -> None:
        """End it as failed or aborted, unless it has ended. Idempotent."""
        if self.work is not None:
            self.work.stop(state, why)

    def let_go(self) -> None:
        """Keep what its record tells alone."""
        if self.work is not None:
            self.read, self.work = self.work.machine.past, None

    # ---- how it stands ----

    @property
    def announced(self) -> bool:
        """It went by what sources had announced, without waiting for them."""
        return self.read.announced

    @property
    def lease(self) -> int:
        """The number of the lease that is read; 0 until it is known."""
        return self.read.lease[1] if self.read.lease else 0

    @property
    def source_epoch(self) -> str:
        """The start of the source's engine that has published it."""
        return self.read.lease[0] if self.read.lease else ""

    @property
    def nbytes(self) -> int:
        return self.read.nbytes

    @property
    def tokens(self) -> tuple[int, int] | None:
        """The tokens that were read, once it is done."""
        return self.read.tokens

    @property
    def trace(self) -> logs.Trace:
        return self.order.trace if self.order else logs.UNTRACED

    @property
    def waits_for(self) -> Awaited | None:
        """The reason why this rank's part waits; None while bytes move."""
        return None if self.work is None else self.work.waits_for

    @property
    def over(self) -> bool:
        """Whether every rank's part has ended."""
        return self.ended.is_set() and all(rank.state.ended for rank in self.ranks.values())

    @property
    def state_of_all(self) -> TransferState:
        """Done when every rank is; failed or aborted when one is; otherwise that of the slowest rank."""
        if not self.ranks:
            return self.state
        states = [self.state, *(rank.state for rank in self.ranks.values())]
        for verdict in (TransferState.FAILED, TransferState.ABORTED):
            if verdict in states:
                return verdict
        return min(states, key=STEP.__getitem__)

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes of destination blocks that a read given up on may still write."""
        return 0 if self.work is None or not self.ended.is_set() else self.work.unquiet_nbytes

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of any rank's part; another event takes its place."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def wake(self) -> None:
        self.encoded = None
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def set_rank(self, rank: RankTransfer) -> None:
        """How far another rank is. Wakes nobody where that is known: two ranks that follow each other would tell each
        other for ever."""
        if rank == self.ranks.get(rank.rank):
            return
        if rank.state.ended:
            rank.took_ms = round(1e3 * (time.monotonic() - self.course.ordered_at), 3)
        self.ranks[rank.rank] = rank
        self.wake()

    def tell_sources(self, share: RankTransfer, read: Iterable[Was]) -> None:
        """Add how it went to what is known of its source ranks. share: its own."""
        phases_ms = share.phases_ms
        took_ms, moving_ms = phases_ms["total"] - phases_ms["waiting"], phases_ms.get("moving", 0.0)
        for source, nbytes, answered in read:
            contact = source.channel.contact
            figures = source.figures
            figures.bytes_read += nbytes
            waited = {str(wait.what): wait.ms for wait in share.waits if wait.on == source.address}
            figures.add(phases_ms | waited)
            if self.state is TransferState.DONE:
                contact.answered()
                figures.transfers += 1
                if share.path and nbytes and moving_ms:
                    figures.path = share.path
                    figures.lately.append((took_ms, 1e3 * nbytes / moving_ms))
            elif self.problem is not None and self.problem.code == "deadline" and not answered:
                contact.failed(self.problem)
