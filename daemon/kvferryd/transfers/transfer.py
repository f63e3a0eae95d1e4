"""The destination side: one attempt at one request, from rendezvous to verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass

from kvferry.errors import Conflict, Deadline, Internal, KvferryError, PeerFailed
from kvferry.protocol.attempts import Attempt
from kvferry.schemas import Awaited, RankTransfer, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import TRANSFER_STATES, problem_to_proto
from kvferryd import paths
from kvferryd.aio import all_over, together, unless
from kvferryd.config import Config
from kvferryd.ending import tried
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.paths import Flight, Move, Moved, PathName
from kvferryd.paths.checksums import compare
from kvferryd.paths.source import Computed, SourceReader, bound_to, close_all, readers_of
from kvferryd.peers.contact import LOST
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.peers import Peers
from kvferryd.plan import check_whole
from kvferryd.states import TRANSFER, Machine
from kvferryd.transfers.order import Order, Past, Reservation
from kvferryd.transfers.phases import Phases
from kvferryd.transport.read import Read

log = logs.get(__name__)
STALE = frozenset({"stale_epoch", "stale_instance", "unknown_engine", "transport_failed", *LOST})
"""Errors after which a peer is no longer what it was at the handshake: the next order shakes hands anew."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The daemon, as a transfer needs it. on_end: this rank's part has ended. on_over: every rank's part has.
    on_quiet: this rank's part has ended, and nothing can be written any more. ask_bound: which lease rank 0 reads.
    `spawn` runs work that may outlast the transfer."""

    config: Config
    peers: Peers
    on_end: Callable[[Transfer, Engine], None]
    on_over: Callable[[Transfer], None]
    on_quiet: Callable[[Transfer], None]
    ask_bound: Callable[[Transfer, Engine], Awaitable[tuple[str, int]]]
    spawn: Callable[[Coroutine[None, None, None]], object]


class Transfer:
    """One attempt at a request: its KV on its way into this rank, and how far the engine's other ranks are with theirs.

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
        self.led: Order | None = None
        """The order by which rank 0 reads, where it has handed that on."""
        self.reader: peer_pb2.Reader | None = None
        """As whom the order's source knows this engine."""
        self.brought: Mapping[int, Reservation | Past] = {}
        """Reservations that came with the router's order, by rank."""
        self.reservation: Reservation | Past | None = None
        self.weights = ""
        """The name of those that the engine had when it was reserved: what others have computed is not read."""
        self.machine: Machine[TransferState] = Machine(TRANSFER, TransferState.WAITING)
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
        self.nbytes = self.descriptors = 0
        self.path: PathName | None = None
        self.tokens: tuple[int, int] | None = None
        self.metadata = b""
        self.problem: KvferryError | None = None
        self.lease = 0
        """The number of the lease that is read; 0 until it is known."""
        self.source_epoch = ""
        """The start of the source's engine that has published it."""
        self._bound = False
        """Other ranks have been told which one it is: no other is read any more."""
        self.announced = False
        """It went by what sources had announced, without waiting for them."""
        self.phases = Phases()
        self.ended = asyncio.Event()
        """This rank's part has ended."""
        self.quiet = asyncio.Event()
        """No read can write to the destination blocks any more."""
        self._changed: asyncio.Event | None = None
        self._matched = asyncio.Event()
        self._flights: list[Flight] = []
        self._readers: list[SourceReader] = []
        """The leases that are read; none while hands are shaken."""
        self._reads: tuple[PeerEngine, list[SourceReader]] | None = None
        """The peer while it is used, and the leases that were read to their end."""
        self._last_half = Awaited.ORDER
        """Which of the two halves came last."""
        self.changes = 0
        self.encoded: tuple[object, bytes] = (None, b"")
        """The record as JSON, and what it was made of."""
        self._stop: tuple[TransferState, KvferryError] | None = None
        self._timeout: asyncio.Timeout | None = None
        self._given_s = deadline_s
        self.set_deadline(deadline_s or around.config.deadline_s)
        self._task = asyncio.create_task(self._run(engine), name=f"transfer-{request_id}")

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
        self.led = order if handed else None
        self.phases.order_came()
        if order.deadline_s is not None or not self._given_s:
            self.set_deadline(order.deadline_s or self._around.config.deadline_s, order.ordered_s)
        if self.reservation is not None:
            self._matched.set()

    def take_reservation(self, reservation: Reservation, weights: str) -> None:
        self.reservation, self.weights = reservation, weights
        if self.order is not None:
            self._last_half = Awaited.RESERVATION
            self._matched.set()

    def stop(self, state: TransferState, why: KvferryError) -> None:
        """End it as failed or aborted, unless it has ended. Idempotent."""
        if self._stop is None and not self.ended.is_set():
            self._stop = (state, why)
            if self._timeout is not None:  # a task cancelled before its first step would never say that it has ended
                self._task.cancel()

    @property
    def stopped(self) -> bool:
        """Whether this rank's part has ended, or is about to: nothing joins it any more."""
        return self._stop is not None or self.ended.is_set()

    def _on_lost(self, why: KvferryError) -> None:
        """The stream to a source rank is over. Of a host that has vanished NIXL says nothing to a read under way, be it
        of blocks or of the lease's word."""
        reading = any(isinstance(flight, Read) and not flight.quiet.done() for flight in self._flights)
        if reading or self.state is TransferState.VERIFYING:
            self.stop(TransferState.FAILED, why)

    # ---- how it stands ----

    @property
    def state(self) -> TransferState:
        """Of this rank's part."""
        return self.machine.state

    @property
    def trace(self) -> logs.Trace:
        return self.order.trace if self.order else logs.UNTRACED

    @property
    def waits_for(self) -> Awaited | None:
        """What this rank's part waits for, while nothing moves."""
        if self.state is TransferState.WAITING:
            return self.late_half
        if self.phases.unpublished_since is not None:
            return Awaited.PUBLISH
        if self.state is TransferState.CONNECTING:
            return Awaited.LEASE if self._readers else Awaited.HANDSHAKE
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
        """What the engine is told at the end."""
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
        try:
            if self._stop is not None:
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout_at(self.deadline) as self._timeout:
                    await self._matched.wait()
                    await self._transfer(engine)
            except TimeoutError:
                raise self._late() from None
        except asyncio.CancelledError:
            state, why = self._stop or (TransferState.ABORTED, Conflict("aborted", "the daemon stops"))
            self._end(engine, state, why)
        except KvferryError as error:
            self._end(engine, TransferState.FAILED, error)
        except Exception as error:
            log.exception("transfer broke", request_id=self.request_id, transfer_id=self.transfer_id)
            self._end(engine, TransferState.FAILED, Internal("internal", f"the daemon failed: {type(error).__name__}"))
        else:
            self._end(engine, TransferState.DONE, None)

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
                published = min(reader.lease.num_tokens for reader in self._readers)
                silent_s = time.monotonic() - self.phases.unpublished_since
                so_far = f"{published} tokens came, and none in the last {silent_s:.1f} s" if published else "none came"
                why = f"while waiting for the publish of engine {source}: {so_far}"
                remedy = "see whether its prefill goes on; raise deadline_ms if it only takes long"
            case None:
                why = f"while {self.state.value}"
                remedy = "raise deadline_ms, or see GET /v1/peers for what this way is worth"
        why = f"the deadline passed {why}"
        return Deadline("deadline", why, field="deadline_ms", value=round(self.ordered_s * 1e3), remedy=remedy)

    @property
    def _unanswered(self) -> list[SourceReader]:
        """The leases of which the source has said nothing."""
        return [reader for reader in self._readers if not reader.lease.version]

    async def _transfer(self, engine: Engine) -> None:
        assert self.order is not None
        # The reservation may have come first, from a call that knew nothing of the router's.
        logs.begin(request_id=self.request_id, transfer_id=self.transfer_id, **self.trace.about)
        self._move(TransferState.CONNECTING)
        peer, readers, others = await self._open(engine, self.order)
        through: list[SourceReader] = []
        self._reads = peer, through
        whole: dict[int, int] = {}
        try:
            try:
                await self._read_and_verify(engine, peer, readers, whole)
            except KvferryError as error:
                if not any(reader.announced for reader in readers):
                    raise
                log.info("announcement out of date", request_id=self.request_id, code=error.code)
                await self._ask_again(readers)
                await self._read_and_verify(engine, peer, readers, whole)
            through += [*readers, *others]  # ranks with nothing to read count this rank as a reader that has finished
        except BaseException as error:
            self._give_up(peer, readers, self._stop[1] if self._stop is not None else error)
            raise

    async def _open(self, engine: Engine, order: Order) -> tuple[PeerEngine, list[SourceReader], list[SourceReader]]:
        """Shake hands if need be and open the lease on every rank that is read; once more if the peer was stale."""
        peers = self._around.peers
        assert isinstance(self.reservation, Reservation)
        for again in (True, False):
            peer = await peers.use(engine, order.engine_id, order.address, order.epoch)
            readers, others = readers_of(
                peer, self.request_id, order.lease, (self.attempt.number, self.attempt.by),
                Computed(self.reservation.digest, self.weights),
                self.trace,
                self._on_unpublished, self._on_lost,
            )  # fmt: skip
            self._readers = readers
            try:
                await together(reader.advance() for reader in readers)
                break
            except BaseException as error:
                stale = self._give_up(peer, readers, error)
                with self._tried("leave the peer"):
                    peers.leave(peer)
                over = isinstance(error, KvferryError) and error.code == "stale_epoch" and order.epoch
                if not stale or not again or over:
                    raise
                self._readers = []
                self.phases.published()  # this source, which said `unpublished`, is not asked again
        self.phases.published()
        return peer, readers, others

    def _on_unpublished(self) -> None:
        """The source has not got the request yet: what is waited for from now on is its engine."""
        if self.phases.unpublished_since is None:
            self.phases.publish_awaited()
            self.wake()

    def _give_up(self, peer: PeerEngine, readers: list[SourceReader], why: BaseException) -> bool:
        """Close the leases, unread; whether the peer is no longer what it was at the handshake."""
        close_all(readers, complete=False)
        stale = isinstance(why, KvferryError) and why.code in STALE
        if stale:
            with self._tried("forget the peer"):
                self._around.peers.forget(peer)
        return stale

    async def _ask_again(self, readers: list[SourceReader]) -> None:
        """Once nothing of before can be written, have the answers of the source ranks that were read by announcements.
        The others keep what they have."""
        if self.state is not TransferState.CONNECTING:  # nothing was read where no lease was agreed on
            self._move(TransferState.CONNECTING)
        for flight in self._flights:
            flight.abandon()
        await all_over([flight.quiet for flight in self._flights])
        self._flights.clear()
        await together(reader.ask_again() for reader in readers if reader.announced)

    async def _read_and_verify(
        self, engine: Engine, peer: PeerEngine, readers: list[SourceReader], whole: dict[int, int]
    ) -> None:
        """whole: bytes of each source rank that was read to its end, and proven by that."""
        await self._agree(readers, whole)
        self._move(TransferState.READING)
        self.announced = any(reader.announced for reader in readers)
        self._bind(peer, readers)
        moves = await self._read(engine, peer, readers, whole)
        self._move(TransferState.VERIFYING)
        self.phases.flew(self._flights)
        unproven = [reader for reader in readers if not paths.packed_whole(reader.source.rank, moves)]
        unproven = [reader for reader in unproven if reader.source.rank not in whole]
        compares = bool(engine.rank)
        if compares and self.led is not None and self.led.lease_id is not None:
            self._check_first(self.led.lease_id)
            compares = False
        proofs = [reader.verify(engine.agent, alone=peer.users == 1) for reader in unproven]
        if compares and not self.announced:
            proofs.append(self._compare_lease(engine))
        await together(proofs)
        if compares and self.announced:  # rank 0 is bound by what it tells: it is asked about no lease that has ended
            await self._compare_lease(engine)
        if self._around.config.checksum:
            assert isinstance(self.reservation, Reservation) and self.tokens is not None
            await compare(engine, peer, readers, self.reservation.tables, self.tokens, self.deadline)

    async def _agree(self, readers: list[SourceReader], whole: dict[int, int]) -> None:
        """On the newest lease that any source rank has told of: the engine publishes it on all of them. Those that have
        told of an older one are asked for it, and what was read of theirs is dropped."""
        newest = max(reader.lease.lease for reader in readers)
        behind = [reader for reader in readers if reader.lease.lease < newest]
        if not behind or self._bound or (self.order is not None and self.order.lease):
            return
        for reader in behind:
            whole.pop(reader.source.rank, None)
        await together(reader.ask_for(newest) for reader in behind)
        self.phases.published()

    def _bind(self, peer: PeerEngine, readers: list[SourceReader]) -> None:
        """To one lease, on all source ranks and for all ranks of this engine. Raises KvferryError (`lease_changed`)."""
        numbers = {reader.lease.lease for reader in readers}
        if len(numbers) > 1:
            by_rank = ", ".join(f"rank {reader.source.rank} lease {reader.lease.lease}" for reader in readers)
            raise lease_changed(self.request_id, f"the source's ranks have different leases: {by_rank}")
        found = peer.epoch, numbers.pop()
        if self._bound and found != (self.source_epoch, self.lease):
            raise lease_changed(self.request_id, f"lease {self.lease} was read so far, and {found[1]} is there now")
        wanted = self.order.lease if self.order is not None else 0
        if wanted not in (0, found[1]):
            raise lease_changed(self.request_id, f"lease {wanted} was ordered, and the source has sent {found[1]}")
        self.source_epoch, self.lease = found
        self.wake()

    async def bound(self, read: tuple[str, int]) -> tuple[str, int]:
        """(the source's epoch, the lease's number), for another rank to compare; no other is read from now on. One that
        was announced may be out of date: unless the other rank has read the same, and proven it, it is known only at
        the end. read: by the other rank. The caller bounds the wait. Raises KvferryError
        where this part ends before it is known."""
        while not self.lease or (
            self.announced and self.state is not TransferState.DONE and read != (self.source_epoch, self.lease)
        ):
            if self.ended.is_set():
                why = f"rank {self.own.rank} of the same engine has found no lease"
                raise PeerFailed("rank_failed", why, field="rank", value=self.own.rank)
            await self.changed.wait()
        self._bound = True
        return self.source_epoch, self.lease

    async def _compare_lease(self, engine: Engine) -> None:
        """Raises KvferryError (`lease_changed`)."""
        self._check_first(await self._around.ask_bound(self, engine))

    def _check_first(self, first: tuple[str, int]) -> None:
        """Rank 0 reads what was read here. Raises KvferryError (`lease_changed`)."""
        if first != (self.source_epoch, self.lease):
            ours = f"lease {self.lease} of epoch {self.source_epoch}"
            why = f"rank {self.own.rank} has read {ours}, rank 0 lease {first[1]} of epoch {first[0]}"
            raise lease_changed(self.request_id, why)

    async def _read(
        self, engine: Engine, peer: PeerEngine, readers: list[SourceReader], whole: dict[int, int]
    ) -> list[Moved]:
        """Move tokens as they are published, and the state groups with the last of them. whole: as of
        `_read_and_verify`; of those ranks nothing is read, and others are added where a rank fails alone."""
        assert isinstance(self.reservation, Reservation) and self.order is not None
        _check_one_prompt(readers)
        wanted = self.reservation.tokens
        check_whole(peer.plan, self.reservation.tables, wanted or (0, 0))  # before the first part of it is moved
        first = at = wanted[0] if wanted else 0
        rest = wanted[1] if wanted and self.reservation.zero else None
        moves: list[Moved] = []
        done, self.nbytes = dict(whole), sum(whole.values())
        read: Counter[int] = Counter()
        while True:
            published = min(reader.lease.num_tokens for reader in readers)
            last = not any(reader.lease.more for reader in readers)
            if last:
                _check_published(readers, published, wanted)
            until = published if wanted is None else min(wanted[1], published)
            until -= 0 if last else until % peer.plan.grain
            if last or until > at:
                for reader in readers:
                    reader.check()
                own, tokens = self.reservation.tables, (at, max(at, until))
                bound = await bound_to(peer.plan, readers, own, tokens, states=last, without=done, rest=rest)
                if bound.nbytes:
                    way = self.order.way or self._around.config.way
                    path = await paths.choose(way, bound, engine, peer)
                    self.path = path.name
                    began = time.monotonic()
                    move = Move(
                        bound, own, tokens, last, engine, peer, readers, self.order.priority, self.deadline,
                        self._flights,
                    )  # fmt: skip
                    moves.append(moved := await path.move(move))
                    self.phases.moved(began)
                    self.descriptors += moved.descriptors
                    by_rank = {rank: bound.nbytes_by_rank[rank] for rank in moved.ranks}
                    read.update(by_rank)
                    for reader in readers:
                        reader.nbytes += by_rank.get(reader.source.rank, 0)
                    if moved.failed is not None:
                        if last:
                            whole |= {rank: read[rank] for rank in by_rank if paths.packed_whole(rank, moves)}
                        raise moved.failed
                    self.nbytes += bound.nbytes
                at = tokens[1]
            if last:
                break
            self.phases.publish_awaited()
            unfinished = [reader for reader in readers if reader.lease.more]
            behind = [reader for reader in unfinished if reader.lease.num_tokens <= published] or unfinished
            # The others have nothing to say but that their reading is over.
            more = together(reader.advance() for reader in behind)
            await unless(more, (reader.over() for reader in readers if reader not in behind))
            self.phases.published()
        self.tokens = (first, at)
        self.metadata = next((reader.lease.metadata for reader in readers if reader.lease.metadata), b"")
        return moves

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
        if self._reads is not None:
            (peer, through), self._reads = self._reads, None
            for reader in through:
                reader.named = self.lease  # ranks with nothing to read close the one that the others have read
            close_all(through, complete=True)
            with self._tried("leave the peer"):
                self._around.peers.leave(peer)
        with self._tried("let go of what no record needs"):
            self._let_go()

    def _tried(self, step: str) -> contextlib.AbstractContextManager[None]:
        """No step of an end keeps a later one from being taken."""
        return tried(step, request_id=self.request_id, transfer_id=self.transfer_id)

    def _let_go(self) -> None:
        """Once it is over and quiet, keep what its record tells, and how to know its order and reservation again."""
        if self.over and self.quiet.is_set():
            self.metadata = b""
            self.brought = {rank: brought.past() for rank, brought in self.brought.items()}
            self.reservation = self.reservation and self.reservation.past()

    def _move(self, to: TransferState) -> None:
        self.phases.leave(self.state)
        self.machine.move(to)
        self.wake()

    def _end(self, engine: Engine, state: TransferState, problem: KvferryError | None) -> None:
        if state is not TransferState.DONE:
            for flight in self._flights:
                with self._tried("abandon a read"):
                    flight.abandon()
            self.phases.published()
        self._move(state)
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

    def tell_sources(self, phases_ms: Mapping[str, float]) -> None:
        """Add how it went to what is known of its source ranks. Once, after the end: it lets go of them. phases_ms: of
        its share."""
        took_ms, moving_ms = phases_ms["total"] - phases_ms["waiting"], phases_ms.get("moving", 0.0)
        readers, self._readers = self._readers, []
        for reader in readers:
            source, contact = reader.source, reader.source.channel.contact
            source.bytes_read += reader.nbytes
            if self.state is TransferState.DONE:
                contact.answered()
                source.transfers += 1
                if self.path is not None and reader.nbytes and moving_ms:
                    source.path = self.path.value
                    source.lately.append((took_ms, 1e3 * reader.nbytes / moving_ms))
            elif self.problem is not None and self.problem.code == "deadline" and not reader.lease.version:
                contact.failed(self.problem)

    def _be_quiet(self) -> None:
        """The blocks may be reserved again."""
        self.quiet.set()


