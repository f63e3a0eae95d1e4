"""The destination side: one attempt at one request, from rendezvous to verdict."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from kvferry.errors import Conflict, Deadline, Internal, KvferryError
from kvferry.schemas import ErrorBody, RankTransfer, TransferRecord, TransferState
from kvferry.v1 import engine_pb2, layout_pb2
from kvferry.wire import problem_to_proto
from kvferryd import logs, paths
from kvferryd.aio import together
from kvferryd.engine import Engine
from kvferryd.paths import Flight, Move, Moved, PathName
from kvferryd.paths.checksums import compare
from kvferryd.paths.source import SourceReader, close_all, readers_of
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.peers import Peers
from kvferryd.plan import bind
from kvferryd.states import TRANSFER, Machine
from kvferryd.transfers.claims import Claim
from kvferryd.transfers.order import Order, Reservation

log = logs.get(__name__)
STALE = frozenset({"stale_epoch", "unknown_engine", "peer_unreachable", "peer_lost", "transport_failed"})
"""Errors after which a peer is no longer what it was at the handshake: the next order shakes hands anew."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a transfer needs of its daemon. `spawn` runs work that may outlast the transfer."""

    peers: Peers
    way: str
    deadline_s: float
    on_end: Callable[[Transfer], None]
    spawn: Callable[[Coroutine[None, None, None]], None]
    checksum: bool = False


