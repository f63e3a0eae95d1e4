"""The other ranks of the same engine: rank 0 hands orders on to them, gathers their ends, and they fail together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvferry.errors import CLASSES, Conflict, Deadline, Internal, KvferryError, PeerFailed, Unavailable
from kvferry.protocol.attempts import Attempt
from kvferry.schemas import Awaited, OrderBody, Ordered, RankTransfer, TransferRecord, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import problem_from_proto, tables_to_proto
from kvferryd.aio import Tasks, to_the_end, together
from kvferryd.config import Config
from kvferryd.ending import Step, ended
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.peers.channels import Channel, Channels
from kvferryd.peers.contact import LOST
from kvferryd.transfers.order import Reservation, attempt_to_proto
from kvferryd.transfers.record import error_body
from kvferryd.transfers.transfer import Transfer

log = logs.get(__name__)
GRACE_S = 0.5
"""How long after the deadline another rank may still say why it failed."""
AGAIN_S = (0.05, 1.0)
"""First and longest pause before a rank that cannot be reached is asked or told again."""
LAST_S = 1.0
"""How long a daemon that stops goes on telling other ranks what has ended."""
TOLD_AGAIN = 1024
"""So many refusals may wait to be told again; more are told once."""


class Ranks:
    """Speaks to the daemons of the other ranks, within the deadline of the transfer. Owns its tasks: `close` it."""

    def __init__(self, config: Config, channels: Channels, instance: str) -> None:
        self._config, self._channels, self._instance = config, channels, instance
        self._tasks, self._refusals = Tasks(), Tasks()
        """Calls about transfers, and about attempts that were refused here."""
        self._open: dict[Engine, dict[str, Channel]] = {}
        """Channels to the ranks of an engine, by address: they stay open, since every order needs them at once."""

    def hand_on(self, transfer: Transfer, engine: Engine) -> None:
        """Hand the transfer's order to all other ranks, and keep how far they are until they have ended."""
        if engine.world_size > 1:
            for rank in range(engine.world_size):
                if rank != engine.rank:
                    transfer.ranks[rank] = RankTransfer(rank=rank, state=TransferState.WAITING)
            self._tasks.spawn(self._follow_all(transfer, engine))

    def abort(self, transfer: Transfer, engine: Engine) -> None:
        """This rank has not got its KV: the others need not go on."""
        if transfer.ends_told:
            return
        transfer.ends_told = bool(transfer.ranks)
        for rank, share in transfer.ranks.items():
            if not share.state.ended:
                code = transfer.problem.code if transfer.problem else transfer.state.value
                failed = transfer.state is TransferState.FAILED
                request = _abort(engine, transfer.request_id, transfer.attempt, code, failed=failed)
                self._tasks.spawn(self._tell_ended(engine, rank, request, transfer.deadline))

    async def ask_bound(self, transfer: Transfer, engine: Engine) -> tuple[str, int]:
        """(the source's epoch, the lease's number) of what rank 0 reads. Raises KvferryError; `rank_lost` where rank 0
        cannot be reached in time, or is another daemon by now."""
        request = peer_pb2.BoundRequest(
            engine_id=engine.engine_id, request_id=transfer.request_id, attempt=attempt_to_proto(transfer.attempt),
            key=engine.roster_key, epoch=transfer.source_epoch, lease=transfer.lease,
        )  # fmt: skip
        loop, asked = asyncio.get_running_loop(), engine.instances.get(0)
        for pause in _pauses():
            try:
                async with self._leader(engine) as stub:
                    reply = await stub.Bound(request, timeout=max(1e-3, transfer.deadline - loop.time()))
                return reply.epoch, reply.lease
            except KvferryError as error:
                if error.code not in LOST | {"roster_incomplete"}:
                    raise
                if loop.time() + pause >= transfer.deadline or engine.instances.get(0) != asked:
                    raise _lost(engine, 0, error) from None
            await asyncio.sleep(pause)
        raise AssertionError("pauses do not end")

    def tell_refused(self, engine: Engine, request_id: str, attempt: Attempt, why: KvferryError) -> None:
        """This rank takes no part in the attempt: the others need not go on with it, or begin."""
        until = asyncio.get_running_loop().time()
        if len(self._refusals) < TOLD_AGAIN:
            until += self._config.deadline_s
        for rank in range(engine.world_size):
            if rank != engine.rank:
                request = _abort(engine, request_id, attempt, why.code, failed=True)
                self._refusals.spawn(self._tell_ended(engine, rank, request, until))

    async def lead(self, engine: Engine, body: OrderBody, trace: logs.Trace) -> tuple[Ordered, bool]:
        """Give a router's order to rank 0; (its answer, whether the order is new). Raises KvferryError."""
        async with self._leader(engine) as stub:
            request = peer_pb2.LeadRequest(
                engine_id=engine.engine_id, order=body.model_dump_json(exclude_unset=True).encode(),
                traceparent=trace.traceparent, x_request_id=trace.x_request_id, key=engine.roster_key,
            )  # fmt: skip
            reply = await stub.Lead(request, timeout=self._config.connect_timeout_s)
        return _said(Ordered, reply.ordered), reply.created

    async def record(self, engine: Engine, transfer_id: str, wait_s: float, *, abort: bool) -> TransferRecord:
        """The record of a transfer that rank 0 keeps. Raises KvferryError."""
        async with self._leader(engine) as stub:
            request = peer_pb2.RecordRequest(
                engine_id=engine.engine_id, transfer_id=transfer_id, wait_s=wait_s, abort=abort, key=engine.roster_key
            )
            reply = await stub.Record(request, timeout=wait_s + self._config.connect_timeout_s)
        return _said(TransferRecord, reply.record)

    async def prewarm(self, engine: Engine, source: str, address: str) -> None:
        """Every other rank shakes hands with this source. Raises KvferryError, which names a rank that could not."""
        if engine.world_size > 1:
            await engine.until_whole(self._config.connect_timeout_s)
            others = [rank for rank in engine.members if rank != engine.rank]
            await to_the_end(self._prewarm(engine, rank, source, address) for rank in others)

    async def _prewarm(self, engine: Engine, rank: int, source: str, address: str) -> None:
        request = peer_pb2.PrewarmRequest(
            engine_id=engine.engine_id, source=engine_pb2.Source(engine_id=source, address=address),
            key=engine.roster_key,
        )  # fmt: skip
        with naming(engine, rank):
            async with self._asking(engine, engine.members[rank]) as stub:
                await stub.Prewarm(request, timeout=self._config.deadline_s)

    @contextlib.asynccontextmanager
    async def _leader(self, engine: Engine) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
        """The peer service of rank 0, once the roster is whole; before that it has no key to show."""
        await engine.until_whole(self._config.connect_timeout_s)
        async with self._asking(engine, engine.members[0]) as stub:
            yield stub

    async def close(self) -> None:
        """What has just ended is told before, if it can be."""
        if telling := self._tasks | self._refusals:
            await asyncio.wait(telling, timeout=LAST_S)
        if left := self._tasks | self._refusals:
            for task in left:
                task.cancel()
            await asyncio.wait(left)
        for engine in list(self._open):
            await self.leave(engine)

    async def renew(self) -> None:
        """Dial anew for the next order: the certificates have changed."""
        for engine in list(self._open):
            await self.leave(engine)

    async def leave(self, engine: Engine) -> None:
        """Its channels are closed when no order uses them any more."""
        steps = [Step(f"leave {address}", channel.close) for address, channel in self._open.pop(engine, {}).items()]
        await ended(steps, **engine.session.about)

    @contextlib.asynccontextmanager
    async def _asking(self, engine: Engine, address: str) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
        """The peer service of one rank. The call holds the channel too: it goes on when `renew` or `leave` has let go.
        What is said after `leave` keeps no channel open."""
        if engine.session.retiring is None and address not in (held := self._open.setdefault(engine, {})):
            held[address] = self._channels.open(address)
        async with self._channels.calling(address) as stub:
            yield stub

    async def _follow_all(self, transfer: Transfer, engine: Engine) -> None:
        lost: dict[int, KvferryError] = {}
        """Ranks that cannot be reached, and why."""
        try:
            async with asyncio.timeout_at(transfer.deadline + GRACE_S):
                await engine.until_whole(self._config.connect_timeout_s)
                if transfer.ended.is_set() and transfer.state is not TransferState.DONE:
                    for rank in transfer.ranks:  # no other rank has the order: there is nothing to end
                        transfer.set_rank(RankTransfer(rank=rank, state=TransferState.ABORTED))
                    return
                await together(
                    self._follow(transfer, engine, rank, engine.members[rank], lost) for rank in transfer.ranks
                )
        except TimeoutError:
            self.abort(transfer, engine)
            for rank, share in list(transfer.ranks.items()):
                if rank in lost:
                    self._failed(transfer, rank, lost[rank])
                elif not share.state.ended:
                    address = engine.members.get(rank, "an unknown address")
                    what = f"waited for {share.waits_for.value}" if share.waits_for else f"was {share.state.value}"
                    why = f"the deadline passed while rank {rank} at {address} {what}"
                    remedy = "see whether that rank's daemon is alive, or raise deadline_ms"
                    self._failed(transfer, rank, Deadline("deadline", why, field="rank", value=rank, remedy=remedy))
        except Unavailable as why_not:  # of ranks that have not joined
            for rank in list(transfer.ranks):
                self._failed(transfer, rank, why_not)
        except Exception as error:
            log.exception("handing an order on broke", request_id=transfer.request_id)
            for rank, share in list(transfer.ranks.items()):
                if not share.state.ended:
                    why = f"the daemon failed while it handed the order on: {type(error).__name__}"
                    self._failed(transfer, rank, Internal("internal", why))

    async def _follow(
        self, transfer: Transfer, engine: Engine, rank: int, address: str, lost: dict[int, KvferryError]
    ) -> None:
        """Hand the order to one rank and keep what it says, until its part has ended. A rank that cannot be reached
        goes on, so it is asked again, for as long as it has the same daemon. Raises nothing: other ranks' parts go on
        until they have ended too."""
        instance = engine.instances.get(rank)
        for pause in _pauses():
            try:
                await self._hear(transfer, engine, rank, address, lost)
                break
            except KvferryError as error:
                if error.code not in LOST:
                    self._failed(transfer, rank, error)
                    return
                lost[rank] = _lost(engine, rank, error)
            except Exception as error:
                log.exception("following a rank broke", request_id=transfer.request_id, rank=rank, address=address)
                why = f"the daemon failed over what rank {rank} at {address} said: {type(error).__name__}"
                self._failed(transfer, rank, Internal("internal", why))
                return
            await asyncio.sleep(pause)
            given_up = transfer.ended.is_set() and transfer.state is not TransferState.DONE
            if given_up or rank not in engine.members or engine.instances.get(rank) != instance:
                self._failed(transfer, rank, lost.pop(rank))
                return
        share = transfer.ranks[rank]
        if share.state is not TransferState.DONE:
            self._stop_own(transfer, share)

    async def _hear(
        self, transfer: Transfer, engine: Engine, rank: int, address: str, lost: dict[int, KvferryError]
    ) -> None:
        """One rank's words until its part has ended. Raises KvferryError, of LOST where the rank cannot be reached."""
        request = _request(transfer, engine, rank)
        request.leader = self._instance
        async with self._asking(engine, address) as stub:
            call = stub.Order(request)
            try:
                async for reply in call:
                    lost.pop(rank, None)
                    transfer.set_rank(_rank_transfer(reply, rank, address))
                    if transfer.ranks[rank].state.ended:
                        return  # whatever becomes of the stream
            finally:
                call.cancel()
        raise PeerFailed("peer_lost", f"rank {rank} at {address} stopped answering")

    def _failed(self, transfer: Transfer, rank: int, why: KvferryError) -> None:
        state = TransferState.ABORTED if why.code == "aborted" else TransferState.FAILED
        share = RankTransfer(rank=rank, state=state, error=error_body(why))
        transfer.set_rank(share)
        self._stop_own(transfer, share)

    @staticmethod
    def _stop_own(transfer: Transfer, share: RankTransfer) -> None:
        """KV is of use only if all ranks have it: tell this rank's engine now, not at the deadline."""
        if share.state is TransferState.ABORTED:
            why: KvferryError = Conflict("aborted", f"rank {share.rank} of the same engine was aborted")
        else:
            code = share.error.code if share.error else share.state.value
            message = f"rank {share.rank} of the same engine failed: {code}"
            remedy = "see that rank's part of the transfer record"
            why = PeerFailed("rank_failed", message, field="rank", value=share.rank, remedy=remedy)
        transfer.stop(share.state, why)

    async def _tell_ended(self, engine: Engine, rank: int, request: peer_pb2.AbortRequest, until: float) -> None:
        """Until that rank has answered, or until its part has ended by its own deadline."""
        for pause in _pauses():
            if rank in engine.members:
                try:
                    async with self._asking(engine, engine.members[rank]) as stub:
                        await stub.Abort(request, timeout=self._config.connect_timeout_s)
                    return
                except KvferryError as error:
                    if error.code not in LOST:
                        return
            if asyncio.get_running_loop().time() + pause >= until:
                return
            await asyncio.sleep(pause)


