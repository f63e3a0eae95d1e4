"""The destination side: one attempt at one request, from rendezvous to verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from kvferry.errors import Conflict, Deadline, Internal, KvferryError
from kvferry.protocol import reading as r
from kvferry.protocol import transfer_events as t
from kvferry.protocol.attempts import Attempt
from kvferry.protocol.reading import Computed
from kvferry.protocol.transfer import Progress
from kvferry.protocol.transfer_events import LeaseId
from kvferry.schemas import Awaited, RankTransfer, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import TRANSFER_STATES, problem_to_proto
from kvferryd import paths
from kvferryd.aio import all_over, together
from kvferryd.config import Config
from kvferryd.ending import tried
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.paths import Flight, Move, PathName
from kvferryd.paths.checksums import compare
from kvferryd.paths.move import ARENA, Waits
from kvferryd.paths.source import SourceReader, announced, bound_to, close_reading
from kvferryd.peers.peer import PHASES, PeerEngine, PeerRank
from kvferryd.peers.peers import Peers
from kvferryd.plan import check_whole
from kvferryd.transfers.order import Order, Past, Reservation
from kvferryd.transfers.phases import Phases
from kvferryd.transport.read import Read

log = logs.get(__name__)
UNREADABLE = "raise deadline_ms, or see GET /v1/peers for what this way is worth"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The daemon, as a transfer needs it. on_end: this rank's part has ended. on_over: every rank's part has.
    on_quiet: this rank's part has ended, and nothing can be written any more. `spawn` runs work that may outlast the
    transfer."""

    config: Config
    peers: Peers
    on_end: Callable[[Transfer, Engine], None]
    on_over: Callable[[Transfer], None]
    on_quiet: Callable[[Transfer], None]
    spawn: Callable[[Coroutine[None, None, None]], object]


