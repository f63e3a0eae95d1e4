"""The work of a transfer, from rendezvous to verdict: what its machine (kvferry.protocol.transfer) says is done."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvferry.errors import Conflict, Deadline, Internal, KvferryError
from kvferry.protocol import reading as r
from kvferry.protocol import transfer_events as t
from kvferry.protocol.reading import Computed
from kvferry.protocol.transfer import Progress
from kvferry.schemas import Awaited, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import TRANSFER_STATES, problem_to_proto
from kvferryd import paths
from kvferryd.aio import all_over, together
from kvferryd.config import Config
from kvferryd.ending import tried
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.observe.waits import HELPS
from kvferryd.paths import Flight, Move
from kvferryd.paths.checksums import compare
from kvferryd.paths.source import SourceReader, announced, bound_to
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.peers.peers import Meeting, Peers
from kvferryd.plan import check_whole
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transport.read import Read

if TYPE_CHECKING:
    from kvferryd.transfers.transfer import Transfer

log = logs.get(__name__)
UNREADABLE = "raise deadline_ms, or see GET /v1/peers for what this way is worth"
Was: TypeAlias = tuple[PeerRank, int, bool]
"""A source rank that was read: bytes of it, and whether it has said anything of the lease."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The daemon, as a transfer needs it. on_end: this rank's part has ended; what was read of which source rank.
    on_quiet: it has, and nothing can be written any more. `spawn` runs work that may outlast the transfer."""

    config: Config
    peers: Peers
    on_end: Callable[[Transfer, list[Was]], None]
    on_quiet: Callable[[Transfer], None]
    spawn: Callable[[Coroutine[None, None, None]], object]


class Work:
    """This rank's part of a transfer while it goes on, in a task of its own.

    All ranks have one deadline, which counts from the order. Until it comes, and where only the engine gave one, it
    counts from the reservation.
    """

    def __init__(self, of: Transfer, engine: Engine, around: Surroundings, deadline_s: float | None) -> None:
        """deadline_s: the engine's own."""
        self._of, self._engine, self._around, self._given_s = of, engine, around, deadline_s
        self.machine = Progress()
        self._arisen: deque[t.TransferEvent] = deque()
        """Events that the machine is still to be told; more arise while what it says is done."""
        self._doing = False
        self._reserved: tuple[Reservation, str] | None = None
        """With the engine's weights then."""
        self._heard = asyncio.Event()
        """Something else is to be done."""
        self._flights: list[Flight] = []
        self._readers: dict[int, SourceReader] = {}
        """Source ranks that are read; none while hands are shaken."""
        self._meeting: Meeting | None = None
        self._peer: PeerEngine | None = None
        """While it is used."""
        self._stop: tuple[TransferState, KvferryError] | None = None
        self._timeout: asyncio.Timeout | None = None
        self._set_deadline(deadline_s or around.config.deadline_s)
        self._task = asyncio.create_task(self._run(), name=f"transfer-{of.request_id}")

    # ---- the rendezvous ----

    def _set_deadline(self, deadline_s: float, ordered_s: float = 0.0) -> None:
        """Seconds from now, for all ranks. ordered_s: what it was when the order came to another rank."""
        self._of.ordered_s = ordered_s or deadline_s
        self._of.deadline = asyncio.get_running_loop().time() + deadline_s
        if self._timeout is not None and not self._timeout.expired() and not self._of.ended.is_set():
            self._timeout.reschedule(self._of.deadline)

    def take_order(self, order: Order) -> None:
        self._of.course.order_came(reserved=self._reserved is not None)
        if order.deadline_s is not None or not self._given_s:
            self._set_deadline(order.deadline_s or self._around.config.deadline_s, order.ordered_s)
        if self._reserved is not None:
            self._heard.set()

    def take_reservation(self, reservation: Reservation, weights: str) -> None:
        self._reserved = reservation, weights
        if self._of.order is not None:
            self._heard.set()

    def stop(self, state: TransferState, why: KvferryError) -> None:
        if self._stop is None and not self._of.ended.is_set():
            self._stop = (state, why)
            # A task cancelled before its first step would never say that it has ended.
            if self._timeout is not None:
                self._task.cancel()

    def _on_lost(self, why: KvferryError) -> None:
        """The stream to a source rank is over. NIXL does not report a vanished host, neither for block reads nor for
        the word."""
        reading = any(isinstance(flight, Read) and not flight.quiet.done() for flight in self._flights)
        if reading or isinstance(self.machine.do, t.Prove):
            self.stop(TransferState.FAILED, why)

    @property
    def waits_for(self) -> Awaited | None:
        """The reason why it waits; None while bytes move."""
        course = self._of.course
        match self._of.state:
            case TransferState.WAITING:
                return course.late_half
            case _ if course.unpublished_since is not None:
                return Awaited.PUBLISH
            case TransferState.CONNECTING:
                return Awaited.LEASE if self._readers else Awaited.HANDSHAKE
            case TransferState.READING if course.waits.what in (Awaited.SLOT, Awaited.PACK):
                return course.waits.what
            case TransferState.VERIFYING if self.machine.awaits_first:
                return Awaited.RANK
        return None

    @property
    def unquiet_nbytes(self) -> int:
        """Bytes of destination blocks that a read may still write."""
        return sum(flight.nbytes for flight in self._flights if not flight.quiet.done())

    # ---- this rank's part, from match to end ----

    async def _run(self) -> None:
        why: KvferryError | None = None
        aborted = False
        try:
            if self._stop is not None:
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout_at(self._of.deadline) as self._timeout:
                    await self._heard.wait()
                    await self._transfer()
            except TimeoutError:
                why = self._late()
        except asyncio.CancelledError:
            state, why = self._stop or (TransferState.ABORTED, Conflict("aborted", "the daemon stops"))
            aborted = state is TransferState.ABORTED
        except Exception as error:  # noqa: BLE001  NIXL's and torch's are of many kinds
            self._broke(error)
            why = self._stop[1] if self._stop is not None else None
        if why is not None:
            self.tell(t.Stop(why, aborted))
        verdict = self.machine.do
        self._end(verdict if isinstance(verdict, t.Finish) else t.Finish(TransferState.FAILED, problem=why))

    def _late(self) -> KvferryError:
        it, readers = self._of, self._readers.values()
        source, asked = (it.order.engine_id, it.order.address) if it.order else ("", "")
        match self.waits_for:
            case Awaited.ORDER:
                why = "while waiting for the router's order"
                remedy = "see whether the router ordered this request, and at this engine's daemon"
            case Awaited.RESERVATION:
                why = f"while waiting for the engine's reservation: {it.own.engine_id} reserved no blocks"
                remedy = "see whether that engine has the request, and room for it"
            case Awaited.HANDSHAKE:
                held_up = f"; {why}" if (why := self._around.peers.held_up) else ""
                why = f"while shaking hands with engine {source} at {asked}{held_up}"
                remedy = "see whether they live, and the network between"
            case Awaited.LEASE:
                silent = ", ".join(reader.source.address for reader in readers if not reader.answered) or asked
                why = f"while waiting for {silent} to say whether engine {source} has published it"
                remedy = "see whether that daemon stands still"
            case Awaited.RANK:
                why = "while waiting for rank 0 of the same engine to say which lease it reads"
                remedy = "see that rank's record of the transfer, and whether its daemon stands still"
            case Awaited.SLOT:
                why = f"while waiting for a slot of {it.course.waits.on}"
                remedy = HELPS[Awaited.SLOT]
            case Awaited.PACK:
                why = f"while waiting for the daemon at {it.course.waits.on} to pack"
                remedy = HELPS[Awaited.PACK]
            case Awaited.PUBLISH:
                assert it.course.unpublished_since is not None
                published = min(reader.lease.num_tokens for reader in readers)
                silent_s = time.monotonic() - it.course.unpublished_since
                so_far = f"{published} tokens came, and none in the last {silent_s:.1f} s" if published else "none came"
                why = f"while waiting for the publish of engine {source}: {so_far}"
                remedy = "see whether its prefill goes on; raise deadline_ms if it only takes long"
            case None if isinstance(self.machine.do, t.Prove):
                sources = ", ".join(reader.source.address for reader in readers)
                why, remedy = f"while reading at {sources} whether the lease held", UNREADABLE
            case None:
                why, remedy = f"while {it.state.value}", UNREADABLE
        why = f"the deadline passed {why}"
        return Deadline("deadline", why, field="deadline_ms", value=round(it.ordered_s * 1e3), remedy=remedy)

    async def _transfer(self) -> None:
        """Do what the machine says, until it has a verdict. Updates of the source are heard meanwhile."""
        it, order = self._of, self._of.order
        assert order is not None and self._reserved is not None
        # The reservation may have come first, from a call that knew nothing of the router's.
        logs.begin(request_id=it.request_id, transfer_id=it.transfer_id, **it.trace.about)
        reservation, weights = self._reserved
        computed, sums = Computed(reservation.digest, weights), self._around.config.checksum
        self.tell(
            t.Match(t.Wanted(it.request_id, it.own.rank, order.epoch, order.lease, computed, reservation.tokens, sums))
        )
        while not isinstance(do := self.machine.do, t.Finish):
            if isinstance(do, t.Listen):
                self._heard.clear()
                await self._heard.wait()
                continue
            try:
                self.tell(await self._do(order, reservation, do))
            except KvferryError as why:
                self.tell(t.Failed(why))

    async def _do(
        self, order: Order, reservation: Reservation, do: t.Meet | t.Move | t.Drain | t.Prove | t.Compare
    ) -> t.TransferEvent:
        """How it went. Raises KvferryError."""
        if isinstance(do, t.Meet):
            return await self._meet(order, reservation)
        peer, readers = self._peer, list(self._readers.values())
        assert peer is not None
        match do:
            case t.Move():
                return await self._carry(peer, readers, order, reservation, do)
            case t.Drain():
                log.info("announcement out of date", request_id=self._of.request_id)
                for flight in self._flights:
                    flight.abandon()
                await all_over([flight.quiet for flight in self._flights])
                self._flights.clear()
                return t.Drained()
            case t.Prove(words):
                agent, alone = self._engine.agent, peer.users == 1
                await together(self._readers[rank].verify(agent, alone=alone) for rank in sorted(words))
                return t.Proven()
            case t.Compare(tokens):
                await compare(self._engine, peer, readers, reservation.tables, tokens, self._of.deadline)
                return t.Compared()

    async def _meet(self, order: Order, reservation: Reservation) -> t.Met:
        self._leave_peer()
        self._meeting = self._around.peers.of(self._engine)
        peer = self._peer = await self._meeting.use(order.engine_id, order.address, order.epoch)
        check_whole(peer.plan, reservation.tables, reservation.tokens or (0, 0))
        read = peer.plan.reads_from or (min(peer.ranks),)  # at least one: it has the metadata and the verdict
        told = {rank: announced(peer.ranks[rank], self._of.request_id, order.lease) for rank in read}
        return t.Met(peer.epoch, told, [rank for rank in sorted(peer.ranks) if rank not in told], peer.plan.grain)

    async def _carry(
        self, peer: PeerEngine, readers: list[SourceReader], order: Order, reservation: Reservation, do: t.Move
    ) -> t.Moved:
        course, engine, own = self._of.course, self._engine, reservation.tables
        rest = reservation.tokens[1] if reservation.tokens and reservation.zero else None
        bound = await bound_to(peer.plan, readers, own, do.tokens, states=do.states, without=do.without, rest=rest)
        move = Move(
            bound, own, do.tokens, do.states, engine, peer, readers, order.priority, self._of.deadline,
            self._flights, course.waits,
        )  # fmt: skip
        moved = t.Moved()
        if bound.nbytes:
            path = await paths.choose(order.way or self._around.config.way, bound, engine, peer)
            course.path, course.transport = path.name, path.transport(peer)
            began = time.monotonic()
            try:
                went = await path.move(move)
            finally:
                course.moved(began)
            course.descriptors += went.descriptors
            moved = t.Moved({rank: bound.nbytes_by_rank[rank] for rank in went.ranks}, went.packed, went.failed)
        else:
            await paths.zero(move)
        if do.states and moved.failed is None:
            course.flew(self._flights)
        return moved

    # ---- the machine ----

    def tell(self, event: t.TransferEvent) -> None:
        """Events that arise while something is done for one are told after it."""
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
        it, course = self.machine, self._of.course
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
        now = time.monotonic()
        turned = course.await_publish(now, awaited=it.awaits_publish)
        if it.state is not self._of.state and not it.state.ended:
            self._enter(it.state, now)
        elif turned or it.lease != lease:
            self._of.wake()
        self._note_wait(self.waits_for, now, event)
        if it.do is not before:
            self._heard.set()

    def _note_wait(self, awaits: Awaited | None, now: float, event: t.TransferEvent | None = None) -> None:
        """Keep the wait that is over, if one is. event: that has ended it; None where the transfer ends meanwhile."""
        waits = self._of.course.waits
        was, on = waits.what, waits.on
        if awaits is was or not waits.turn(awaits, now) or was is None:
            return
        match was:
            case Awaited.ORDER | Awaited.RESERVATION:
                late = self._of.course.late_half
                waits.keep(late, "router" if late is Awaited.ORDER else self._of.own.engine_id)
            case Awaited.HANDSHAKE:
                steps = self._peer.took_s if self._peer is not None else {}
                at = self._of.order.address if self._of.order else ""
                waits.keep(was, at, max(steps, key=lambda step: steps[step], default=""))
            case Awaited.LEASE | Awaited.PUBLISH:
                reader = self._told_last(event)
                shown = isinstance(event, t.Told) and isinstance(event.event, r.Update)
                fenced = shown and reader is not None and 2 * reader.lease.fenced_s > waits.last_s
                waits.keep(Awaited.FENCE if fenced else was, reader.source.address if reader else "")
            case Awaited.RANK:
                waits.keep(was, "rank 0")
            case Awaited.SLOT | Awaited.PACK:
                waits.keep(was, on)

    def _told_last(self, event: t.TransferEvent | None) -> SourceReader | None:
        """The source rank that was waited for: the one that has just told, or of those that have told the least."""
        if isinstance(event, t.Told) and event.rank in self._readers:
            return self._readers[event.rank]
        return min(self._readers.values(), key=lambda reader: reader.lease.num_tokens, default=None)

    def _take(self, effect: t.TransferEffect) -> None:
        meeting, peer, it = self._meeting, self._peer, self._of
        assert meeting is not None and peer is not None
        match effect:
            case t.Forget():
                meeting.forget(peer)
            case t.Say(rank, r.Close() as said) if rank not in self._readers:
                trace = peer_pb2.Trace(traceparent=it.trace.traceparent, x_request_id=it.trace.x_request_id)
                peer.ranks[rank].stream.close_reading(said, it.request_id, self._by, trace)
            case t.Say(rank, said):
                self._reader(peer, rank).take(said)

    def _broke(self, error: Exception) -> None:
        it = self._of
        log.error("transfer broke", request_id=it.request_id, transfer_id=it.transfer_id, exc_info=error)
        self.stop(TransferState.FAILED, Internal("internal", f"the daemon failed: {type(error).__name__}"))

    def _reader(self, peer: PeerEngine, rank: int) -> SourceReader:
        if rank not in self._readers:
            self._readers[rank] = SourceReader(
                peer.ranks[rank], self.machine.readings[rank], self._by, lambda event: self.tell(t.Told(rank, event)),
                self._on_lost, self._of.trace,
            )  # fmt: skip
        return self._readers[rank]

    @property
    def _by(self) -> tuple[int, str]:
        return self._of.attempt.number, self._of.attempt.by

    # ---- the end ----

    def _enter(self, state: TransferState, now: float) -> None:
        self._of.course.leave(self._of.state, now)
        self._of.state = state
        self._of.wake()

    def _end(self, verdict: t.Finish) -> None:
        if verdict.state is not TransferState.DONE:
            for flight in self._flights:
                with self._tried("abandon a read"):
                    flight.abandon()
        it, problem = self._of, verdict.problem
        read = [(each.source, each.read.nbytes, each.answered) for each in self._readers.values()]
        now = time.monotonic()
        self._note_wait(None, now)
        it.course.await_publish(now, awaited=False)
        self._enter(verdict.state, now)
        it.course.end()
        it.problem = problem.kept() if problem else None
        if all(flight.quiet.done() for flight in self._flights):
            it.quiet.set()
        with self._tried("tell the engine"):
            self._engine.session.tell(self._ended())  # before anything else that the end brings
        it.ended.set()
        with self._tried("book the end"):
            self._around.on_end(it, read)
        if it.quiet.is_set():
            self._leave()
        else:
            self._around.spawn(self._settle())

    def _ended(self) -> engine_pb2.Event:
        it = self._of
        start, stop = it.tokens or (0, 0)
        ended = engine_pb2.TransferEnded(
            request_id=it.request_id,
            transfer_id=it.transfer_id,
            state=it.state.value,
            transfer_state=TRANSFER_STATES[it.state],
            nbytes=it.nbytes,
            tokens=layout_pb2.TokenRange(start=start, stop=stop),
            metadata=self.machine.metadata,
            lease=it.lease,
            blocks_safe=it.quiet.is_set(),
            problem=problem_to_proto(it.problem) if it.problem else None,
        )
        return engine_pb2.Event(transfer_ended=ended)

    async def _settle(self) -> None:
        """Once nothing can be written any more, release the claim, tell the engine, and let the peer go."""
        await all_over([flight.quiet for flight in self._flights])
        it = self._of
        it.quiet.set()
        safe = engine_pb2.BlocksSafe(request_id=it.request_id, transfer_id=it.transfer_id)
        with self._tried("tell the engine that its blocks are safe"):
            self._engine.session.tell(engine_pb2.Event(blocks_safe=safe))
        self._leave()

    def _leave(self) -> None:
        """Close the leases that were read to their end, and let the peer go."""
        with self._tried("count it as quiet"):
            self._around.on_quiet(self._of)
        self._flights.clear()
        self.tell(t.Quiet())
        self._leave_peer()
        with self._tried("let go of what no record needs"):
            self._of.let_go()

    def _leave_peer(self) -> None:
        for reader in self._readers.values():
            reader.end_timer()
        self._readers = {}
        peer, self._peer = self._peer, None
        if self._meeting is not None and peer is not None:
            with self._tried("leave the peer"):
                self._meeting.leave(peer)

    def _tried(self, step: str) -> contextlib.AbstractContextManager[None]:
        """No step of an end keeps a later one from being taken."""
        return tried(step, request_id=self._of.request_id, transfer_id=self._of.transfer_id)