def _pauses() -> Iterator[float]:
    """Without end."""
    pause, longest = AGAIN_S
    while True:
        yield pause
        pause = min(2 * pause, longest)


def _lost(engine: Engine, rank: int, why: KvferryError) -> KvferryError:
    what = f"rank {rank} of engine {engine.engine_id} cannot be reached, and may go on: {why.message}"
    remedy = "see whether its daemon lives, and the network between; then try again, in a new attempt"
    return PeerFailed("rank_lost", what, field="rank", value=rank, remedy=remedy)


@contextlib.contextmanager
def naming(engine: Engine, rank: int) -> Iterator[None]:
    """An error inside names the rank, where the engine has several."""
    try:
        yield
    except KvferryError as error:
        if engine.world_size == 1:
            raise
        why = f"rank {rank} of engine {engine.engine_id}: {error.message}"
        raise CLASSES[error.kind](
            error.code, why, field="rank", value=rank, remedy=error.remedy, refusals=error.refusals
        ) from error


def _abort(engine: Engine, request_id: str, attempt: Attempt, code: str, *, failed: bool) -> peer_pb2.AbortRequest:
    return peer_pb2.AbortRequest(
        engine_id=engine.engine_id, request_id=request_id, reason=f"rank {engine.rank}: {code}",
        attempt=attempt_to_proto(attempt), failed=failed, key=engine.roster_key,
    )  # fmt: skip