class Transfer:
    """An attempt at a request: its KV on its way into this rank, and how far the engine's other ranks are with theirs.

    All ranks have one deadline, which counts from the order. Until it comes, and where only the engine gave one, it
    counts from the reservation. Only the transfer's task holds the engine: an ended transfer is kept for its record,
    and no engine is kept for that.
    """

    def __init__(
        self, engine: Engine, request_id: str, attempt: Attempt, around: Surroundings, deadline_s: float | None = None
    ) -> None:
        """attempt: NO_ATTEMPT until the reservation that an order waits for says it. deadline_s: the engine's own."""
        self.transfer_id = uuid.uuid4().hex
        self.own, self.request_id = engine.session.rank, request_id
        self.attempt = attempt
        self.part = 0
        """Its number in the machine of requests."""
        self._around = around
        self.order: Order | None = None
        self.reader: peer_pb2.Reader | None = None
        """This engine, as the order's source knows it."""
        self.brought: Mapping[int, Reservation | Past] = {}
        """Reservations that came with the router's order, by rank."""
        self.reservation: Reservation | Past | None = None
        self.weights = ""
        """The engine's weights at the reservation. KV of other weights is not read."""
        self._machine: Progress | t.Past = Progress()
        self._arisen: deque[t.TransferEvent] = deque()
        """Events that the machine is still to be told; more arise while what it says is done."""
        self._doing = False
        self.state = TransferState.WAITING
        """The state of this rank's part."""
        self.ranks: dict[int, RankTransfer] = {}
        """The other ranks' parts, on a rank that hands the order on."""
        self.handed_on = False
        """Its order came by way of rank 0: with what was left of its deadline, and this rank's tables alone."""
        self.ends_told = False
        """The ranks to which it was handed on are told that its own part was not done."""
        self.created_at = time.time()
        self.over_at: float | None = None
        self.over_number = 0
        """Which one it was of all that were over, from 1; 0 while it is not."""
        self.descriptors = 0
        self.path: PathName | None = None
        self.tokens: tuple[int, int] | None = None
        self.metadata = b""
        self.problem: KvferryError | None = None
        self.phases = Phases()
        self.waits = Waits()
        self.ended = asyncio.Event()
        """This rank's part has ended."""
        self.quiet = asyncio.Event()
        """No read can write to the destination blocks any more."""
        self._changed: asyncio.Event | None = None
        self._matched = asyncio.Event()
        self._heard = asyncio.Event()
        """Something else is to be done."""
        self._flights: list[Flight] = []
        self._readers: dict[int, SourceReader] = {}
        """Source ranks that are read; none while hands are shaken."""
        self._read: list[tuple[PeerRank, int, int]] = []
        """Source ranks that were read: bytes of each, and how many publishes it has told of."""
        self._peer: PeerEngine | None = None
        """While it is used."""
        self._last_half = Awaited.ORDER
        """Which of the two halves came last."""
        self.changes = 0
        self.encoded: tuple[object, bytes] = (None, b"")
        """The record as JSON, and what it was made of."""
        self._stop: tuple[TransferState, KvferryError] | None = None
        self._timeout: asyncio.Timeout | None = None
        self._given_s = deadline_s
        self.set_deadline(deadline_s or around.config.deadline_s)
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run(engine), name=f"transfer-{request_id}")

    # ---- the rendezvous ----

    def set_deadline(self, deadline_s: float, ordered_s: float = 0.0) -> None:
        """Seconds from now, for all ranks. ordered_s: what it was when the order came to another rank."""
        self.ordered_s = ordered_s or deadline_s
        self.deadline = asyncio.get_running_loop().time() + deadline_s
        if self._timeout is not None and not self._timeout.expired() and not self.ended.is_set():
            self._timeout.reschedule(self.deadline)

    def take_order(self, order: Order, reader: peer_pb2.Reader, *, handed: bool = False) -> None:
        """handed: by rank 0."""
        self.order, self.reader, self.handed_on = order, reader, handed
        self.phases.order_came()
        if handed:
            self.follow(order)
        if order.deadline_s is not None or not self._given_s:
            self.set_deadline(order.deadline_s or self._around.config.deadline_s, order.ordered_s)
        if self.reservation is not None:
            self._matched.set()

    def follow(self, order: Order) -> None:
        """Rank 0 reads by this order, and has handed it on."""
        if order.lease_id is not None:
            self._tell(t.Led(order.lease_id))

    def led(self, read: LeaseId) -> None:
        """Rank 0 is done, with this lease."""
        self._tell(t.Led(read))

    def take_reservation(self, reservation: Reservation, weights: str) -> None:
        self.reservation, self.weights = reservation, weights
        if self.order is not None:
            self._last_half = Awaited.RESERVATION
            self._matched.set()

    def stop(self, state: TransferState, why: KvferryError) -> None:
        """End it as failed or aborted, unless it has ended. Idempotent."""
        if self._stop is None and not self.ended.is_set():
            self._stop = (state, why)
            # A task cancelled before its first step would never say that it has ended.
            if self._task is not None and self._timeout is not None:
                self._task.cancel()

    @property
    def stopped(self) -> bool:
        """Whether this rank's part has ended, or is about to: nothing joins it any more."""
        return self._stop is not None or self.ended.is_set()

    def _on_lost(self, why: KvferryError) -> None:
        """The stream to a source rank is over. NIXL does not report a vanished host, neither for block reads nor for
        the word."""
        reading = any(isinstance(flight, Read) and not flight.quiet.done() for flight in self._flights)
        proving = isinstance(self._machine, Progress) and isinstance(self._machine.do, t.Prove)
        if reading or proving:
            self.stop(TransferState.FAILED, why)

    # ---- how it stands ----

    @property
    def announced(self) -> bool:
        """It went by what sources had announced, without waiting for them."""
        return self._machine.announced

    @property
    def lease(self) -> int:
        """The number of the lease that is read; 0 until it is known."""
        return self._machine.lease[1] if self._machine.lease else 0

    @property
    def source_epoch(self) -> str:
        """The start of the source's engine that has published it."""
        return self._machine.lease[0] if self._machine.lease else ""

    @property
    def nbytes(self) -> int:
        return self._machine.nbytes

    @property
    def trace(self) -> logs.Trace:
        return self.order.trace if self.order else logs.UNTRACED

    @property
    def waits_for(self) -> Awaited | None:
        """The reason why this rank's part waits; None while bytes move."""
        if self.state is TransferState.WAITING:
            return self.late_half
        if self.phases.unpublished_since is not None:
            return Awaited.PUBLISH
        if self.state is TransferState.CONNECTING:
            return Awaited.LEASE if self._readers else Awaited.HANDSHAKE
        if self.state is TransferState.READING and self.waits.what in (Awaited.SLOT, Awaited.PACK):
            return self.waits.what
        if self.state is TransferState.VERIFYING and isinstance(self._machine, Progress) and self._machine.awaits_first:
            return Awaited.RANK
        return None

    @property
    def over(self) -> bool:
        """Whether every rank's part has ended."""
        return self.ended.is_set() and all(rank.state.ended for rank in self.ranks.values())

    @property
    def state_of_all(self) -> TransferState:
        """Done when every rank is; failed or aborted when one is; otherwise that of the slowest rank."""
        states = [self.state, *(rank.state for rank in self.ranks.values())]
        for verdict in (TransferState.FAILED, TransferState.ABORTED):
            if verdict in states:
                return verdict
        return min(states, key=list(TransferState).index)

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes of destination blocks that a read given up on may still write."""
        return sum(flight.nbytes for flight in self._flights if self.ended.is_set() and not flight.quiet.done())

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of any rank's part; another event takes its place."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def wake(self) -> None:
        self.changes += 1
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def set_rank(self, rank: RankTransfer) -> None:
        """How far another rank is. Wakes nobody where that is known: two ranks that follow each other would tell each
        other for ever."""
        if rank == self.ranks.get(rank.rank):
            return
        if rank.state.ended:
            rank.took_ms = round(1e3 * (time.monotonic() - self.phases.ordered_at), 3)
        self.ranks[rank.rank] = rank
        self.wake()
        if self.over:
            self._around.on_over(self)
            self._let_go()

    @property
    def late_half(self) -> Awaited:
        """The half that came last, or has not come."""
        if self.order is None:
            return Awaited.ORDER
        return Awaited.RESERVATION if self.reservation is None else self._last_half

    def event(self) -> engine_pb2.Event:
        """The message to the engine at the end."""
        start, stop = self.tokens or (0, 0)
        ended = engine_pb2.TransferEnded(
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            state=self.state.value,
            transfer_state=TRANSFER_STATES[self.state],
            nbytes=self.nbytes,
            tokens=layout_pb2.TokenRange(start=start, stop=stop),
            metadata=self.metadata,
            lease=self.lease,
            blocks_safe=self.quiet.is_set(),
            problem=problem_to_proto(self.problem) if self.problem else None,
        )
        return engine_pb2.Event(transfer_ended=ended)

    # ---- this rank's part, from match to end ----

    async def _run(self, engine: Engine) -> None:
        why: KvferryError | None = None
        aborted = False
        try:
            if self._stop is not None:
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout_at(self.deadline) as self._timeout:
                    await self._matched.wait()
                    await self._transfer(engine)
            except TimeoutError:
                why = self._late()
        except asyncio.CancelledError:
            state, why = self._stop or (TransferState.ABORTED, Conflict("aborted", "the daemon stops"))
            aborted = state is TransferState.ABORTED
        except Exception as error:  # noqa: BLE001  NIXL's and torch's are of many kinds
            self._broke(error)
            why = self._stop[1] if self._stop is not None else None
        if why is not None:
            self._tell(t.Stop(why, aborted))
        verdict = self._progress.do
        self._end(engine, verdict if isinstance(verdict, t.Finish) else t.Finish(TransferState.FAILED, problem=why))

    def _late(self) -> KvferryError:
        source, asked = (self.order.engine_id, self.order.address) if self.order else ("", "")
        match self.waits_for:
            case Awaited.ORDER:
                why = "while waiting for the router's order"
                remedy = "see whether the router ordered this request, and at this engine's daemon"
            case Awaited.RESERVATION:
                why = f"while waiting for the engine's reservation: {self.own.engine_id} reserved no blocks"
                remedy = "see whether that engine has the request, and room for it"
            case Awaited.HANDSHAKE:
                held_up = f"; {why}" if (why := self._around.peers.held_up) else ""
                why = f"while shaking hands with engine {source} at {asked}{held_up}"
                remedy = "see whether they live, and the network between"
            case Awaited.LEASE:
                silent = ", ".join(reader.source.address for reader in self._unanswered) or asked
                why = f"while waiting for {silent} to say whether engine {source} has published it"
                remedy = "see whether that daemon stands still"
            case Awaited.PUBLISH:
                assert self.phases.unpublished_since is not None
                published = min(reader.lease.num_tokens for reader in self._readers.values())
                silent_s = time.monotonic() - self.phases.unpublished_since
                so_far = f"{published} tokens came, and none in the last {silent_s:.1f} s" if published else "none came"
                why = f"while waiting for the publish of engine {source}: {so_far}"
                remedy = "see whether its prefill goes on; raise deadline_ms if it only takes long"
            case None if isinstance(self._progress.do, t.Prove):
                sources = ", ".join(reader.source.address for reader in self._readers.values())
                why, remedy = f"while reading at {sources} whether the lease held", UNREADABLE
            case Awaited.RANK:
                why = "while waiting for rank 0 of the same engine to say which lease it reads"
                remedy = "see that rank's record of the transfer, and whether its daemon stands still"
            case Awaited.SLOT | Awaited.PACK | None:
                why, remedy = f"while {self.state.value}", UNREADABLE
        why = f"the deadline passed {why}"
        return Deadline("deadline", why, field="deadline_ms", value=round(self.ordered_s * 1e3), remedy=remedy)

    @property
    def _unanswered(self) -> list[SourceReader]:
        """The leases of which the source has said nothing."""
        return [reader for reader in self._readers.values() if not reader.lease.version]

    async def _transfer(self, engine: Engine) -> None:
        """Do what the machine says, until it has a verdict. Updates of the source are heard meanwhile."""
        assert self.order is not None and isinstance(self.reservation, Reservation)
        # The reservation may have come first, from a call that knew nothing of the router's.
        logs.begin(request_id=self.request_id, transfer_id=self.transfer_id, **self.trace.about)
        order, reservation = self.order, self.reservation
        computed = Computed(reservation.digest, self.weights)
        sums = self._around.config.checksum
        self._tell(
            t.Match(
                t.Wanted(self.request_id, self.own.rank, order.epoch, order.lease, computed, reservation.tokens, sums)
            )
        )
        while not isinstance(do := self._progress.do, t.Finish):
            if isinstance(do, t.Listen):
                self._heard.clear()
                await self._heard.wait()
                continue
            try:
                self._tell(await self._do(engine, order, reservation, do))
            except KvferryError as why:
                self._tell(t.Failed(why))

    async def _do(
        self,
        engine: Engine,
        order: Order,
        reservation: Reservation,
        do: t.Meet | t.Move | t.Drain | t.Prove | t.Compare,
    ) -> t.TransferEvent:
        """How it went. Raises KvferryError."""
        if isinstance(do, t.Meet):
            return await self._meet(engine, order, reservation)
        peer, readers = self._peer, list(self._readers.values())
        assert peer is not None
        match do:
            case t.Move():
                return await self._carry(engine, peer, order, reservation, do)
            case t.Drain():
                log.info("announcement out of date", request_id=self.request_id)
                for flight in self._flights:
                    flight.abandon()
                await all_over([flight.quiet for flight in self._flights])
                self._flights.clear()
                return t.Drained()
            case t.Prove(words):
                alone = peer.users == 1
                await together(self._readers[rank].verify(engine.agent, alone=alone) for rank in sorted(words))
                return t.Proven()
            case t.Compare(tokens):
                await compare(engine, peer, readers, reservation.tables, tokens, self.deadline)
                return t.Compared()

    async def _meet(self, engine: Engine, order: Order, reservation: Reservation) -> t.Met:
        self._leave_peer()
        peer = self._peer = await self._around.peers.use(engine, order.engine_id, order.address, order.epoch)
        check_whole(peer.plan, reservation.tables, reservation.tokens or (0, 0))
        read = peer.plan.reads_from or (min(peer.ranks),)  # at least one: it has the metadata and the verdict
        told = {rank: announced(peer.ranks[rank], self.request_id, order.lease) for rank in read}
        return t.Met(peer.epoch, told, [rank for rank in sorted(peer.ranks) if rank not in told], peer.plan.grain)

    async def _carry(
        self, engine: Engine, peer: PeerEngine, order: Order, reservation: Reservation, do: t.Move
    ) -> t.Moved:
        readers, own = list(self._readers.values()), reservation.tables
        rest = reservation.tokens[1] if reservation.tokens and reservation.zero else None
        bound = await bound_to(peer.plan, readers, own, do.tokens, states=do.states, without=do.without, rest=rest)
        moved = t.Moved()
        if bound.nbytes:
            path = await paths.choose(order.way or self._around.config.way, bound, engine, peer)
            self.path = path.name
            began = time.monotonic()
            move = Move(
                bound,
                own,
                do.tokens,
                do.states,
                engine,
                peer,
                readers,
                order.priority,
                self.deadline,
                self._flights,
                self.waits,
            )
            went = await path.move(move)
            self.phases.moved(began)
            self.descriptors += went.descriptors
            moved = t.Moved({rank: bound.nbytes_by_rank[rank] for rank in went.ranks}, went.packed, went.failed)
        if do.states and moved.failed is None:
            self.phases.flew(self._flights)
        return moved

    # ---- the machine ----

    @property
    def _progress(self) -> Progress:
        """Until it is over and quiet."""
        assert isinstance(self._machine, Progress)
        return self._machine

    def _tell(self, event: t.TransferEvent) -> None:
        """Events that arise while something is done for one are told after it; none changes what is over and quiet."""
        if isinstance(self._machine, t.Past):
            return
        self._arisen.append(event)
        if self._doing:
            return
        self._doing = True
        try:
            while self._arisen:
                self._tell_next(self._arisen.popleft())
        finally:
            self._doing = False

    def _tell_next(self, event: t.TransferEvent) -> None:
        it = self._progress
        before, lease = it.do, it.lease
        try:
            effects = it.on(event, asyncio.get_running_loop().time())
        except Exception as error:  # noqa: BLE001  a bug of ours ends this attempt, and no stream
            self._broke(error)
            return
        for effect in effects:
            try:
                self._take(effect)
            except Exception as error:  # noqa: BLE001
                self._broke(error)
        awaits = it.awaits_publish
        if it.state is not self.state and not it.state.ended:
            self._enter(it.state)
        elif it.lease != lease or awaits is not (self.phases.unpublished_since is not None):
            self.wake()
        if awaits:
            self.phases.publish_awaited()
        else:
            self.phases.published()
        self._note_wait(event)
        if it.do is not before:
            self._heard.set()

    def _note_wait(self, event: t.TransferEvent) -> None:
        """Keep the wait that this event has ended, if it has."""
        awaits, was = self.waits_for, self.waits.what
        if awaits is was or not self.waits.turn(awaits) or was is None:
            return
        match was:
            case Awaited.ORDER | Awaited.RESERVATION:
                late = self.late_half
                self.waits.keep(late, "router" if late is Awaited.ORDER else self.own.engine_id)
            case Awaited.HANDSHAKE:
                steps = self._peer.took_s if self._peer is not None else {}
                at = self.order.address if self.order else ""
                self.waits.keep(was, at, max(steps, key=lambda step: steps[step], default=""))
            case Awaited.LEASE | Awaited.PUBLISH:
                self.waits.keep(was, self._told_last(event))
            case Awaited.RANK:
                self.waits.keep(was, "rank 0")
            case Awaited.SLOT:  # PACK ends where it is awaited
                self.waits.keep(was, ARENA)

    def _told_last(self, event: t.TransferEvent) -> str:
        """The address of the source rank that was waited for: the one that has just told, or of those that have told
        the least."""
        if isinstance(event, t.Told) and event.rank in self._readers:
            return self._readers[event.rank].source.address
        late = min(self._readers.values(), key=lambda reader: reader.lease.num_tokens, default=None)
        return late.source.address if late is not None else ""

    def _take(self, effect: t.TransferEffect) -> None:
        peer = self._peer
        assert peer is not None
        match effect:
            case t.Forget():
                self._around.peers.forget(peer)
            case t.Say(rank, r.Close() as said) if rank not in self._readers:
                trace = peer_pb2.Trace(traceparent=self.trace.traceparent, x_request_id=self.trace.x_request_id)
                close_reading(peer.ranks[rank], said, self.request_id, self._by, trace=trace)
            case t.Say(rank, said):
                self._reader(peer, rank).take(said)

    def _broke(self, error: Exception) -> None:
        log.error("transfer broke", request_id=self.request_id, transfer_id=self.transfer_id, exc_info=error)
        self.stop(TransferState.FAILED, Internal("internal", f"the daemon failed: {type(error).__name__}"))

    def _reader(self, peer: PeerEngine, rank: int) -> SourceReader:
        if rank not in self._readers:
            read = self._progress.readings[rank]
            self._readers[rank] = SourceReader(
                peer.ranks[rank],
                read,
                self._by,
                lambda event: self._tell(t.Told(rank, event)),
                self._on_lost,
                self.trace,
            )
        return self._readers[rank]

    @property
    def _by(self) -> tuple[int, str]:
        return self.attempt.number, self.attempt.by

    # ---- the end ----

    async def _settle(self, engine: Engine) -> None:
        """Once nothing can be written any more, release the claim, tell the engine, and let the peer go."""
        await all_over([flight.quiet for flight in self._flights])
        self._be_quiet()
        safe = engine_pb2.BlocksSafe(request_id=self.request_id, transfer_id=self.transfer_id)
        with self._tried("tell the engine that its blocks are safe"):
            engine.session.tell(engine_pb2.Event(blocks_safe=safe))
        self._leave()

    def _leave(self) -> None:
        """Close the leases that were read to their end, and let the peer go."""
        with self._tried("count it as quiet"):
            self._around.on_quiet(self)
        self._flights.clear()
        self._tell(t.Quiet())
        self._leave_peer()
        with self._tried("let go of what no record needs"):
            self._let_go()

    def _leave_peer(self) -> None:
        for reader in self._readers.values():
            reader.end_timer()
        self._readers = {}
        peer, self._peer = self._peer, None
        if peer is not None:
            with self._tried("leave the peer"):
                self._around.peers.leave(peer)

    def _tried(self, step: str) -> contextlib.AbstractContextManager[None]:
        """No step of an end keeps a later one from being taken."""
        return tried(step, request_id=self.request_id, transfer_id=self.transfer_id)

    def _let_go(self) -> None:
        """Once it is over and quiet, keep what its record tells, and how to know its order and reservation again."""
        if self.over and self.quiet.is_set() and isinstance(self._machine, Progress):
            self.metadata, self._machine = b"", self._machine.past
            self._task = self._timeout = None
            self.brought = {rank: brought.past() for rank, brought in self.brought.items()}
            self.reservation = self.reservation and self.reservation.past()

    def _enter(self, state: TransferState) -> None:
        self.phases.published()
        self.phases.leave(self.state)
        self.state = state
        self.wake()

    def _end(self, engine: Engine, verdict: t.Finish) -> None:
        if verdict.state is not TransferState.DONE:
            for flight in self._flights:
                with self._tried("abandon a read"):
                    flight.abandon()
        self._read = [(each.source, each.read.nbytes, each.lease.version) for each in self._readers.values()]
        self._enter(verdict.state)
        self.tokens, self.metadata, problem = verdict.tokens, self._progress.metadata, verdict.problem
        self.phases.end()
        self.problem = problem.kept() if problem else None
        if all(flight.quiet.done() for flight in self._flights):
            self._be_quiet()
        with self._tried("tell the engine"):
            engine.session.tell(self.event())  # before anything else that the end brings
        self.ended.set()
        with self._tried("book the end"):
            self._around.on_end(self, engine)
        if self.quiet.is_set():
            self._leave()
        else:
            self._around.spawn(self._settle(engine))

    def tell_sources(self, share: RankTransfer) -> None:
        """Add how it went to what is known of its source ranks. Once, after the end: it lets go of them. share: its
        own."""
        phases_ms = share.phases_ms
        took_ms, moving_ms = phases_ms["total"] - phases_ms["waiting"], phases_ms.get("moving", 0.0)
        read, self._read = self._read, []
        for source, nbytes, version in read:
            contact = source.channel.contact
            figures = source.figures
            figures.bytes_read += nbytes
            waited = {wait.what.value: wait.ms for wait in share.waits if wait.on == source.address}
            figures.add({name: waited.get(name, phases_ms.get(name, 0.0)) for name in PHASES})
            if self.state is TransferState.DONE:
                contact.answered()
                figures.transfers += 1
                if self.path is not None and nbytes and moving_ms:
                    figures.path = self.path.value
                    figures.lately.append((took_ms, 1e3 * nbytes / moving_ms))
            elif self.problem is not None and self.problem.code == "deadline" and not version:
                contact.failed(self.problem)

    def _be_quiet(self) -> None:
        """The blocks may be reserved again."""
        self.quiet.set()
