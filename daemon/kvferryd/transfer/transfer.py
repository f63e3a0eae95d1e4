"""The destination side: one transfer, from rendezvous to verdict, on this rank."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import structlog

from kvferry.errors import KvferryError
from kvferry.schemas import ErrorBody, RankTransfer, TransferState
from kvferry.tables import Tables
from kvferry.v1 import engine_pb2, layout_pb2
from kvferry.wire import problem_to_proto
from kvferryd.engine import Engine
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.peers import Peers
from kvferryd.plan import bind
from kvferryd.staging.share import Wanted, shapes
from kvferryd.states import TRANSFER, Machine
from kvferryd.transfer import direct, mapped, staged, ways
from kvferryd.transfer.flight import Flight
from kvferryd.transfer.together import together
from kvferryd.transfer.view import LeaseView, close_all, give_up, views

log = structlog.get_logger()
TRANSPORT = direct.TRANSPORT
TRANSPORTS = {direct.PATH: direct.TRANSPORT, mapped.PATH: mapped.TRANSPORT, staged.PATH: direct.TRANSPORT}
STALE = frozenset({"stale_epoch", "unknown_engine", "peer_unreachable", "peer_lost", "transport_failed"})
"""What tells that a peer is not what it was at the handshake: the next order shakes hands anew."""


@dataclass(frozen=True, slots=True)
class Order:
    """Who to read from. `deadline_s` counts from acceptance; None for the daemon's default, as an empty `way`."""

    engine_id: str
    address: str
    epoch: str = ""
    priority: int = 0
    deadline_s: float | None = None
    way: str = ""
    traceparent: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where to write on this rank. `tokens`: global [first, last); None for all that is published."""

    tables: Tables
    tokens: tuple[int, int] | None


class Transfer:
    """One request's KV on its way into one rank of an engine of ours."""

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        peers: Peers,
        deadline_s: float,
        on_end: Callable[[Transfer], None],
        spawn: Callable[[Coroutine[None, None, None]], None],
        way: str = "auto",
    ) -> None:
        self.transfer_id = uuid.uuid4().hex
        self.engine, self.request_id = engine, request_id
        self._peers, self._on_end, self._way = peers, on_end, way
        self._spawn = spawn
        self.order: Order | None = None
        self.reservation: Reservation | None = None
        self.machine: Machine[TransferState] = Machine(TRANSFER, TransferState.WAITING)
        self.created_at = time.time()
        self.nbytes = 0
        self.descriptors = 0
        self.path = ""
        self.tokens: tuple[int, int] | None = None
        self.metadata = b""
        self.problem: KvferryError | None = None
        self.announced = False
        """It went by what sources had announced, without waiting for them."""
        self.phases_ms: dict[str, float] = {}
        self.ended = asyncio.Event()
        self.quiet = asyncio.Event()
        """No read can write to the destination blocks any more."""
        self.moved = asyncio.Event()
        """Set at the next move of the state machine; another event takes its place."""
        self._began = self._phase_began = time.monotonic()
        self._deadline_s = deadline_s
        self._deadline = asyncio.get_running_loop().time() + deadline_s
        self._matched = asyncio.Event()
        self.estimate_ms: dict[str, float] = {}
        self._reads: list[Flight] = []
        self._stop: tuple[TransferState, KvferryError] | None = None
        self._timeout: asyncio.Timeout | None = None
        self._started = False
        self._waits_for = ""
        self._task = asyncio.create_task(self._run(), name=f"transfer-{request_id}")

    @property
    def state(self) -> TransferState:
        return self.machine.state

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes of destination blocks that a read given up on may still write."""
        return sum(read.nbytes for read in self._reads if self.ended.is_set() and not read.quiet.done())

    def match(self, *, order: Order | None = None, reservation: Reservation | None = None) -> None:
        """One half of the rendezvous; the second sets the transfer going."""
        if order is not None:
            self.order = order
            if order.deadline_s is not None:
                self._deadline_s = order.deadline_s
                self._deadline = asyncio.get_running_loop().time() + order.deadline_s
                if self._timeout is not None and not self.ended.is_set():
                    self._timeout.reschedule(self._deadline)
        if reservation is not None:
            self.reservation = reservation
        if self.order is not None and self.reservation is not None:
            self._matched.set()

    def stop(self, state: TransferState, why: KvferryError) -> None:
        """End it as failed or aborted, unless it has ended. Idempotent."""
        if self._stop is None and not self.ended.is_set():
            self._stop = (state, why)
            if self._started:  # a task that is cancelled before its first step would never say that it has ended
                self._task.cancel()

    def share(self) -> RankTransfer:
        """This rank's part, as it stands."""
        return RankTransfer(
            rank=self.engine.rank,
            state=self.state,
            bytes=self.nbytes,
            descriptors=self.descriptors,
            path=self.path,
            transport=TRANSPORTS.get(self.path, ""),
            estimate_ms=self.estimate_ms,
            phases_ms={name: round(ms, 3) for name, ms in self.phases_ms.items()},
            error=error_body(self.problem) if self.problem else None,
        )

    def event(self) -> engine_pb2.Event:
        """What the engine is told at the end."""
        start, stop = self.tokens or (0, 0)
        ended = engine_pb2.TransferEnded(
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            state=self.state.value,
            nbytes=self.nbytes,
            tokens=layout_pb2.TokenRange(start=start, stop=stop),
            metadata=self.metadata,
            blocks_safe=self.quiet.is_set(),
            problem=problem_to_proto(self.problem) if self.problem else None,
        )
        return engine_pb2.Event(transfer_ended=ended)

    async def _run(self) -> None:
        self._started = True
        try:
            if self._stop is not None:
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout_at(self._deadline) as self._timeout:
                    await self._matched.wait()
                    await self._transfer()
            except TimeoutError:
                raise self._late() from None
        except asyncio.CancelledError:
            state, why = self._stop or (TransferState.ABORTED, KvferryError("aborted", "the daemon stops"))
            self._end(state, why)
        except KvferryError as error:
            self._end(TransferState.FAILED, error)
        except Exception as error:
            log.exception("transfer broke", request_id=self.request_id, transfer_id=self.transfer_id)
            self._end(TransferState.FAILED, KvferryError("internal", f"the daemon failed: {type(error).__name__}"))
        else:
            self._end(TransferState.DONE, None)

    def _late(self) -> KvferryError:
        if self.state is TransferState.WAITING:
            self._waits_for = "the router's order" if self.order is None else "the engine's reservation"
        waiting = f" for {self._waits_for}" if self._waits_for else ""
        return KvferryError(
            "deadline",
            f"the deadline passed while {self.state.value}{waiting}",
            field="deadline_ms",
            value=round(self._deadline_s * 1e3),
            remedy="raise deadline_ms, or see why that phase takes so long",
        )

    async def _transfer(self) -> None:
        assert self.order is not None
        self._move(TransferState.CONNECTING)
        peer, read, others = await self._open(self.order)
        through: list[LeaseView] = []
        try:
            try:
                await self._read_and_verify(peer, read)
            except KvferryError as error:
                if not any(view.announced for view in read):
                    raise
                log.info("announcement out of date", request_id=self.request_id, code=error.code)
                await self._begin_again(read)
                await self._read_and_verify(peer, read)
        except BaseException as error:
            give_up(read)
            if isinstance(error, KvferryError) and error.code in STALE:
                self._spawn(self._peers.forget(self.engine, peer))
            raise
        else:
            through += [*read, *others]  # ranks that had nothing to be read count us as a reader that is through, too
        finally:
            self._spawn(self._settle(peer, through))

    async def _read_and_verify(self, peer: PeerEngine, read: list[LeaseView]) -> None:
        self._move(TransferState.READING)
        self.announced = any(view.announced for view in read)
        await self._read(peer, read)
        self._move(TransferState.VERIFYING)
        for phase in {one.phase for one in self._reads}:
            self.phases_ms[phase] = sum(1e3 * one.seconds for one in self._reads if one.phase == phase)
        agent = self.engine.agent
        assert agent is not None
        await together(view.verify(agent) for view in read)

    async def _begin_again(self, read: list[LeaseView]) -> None:
        """With the source's own answer instead of its announcement. Not before nothing of that is written any more."""
        self._move(TransferState.CONNECTING)
        for one in self._reads:
            one.abandon()
        await asyncio.gather(*(one.quiet for one in self._reads))
        self._reads.clear()
        self.nbytes = self.descriptors = 0
        self.estimate_ms = {}
        await together(view.confirm() for view in read)

    async def _open(self, order: Order, again: bool = True) -> tuple[PeerEngine, list[LeaseView], list[LeaseView]]:
        """Shake hands if need be and open the lease on every rank that is read; once more if the peer was stale."""
        self._waits_for = f"the handshake with {order.address}"
        peer = await self._peers.get(self.engine, order.engine_id, order.address, order.epoch)
        read, others = views(peer, self.request_id)
        peer.users += 1
        self._waits_for = f"the publish of engine {order.engine_id}"
        try:
            await together(view.advance() for view in read)
        except BaseException as error:
            give_up(read)
            stale = isinstance(error, KvferryError) and error.code in STALE
            if stale:
                await self._peers.forget(self.engine, peer)
            await self._peers.leave(self.engine, peer)
            if stale and again and not order.epoch:
                return await self._open(order, again=False)
            raise
        self._waits_for = ""
        return peer, read, others

    async def _read(self, peer: PeerEngine, read: list[LeaseView]) -> None:
        """Move tokens as they are published, and the state groups with the last of them."""
        assert self.reservation is not None
        wanted = self.reservation.tokens
        at = wanted[0] if wanted else 0
        first = at
        while True:
            published = min(view.num_tokens for view in read)
            last = not any(view.more for view in read)
            until = published if wanted is None else min(wanted[1], published)
            if last and wanted is not None and until < wanted[1]:
                raise KvferryError(
                    "tokens_unpublished",
                    f"tokens up to {wanted[1]} are wanted but {published} were published",
                    field="token_range",
                    value=f"{wanted[0]}:{wanted[1]}",
                    remedy=f"ask for tokens up to {published}",
                )
            if last and wanted is None and any(view.num_tokens != published for view in read):
                raise KvferryError(
                    "ranks_disagree",
                    "the source ranks published different numbers of tokens: "
                    + ", ".join(f"rank {view.source.rank} {view.num_tokens}" for view in read),
                    field="num_tokens",
                    value=published,
                    remedy="all ranks of an engine publish the same tokens of a request",
                )
            if last or until > at:
                tables = {view.source.rank: view.tables for view in read}
                wanted_now = Wanted((at, max(at, until)), last, shapes(self.reservation.tables))
                bound = bind(peer.plan, tables, self.reservation.tables, wanted_now.tokens, states=last)
                if bound.nbytes:
                    regions = {id: region.span for id, region in self.engine.regions.items()}
                    choice = ways.choose((self.order.way if self.order else "") or self._way, bound, self.engine, peer)
                    for name, ms in choice.estimate_ms.items():
                        self.estimate_ms[name] = self.estimate_ms.get(name, 0.0) + ms
                    self.path = choice.path
                    priority = self.order.priority if self.order else 0
                    terms = staged.Terms(read, wanted_now, self._deadline)
                    self.descriptors += await ways.move(
                        choice, bound, self.engine, regions, peer, priority, self._reads, terms
                    )
                    self.phases_ms["moving"] = self.phases_ms.get("moving", 0.0) + choice.took_ms
                self.nbytes += bound.nbytes
                for rank, nbytes in bound.nbytes_by_rank.items():
                    peer.ranks[rank].bytes_read += nbytes
                at = max(at, until)
            if last:
                break
            unfinished = [view for view in read if view.more]
            behind = [view for view in unfinished if view.num_tokens <= published]
            await together(view.advance() for view in behind or unfinished)
        self.tokens = (first, at)
        self.metadata = next((view.metadata for view in read if view.metadata), b"")
        for view in read:
            view.source.transfers += 1

    async def _settle(self, peer: PeerEngine, through: list[LeaseView]) -> None:
        """Close the leases that were read to their end. When nothing can be written any more: say so, and let the peer
        go."""
        await self.ended.wait()
        close_all(through)
        await asyncio.gather(*(read.quiet for read in self._reads))
        if not self.quiet.is_set():
            self.quiet.set()
            safe = engine_pb2.BlocksSafe(request_id=self.request_id, transfer_id=self.transfer_id)
            self.engine.tell(engine_pb2.Event(blocks_safe=safe))
        self._reads.clear()
        await self._peers.leave(self.engine, peer)

    def _move(self, to: TransferState) -> None:
        now = time.monotonic()
        self.phases_ms[self.state.value] = 1e3 * (now - self._phase_began)
        self._phase_began = now
        self.machine.move(to)
        self.moved.set()
        self.moved = asyncio.Event()

    def _end(self, state: TransferState, problem: KvferryError | None) -> None:
        for read in self._reads:
            if state is not TransferState.DONE:
                read.abandon()
        self._move(state)
        self.phases_ms["total"] = 1e3 * (time.monotonic() - self._began)
        self.problem = problem
        if all(read.quiet.done() for read in self._reads):
            self.quiet.set()
        self.engine.tell(self.event())  # the engine first
        self.ended.set()
        asyncio.get_running_loop().call_soon(self._on_end, self)


def error_body(error: KvferryError) -> ErrorBody:
    return ErrorBody(code=error.code, message=error.message, field=error.field, value=error.value, remedy=error.remedy)