class Transfer:
    """One attempt at a request: its KV on its way into this rank, and how far the engine's other ranks are with theirs.

    All ranks have one deadline, which counts from the order (before it comes: from the reservation).
    """

    def __init__(
        self, engine: Engine, request_id: str, attempt: int, around: Surroundings, *, counted: bool = True
    ) -> None:
        """counted: the daemon counted the attempt; otherwise the orderer gave its number."""
        self.transfer_id = uuid.uuid4().hex
        self.engine, self.request_id = engine, request_id
        self.attempt, self.counted = attempt, counted
        self._around = around
        self.order: Order | None = None
        self.brought: dict[int, Reservation] = {}
        """Reservations that came with the router's order, by rank."""
        self.reservation: Reservation | None = None
        self._claim: Claim | None = None
        self.machine: Machine[TransferState] = Machine(TRANSFER, TransferState.WAITING)
        self.ranks: dict[int, RankTransfer] = {}
        """The other ranks' parts, on a rank that hands the order on."""
        self.created_at = time.time()
        self.nbytes = self.descriptors = 0
        self.path: PathName | None = None
        self.tokens: tuple[int, int] | None = None
        self.metadata = b""
        self.problem: KvferryError | None = None
        self.announced = False
        """It went by what sources had announced, without waiting for them."""
        self.phases_ms: defaultdict[str, float] = defaultdict(float)
        self.ended = asyncio.Event()
        """This rank's part has ended."""
        self.quiet = asyncio.Event()
        """No read can write to the destination blocks any more."""
        self.changed = asyncio.Event()
        """Set at the next change of any rank's part; another event takes its place."""
        self._began = self._phase_began = time.monotonic()
        self._matched = asyncio.Event()
        self._flights: list[Flight] = []
        self._stop: tuple[TransferState, KvferryError] | None = None
        self._timeout: asyncio.Timeout | None = None
        self._waits_for = ""
        self.set_deadline(around.deadline_s)
        self._task = asyncio.create_task(self._run(), name=f"transfer-{request_id}")

    # ---- the rendezvous ----

    def set_deadline(self, deadline_s: float) -> None:
        """Seconds from now, for all ranks."""
        self._deadline_s = deadline_s
        self.deadline = asyncio.get_running_loop().time() + deadline_s
        if self._timeout is not None and not self._timeout.expired() and not self.ended.is_set():
            self._timeout.reschedule(self.deadline)

    def take_order(self, order: Order) -> None:
        self.order = order
        if order.deadline_s is not None:
            self.set_deadline(order.deadline_s)
        if self.reservation is not None:
            self._matched.set()

    def take_reservation(self, reservation: Reservation, claim: Claim) -> None:
        """The claim is this transfer's from now on; it is released when the transfer is quiet."""
        self.reservation, self._claim = reservation, claim
        if self.order is not None:
            self._matched.set()

    def stop(self, state: TransferState, why: KvferryError) -> None:
        """End it as failed or aborted, unless it has ended. Idempotent."""
        if self._stop is None and not self.ended.is_set():
            self._stop = (state, why)
            if self._timeout is not None:  # a task cancelled before its first step would never say that it has ended
                self._task.cancel()

    # ---- how it stands ----

    @property
    def state(self) -> TransferState:
        """Of this rank's part."""
        return self.machine.state

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

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def set_rank(self, rank: RankTransfer) -> None:
        """How far another rank is."""
        self.ranks[rank.rank] = rank
        self.wake()

    def share(self) -> RankTransfer:
        """This rank's part, as it stands."""
        return RankTransfer(
            rank=self.engine.rank,
            state=self.state,
            bytes=self.nbytes,
            descriptors=self.descriptors,
            path=self.path.value if self.path else "",
            transport=self.path.transport if self.path else "",
            phases_ms={name: round(ms, 3) for name, ms in self.phases_ms.items()},
            error=error_body(self.problem) if self.problem else None,
        )

    def record(self) -> TransferRecord:
        own = self.share()
        ranks = sorted([own, *self.ranks.values()], key=lambda share: share.rank)
        return TransferRecord(
            transfer_id=self.transfer_id,
            request_id=self.request_id,
            engine_id=self.engine.engine_id,
            source=self.order.source if self.order else None,
            state=self.state_of_all,
            bytes=sum(share.bytes for share in ranks),
            descriptors=sum(share.descriptors for share in ranks),
            path=next((share.path for share in ranks if share.path), ""),
            transport=next((share.transport for share in ranks if share.transport), ""),
            tokens=self.tokens,
            phases_ms=own.phases_ms,
            ranks=ranks,
            error=next((share.error for share in ranks if share.error), None),
            created_at=self.created_at,
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

    # ---- this rank's part, from match to end ----

    async def _run(self) -> None:
        try:
            if self._stop is not None:
                raise asyncio.CancelledError
            async with asyncio.timeout_at(self.deadline) as self._timeout:
                await self._matched.wait()
                await self._transfer()
        except TimeoutError:
            self._end(TransferState.FAILED, self._late())
        except asyncio.CancelledError:
            state, why = self._stop or (TransferState.ABORTED, Conflict("aborted", "the daemon stops"))
            self._end(state, why)
        except KvferryError as error:
            self._end(TransferState.FAILED, error)
        except Exception as error:
            log.exception("transfer broke", request_id=self.request_id, transfer_id=self.transfer_id)
            self._end(TransferState.FAILED, Internal("internal", f"the daemon failed: {type(error).__name__}"))
        else:
            self._end(TransferState.DONE, None)

    def _late(self) -> KvferryError:
        if self.state is TransferState.WAITING:
            self._waits_for = "the router's order" if self.order is None else "the engine's reservation"
        why = f"the deadline passed while {self.state.value}{f' for {self._waits_for}' if self._waits_for else ''}"
        remedy = "raise deadline_ms, or see why that phase takes so long"
        return Deadline("deadline", why, field="deadline_ms", value=round(self._deadline_s * 1e3), remedy=remedy)

    async def _transfer(self) -> None:
        assert self.order is not None
        self._move(TransferState.CONNECTING)
        peer, readers, others = await self._open(self.order)
        through: list[SourceReader] = []
        try:
            try:
                await self._read_and_verify(peer, readers)
            except KvferryError as error:
                if not any(reader.announced for reader in readers):
                    raise
                log.info("announcement out of date", request_id=self.request_id, code=error.code)
                await self._ask_again(readers)
                await self._read_and_verify(peer, readers)
            through += [*readers, *others]  # ranks with nothing to read count this rank as a reader that has finished
        except BaseException as error:
            self._give_up(peer, readers, error)
            raise
        finally:
            self._around.spawn(self._settle(peer, through))

    async def _open(self, order: Order) -> tuple[PeerEngine, list[SourceReader], list[SourceReader]]:
        """Shake hands if need be and open the lease on every rank that is read; once more if the peer was stale."""
        peers = self._around.peers
        assert self.reservation is not None
        for again in (True, False):
            self._waits_for = f"the handshake with {order.address}"
            peer = await peers.get(self.engine, order.engine_id, order.address, order.epoch)
            readers, others = readers_of(peer, self.request_id, self.reservation.digest)
            peer.users += 1
            self._waits_for = f"the publish of engine {order.engine_id}"
            try:
                await together(reader.advance() for reader in readers)
                break
            except BaseException as error:
                stale = self._give_up(peer, readers, error)
                peers.leave(peer)
                if not stale or not again or order.epoch:
                    raise
        self._waits_for = ""
        return peer, readers, others

    def _give_up(self, peer: PeerEngine, readers: list[SourceReader], why: BaseException) -> bool:
        """Close the leases, unread; whether the peer is no longer what it was at the handshake."""
        close_all(readers, complete=False)
        stale = isinstance(why, KvferryError) and why.code in STALE
        if stale:
            self._around.peers.forget(peer)
        return stale

    async def _ask_again(self, readers: list[SourceReader]) -> None:
        """Begin again with the sources' own answers instead of announcements, once nothing of before can be written."""
        self._move(TransferState.CONNECTING)
        for flight in self._flights:
            flight.abandon()
        await asyncio.gather(*(flight.quiet for flight in self._flights))
        self._flights.clear()
        self.nbytes = self.descriptors = 0
        await together(reader.ask_again() for reader in readers)

    async def _read_and_verify(self, peer: PeerEngine, readers: list[SourceReader]) -> None:
        self._move(TransferState.READING)
        self.announced = any(reader.announced for reader in readers)
        moves = await self._read(peer, readers)
        self._move(TransferState.VERIFYING)
        for flight in self._flights:
            self.phases_ms[flight.phase] += 1e3 * flight.seconds
        unproven = [reader for reader in readers if not paths.packed_whole(reader.source.rank, moves)]
        await together(reader.verify(self.engine.agent) for reader in unproven)
        if self._around.checksum:
            assert self.reservation is not None and self.tokens is not None
            await compare(self.engine, peer, readers, self.reservation.tables, self.tokens, self.deadline)

    async def _read(self, peer: PeerEngine, readers: list[SourceReader]) -> list[Moved]:
        """Move tokens as they are published, and the state groups with the last of them."""
        assert self.reservation is not None and self.order is not None
        wanted = self.reservation.tokens
        first = at = wanted[0] if wanted else 0
        moves: list[Moved] = []
        while True:
            published = min(reader.lease.num_tokens for reader in readers)
            last = not any(reader.lease.more for reader in readers)
            if last:
                _check_published(readers, published, wanted)
            until = published if wanted is None else min(wanted[1], published)
            if last or until > at:
                tables = {reader.source.rank: reader.tables for reader in readers}
                own, tokens = self.reservation.tables, (at, max(at, until))
                bound = bind(peer.plan, tables, own, tokens, states=last)
                if bound.nbytes:
                    path = paths.choose(self.order.way or self._around.way, bound, self.engine, peer)
                    self.path = path.name
                    began = time.monotonic()
                    move = Move(
                        bound, own, tokens, last, self.engine, peer, readers, self.order.priority, self.deadline,
                        self._flights, moves, self._around.checksum,
                    )  # fmt: skip
                    moves.append(await path.move(move))
                    self.phases_ms["moving"] += 1e3 * (time.monotonic() - began)
                    self.descriptors += moves[-1].descriptors
                self.nbytes += bound.nbytes
                for rank, nbytes in bound.nbytes_by_rank.items():
                    peer.ranks[rank].bytes_read += nbytes
                at = tokens[1]
            if last:
                break
            unfinished = [reader for reader in readers if reader.lease.more]
            behind = [reader for reader in unfinished if reader.lease.num_tokens <= published]
            await together(reader.advance() for reader in behind or unfinished)
        self.tokens = (first, at)
        self.metadata = next((reader.lease.metadata for reader in readers if reader.lease.metadata), b"")
        for reader in readers:
            reader.source.transfers += 1
        return moves

    async def _settle(self, peer: PeerEngine, through: list[SourceReader]) -> None:
        """Close the leases that were read to their end. Once nothing can be written any more, release the claim, tell
        the engine, and let the peer go."""
        await self.ended.wait()
        close_all(through, complete=True)
        await asyncio.gather(*(flight.quiet for flight in self._flights))
        if not self.quiet.is_set():
            self._be_quiet()
            safe = engine_pb2.BlocksSafe(request_id=self.request_id, transfer_id=self.transfer_id)
            self.engine.session.tell(engine_pb2.Event(blocks_safe=safe))
        self._flights.clear()
        self._around.peers.leave(peer)

    def _move(self, to: TransferState) -> None:
        now = time.monotonic()
        self.phases_ms[self.state.value] = 1e3 * (now - self._phase_began)
        self._phase_began = now
        self.machine.move(to)
        self.wake()

    def _end(self, state: TransferState, problem: KvferryError | None) -> None:
        if state is not TransferState.DONE:
            for flight in self._flights:
                flight.abandon()
        self._move(state)
        self.phases_ms["total"] = 1e3 * (time.monotonic() - self._began)
        self.problem = problem
        if all(flight.quiet.done() for flight in self._flights):
            self._be_quiet()
        self.engine.session.tell(self.event())  # before anything else that the end brings
        self.ended.set()
        asyncio.get_running_loop().call_soon(self._around.on_end, self)

    def _be_quiet(self) -> None:
        """The blocks may be reserved again."""
        if self._claim is not None:
            self._claim.release()
        self.quiet.set()


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


def error_body(error: KvferryError) -> ErrorBody:
    return ErrorBody(code=error.code, message=error.message, field=error.field, value=error.value, remedy=error.remedy)
