"""The other ranks of the same engine: an order that reached one rank is handed to all, and they fail together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from kvferry.errors import Conflict, Deadline, Internal, KvferryError, PeerFailed, Unavailable
from kvferry.schemas import Awaited, RankTransfer, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import problem_from_proto, tables_to_proto
from kvferryd.aio import Tasks, together
from kvferryd.config import Config
from kvferryd.ending import Step, ended
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.peers.channels import Channel, Channels
from kvferryd.transfers.order import Reservation
from kvferryd.transfers.record import error_body
from kvferryd.transfers.transfer import Transfer

log = logs.get(__name__)
STALE_ATTEMPT = "stale_attempt"
GRACE_S = 0.5
"""How long after the deadline another rank may still say why it failed."""


class Ranks:
    """Speaks to the daemons of the other ranks, within the deadline of the transfer. Owns its tasks: `close` it."""

    def __init__(self, config: Config, channels: Channels) -> None:
        self._config, self._channels = config, channels
        self._tasks = Tasks()
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
        for rank, share in transfer.ranks.items():
            if not share.state.ended and rank in engine.members:
                self._tasks.spawn(self._abort(transfer, engine, rank, engine.members[rank]))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
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
        try:
            async with asyncio.timeout_at(transfer.deadline + GRACE_S):
                await engine.until_whole(self._config.connect_timeout_s)
                if transfer.ended.is_set() and transfer.state is not TransferState.DONE:
                    for rank in transfer.ranks:  # no other rank has the order: there is nothing to end
                        transfer.set_rank(RankTransfer(rank=rank, state=TransferState.ABORTED))
                    return
                await together(self._follow(transfer, engine, rank, engine.members[rank]) for rank in transfer.ranks)
        except TimeoutError:
            self.abort(transfer, engine)
            for rank, share in list(transfer.ranks.items()):
                if not share.state.ended:
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

    async def _follow(self, transfer: Transfer, engine: Engine, rank: int, address: str) -> None:
        """Hand the order to one rank and keep what it says, until its part has ended. Raises nothing: the other ranks'
        parts go on until they have ended too."""
        transfer.told[rank] = asked = transfer.attempt
        try:
            request = _request(transfer, engine, rank)
            async with self._asking(engine, address) as stub:
                call = stub.Order(request)
                try:
                    async for reply in call:
                        transfer.set_rank(_rank_transfer(reply, rank, address))
                        if reply.transfer_id:
                            transfer.parts[rank] = reply.transfer_id
                        if transfer.ranks[rank].state.ended:
                            break  # whatever becomes of the stream
                finally:
                    call.cancel()
        except KvferryError as error:
            ahead = int(error.value) if error.code == STALE_ATTEMPT and error.value.isdigit() else 0
            over = transfer.ended.is_set() and transfer.state is not TransferState.DONE
            if transfer.counted and ahead > asked and not over:
                # That rank has seen more attempts than we have; this one is still under way.
                transfer.attempt = max(ahead, transfer.attempt)
                await self._follow(transfer, engine, rank, address)
            else:
                self._failed(transfer, rank, error)
            return
        except Exception as error:
            log.exception("following a rank broke", request_id=transfer.request_id, rank=rank, address=address)
            why = f"the daemon failed over what rank {rank} at {address} said: {type(error).__name__}"
            self._failed(transfer, rank, Internal("internal", why))
            return
        share = transfer.ranks[rank]
        if not share.state.ended:
            self._failed(transfer, rank, PeerFailed("peer_lost", f"rank {rank} at {address} stopped answering"))
        elif share.state is not TransferState.DONE:
            self._stop_own(transfer, share)

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

    async def _abort(self, transfer: Transfer, engine: Engine, rank: int, address: str) -> None:
        why = transfer.problem.code if transfer.problem else transfer.state.value
        request = peer_pb2.AbortRequest(
            engine_id=engine.engine_id,
            request_id=transfer.request_id,
            reason=f"rank {engine.rank}: {why}",
            rank=engine.rank,
            attempt=transfer.told.get(rank, transfer.attempt),
            failed=transfer.state is TransferState.FAILED,
            key=engine.roster_key,
            transfer_id=transfer.transfer_id,
        )
        with contextlib.suppress(KvferryError):  # best effort: the other rank has the same deadline
            async with self._asking(engine, address) as stub:
                await stub.Abort(request, timeout=self._config.connect_timeout_s)


def _request(transfer: Transfer, engine: Engine, rank: int) -> peer_pb2.OrderRequest:
    order = transfer.order
    assert order is not None
    left_s = transfer.deadline - asyncio.get_running_loop().time()
    request = peer_pb2.OrderRequest(
        engine_id=engine.engine_id,
        request_id=transfer.request_id,
        priority=order.priority,
        source=engine_pb2.Source(engine_id=order.engine_id, address=order.address, epoch=order.epoch),
        deadline_s=max(1e-3, left_s),
        ordered_s=transfer.ordered_s,
        began_s=time.monotonic() - transfer.phases.began,
        traceparent=order.trace.traceparent,
        x_request_id=order.trace.x_request_id,
        rank=engine.rank,
        attempt=transfer.attempt,
        counted=transfer.counted,
        parts=transfer.parts,
        earlier=transfer.earlier,
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