def lease_changed(request_id: str, why: str) -> KvferryError:
    """The error for an attempt of which one part is of one lease, and another of another."""
    remedy = "try again, in a new attempt: the request was published anew meanwhile"
    return Conflict("lease_changed", why, field="request_id", value=request_id, remedy=remedy)


def _check_one_prompt(readers: list[SourceReader]) -> None:
    """What the ranks have published is of one prompt, by its digest. Raises KvferryError."""
    if len({reader.lease.digest for reader in readers}) > 1:
        by_rank = ", ".join(f"rank {reader.source.rank} {reader.lease.digest.hex() or 'none'}" for reader in readers)
        why = "the source ranks published different prompts under one id, as their digests say"
        remedy = "all ranks of an engine publish one prompt, with its digest, under a request's id"
        raise Conflict("ranks_disagree", why, field="digest", value=by_rank, remedy=remedy)


def _check_published(readers: list[SourceReader], published: int, wanted: tuple[int, int] | None) -> None:
    """All that is wanted has been published, by all ranks alike. Raises KvferryError."""
    if wanted is not None and published < wanted[1]:
        why, remedy = f"only tokens up to {published} were published", f"ask for tokens up to {published}"
        raise Conflict("tokens_unpublished", why, field="token_range", value=f"{wanted[0]}:{wanted[1]}", remedy=remedy)
    if wanted is None and any(reader.lease.num_tokens != published for reader in readers):
        by_rank = ", ".join(f"rank {reader.source.rank} {reader.lease.num_tokens}" for reader in readers)
        why = f"the source ranks published different numbers of tokens: {by_rank}"
        remedy = "all ranks of an engine publish the same tokens of a request"
        raise Conflict("ranks_disagree", why, field="num_tokens", value=published, remedy=remedy)