B = TypeVar("B", bound=BaseModel)


def _said(body: type[B], json: bytes) -> B:
    """What rank 0 has answered. Raises KvferryError (`protocol`)."""
    try:
        return body.model_validate_json(json)
    except ValidationError as error:
        why = f"rank 0 answered with what is no {body.__name__}: {error.error_count()} fields"
        raise Conflict("protocol", why, field="order", remedy="run one version of kvferry on all ranks") from None


def _request(transfer: Transfer, engine: Engine, rank: int) -> peer_pb2.OrderRequest:
    order = transfer.order
    assert order is not None
    left_s = transfer.deadline - asyncio.get_running_loop().time()
    request = peer_pb2.OrderRequest(
        engine_id=engine.engine_id,
        request_id=transfer.request_id,
        priority=order.priority,
        source=engine_pb2.Source(
            engine_id=order.engine_id, address=order.address, epoch=order.epoch, lease=order.lease
        ),
        deadline_s=max(1e-3, left_s),
        ordered_s=transfer.ordered_s,
        traceparent=order.trace.traceparent,
        x_request_id=order.trace.x_request_id,
        attempt=attempt_to_proto(transfer.attempt),
        way=order.way,
        key=engine.roster_key,
    )
    reservation = transfer.brought.get(rank)
    if isinstance(reservation, Reservation):
        request.tables.CopyFrom(tables_to_proto(reservation.tables))
        if reservation.tokens is not None:
            start, stop = reservation.tokens
            request.tokens.CopyFrom(layout_pb2.TokenRange(start=start, stop=stop))
    return request


def _rank_transfer(reply: peer_pb2.RankTransfer, rank: int, address: str) -> RankTransfer:
    if reply.state not in {state.value for state in TransferState} or reply.rank != rank:
        why = f"peer {address} answered with state {reply.state} of rank {reply.rank}"
        raise Conflict("protocol", why, field="state", value=reply.state)
    phases_ms = dict(reply.phases_ms)
    moving_ms = phases_ms.get("moving", 0.0)
    return RankTransfer(
        rank=reply.rank,
        state=TransferState(reply.state),
        bytes=reply.nbytes,
        descriptors=reply.descriptors,
        path=reply.path,
        transport=reply.transport,
        phases_ms=phases_ms,
        bytes_per_s=round(1e3 * reply.nbytes / moving_ms) if moving_ms > 0 else 0.0,
        waits_for=Awaited(reply.waits_for) if reply.waits_for in set(Awaited) else None,
        error=error_body(problem_from_proto(reply.problem)) if reply.HasField("problem") else None,
    )
