"""The other ranks of the same engine: rank 0 hands orders on to them, gathers their ends, and they fail together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from kvferry.errors import CLASSES, Conflict, Deadline, Internal, KvferryError, PeerFailed, Unavailable
from kvferry.protocol import leader_events as e
from kvferry.protocol.attempts import Attempt, ReadingRank
from kvferry.protocol.leader import Leader
from kvferry.schemas import ErrorBody, OrderBody, Ordered, RankTransfer, TransferRecord, TransferState
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc
from kvferryd.aio import Tasks, Timer, carry_out, to_the_end
from kvferryd.config import Config
from kvferryd.ending import Step, ended
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.peers.channels import Channel, Channels
from kvferryd.peers.contact import LOST
from kvferryd.transfers.messages import abort_request, order_request, rank_transfer, said
from kvferryd.transfers.transfer import Transfer

log = logs.get(__name__)
LAST_S = 1.0
"""How long a daemon that stops goes on telling other ranks what has ended."""


@dataclass(frozen=True, eq=False)
class _Led:
    transfer: Transfer
    engine: Engine
    brought: Mapping[int, object]
    """Reservations that came with the order, by rank."""
    calls: Tasks = field(default_factory=Tasks)


class Ranks:
    """Speaks to the daemons of the other ranks, within the deadline of the transfer. Owns its tasks: `close` it."""

    def __init__(
        self, config: Config, channels: Channels, instance: str, engines: Mapping[int, Engine],
        on_over: Callable[[Transfer], None],
    ) -> None:  # fmt: skip
        """engines: by life. on_over: called when another rank's part has ended, and all have."""
        self._on_over = on_over
        self._config, self._channels, self._instance, self._engines = config, channels, instance, engines
        self._machine = Leader()
        self._led: dict[int, _Led] = {}
        """Transfers whose order is handed on, by part."""
        self._telling = Tasks()
        """Calls about what has ended here."""
        self._timer = Timer(lambda: self._on(e.Tick()))
        self._open: dict[Engine, dict[str, Channel]] = {}
        """Channels to the ranks of an engine, by address: they stay open, since every order needs them at once."""

    def hand_on(self, transfer: Transfer, engine: Engine, at: ReadingRank, brought: Mapping[int, object]) -> None:
        """Hand the transfer's order to all other ranks, and keep how far they are until they have ended."""
        others = engine.roster.others
        for rank in others:
            transfer.ranks[rank] = RankTransfer(rank=rank, state=TransferState.WAITING)
        self._led[transfer.part] = _Led(transfer, engine, brought)
        self._on(e.Lead(transfer.part, at, transfer.request_id, transfer.attempt, others, transfer.deadline))

    def give_up(self, transfer: Transfer) -> None:
        """This rank has not got its KV: the others need not go on."""
        code = transfer.problem.code if transfer.problem else transfer.state.value
        self._on(e.GaveUp(transfer.part, code, failed=transfer.state is TransferState.FAILED))

    def tell_refused(self, at: ReadingRank, request_id: str, attempt: Attempt, why: KvferryError) -> None:
        """This rank takes no part in the attempt: the others need not go on with it, or begin."""
        engine = self._engines[at.life]
        until = asyncio.get_running_loop().time() + self._config.deadline_s
        self._on(e.Refused(e.End(at, request_id, attempt, why.code, failed=True), engine.roster.others, until))

    def _set(self, transfer: Transfer, share: RankTransfer) -> None:
        transfer.set_rank(share)
        if transfer.over:
            self._on_over(transfer)

    # ---- the machine ----

    def _on(self, event: e.Event) -> None:
        carry_out(self._machine.on(event, asyncio.get_running_loop().time()), self._do)
        self._timer.set(self._machine.next_timer())

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Gather(part):
                self._led[part].calls.spawn(self._gather(part, self._led[part].engine))
            case e.Ask(part, rank):
                self._led[part].calls.spawn(self._follow(part, rank, self._led[part]))
            case e.Pause(part, rank, seconds):
                self._led[part].calls.spawn(self._pause(part, rank, seconds, self._led[part].engine))
            case e.Close(part, rank, why):
                aborted = why is None or why.code == "aborted"
                state = TransferState.ABORTED if aborted else TransferState.FAILED
                error = None if why is None else ErrorBody.of(why)
                self._set(self._led[part].transfer, RankTransfer(rank=rank, state=state, error=error))
            case e.Late(part, rank):
                led = self._led[part]
                address = led.engine.roster.address(rank)
                late = _late(led.transfer.ranks[rank], address or "an unknown address")
                if address is not None:  # a daemon that lives says by itself that the deadline has passed
                    self._channels.contact(address).failed(late)
                error = ErrorBody.of(late)
                self._set(led.transfer, RankTransfer(rank=rank, state=TransferState.FAILED, error=error))
            case e.StopOwn(part, rank, code):
                self._led[part].transfer.stop(*_because_of(rank, code))
            case e.Tell(tell, rank, end, seconds):
                self._telling.spawn(self._tell(self._engines.get(end.at.life), tell, rank, end, seconds))
            case e.Finished(part):
                for call in self._led.pop(part).calls - {asyncio.current_task()}:
                    call.cancel()
            case _:
                assert_never(effect)

    async def lead(self, engine: Engine, body: OrderBody, trace: logs.Trace) -> tuple[Ordered, bool]:
        """Give a router's order to rank 0; (its answer, whether the order is new). Raises KvferryError."""
        async with self._leader(engine) as stub:
            request = peer_pb2.LeadRequest(
                engine_id=engine.engine_id, order=body.model_dump_json(exclude_unset=True).encode(),
                traceparent=trace.traceparent, x_request_id=trace.x_request_id, key=engine.roster.key,
            )  # fmt: skip
            reply = await stub.Lead(request, timeout=self._config.connect_timeout_s)
        return said(Ordered, reply.ordered), reply.created

    async def record(self, engine: Engine, transfer_id: str, wait_s: float, *, abort: bool) -> TransferRecord:
        """The record of a transfer that rank 0 keeps. Raises KvferryError."""
        async with self._leader(engine) as stub:
            request = peer_pb2.RecordRequest(
                engine_id=engine.engine_id, transfer_id=transfer_id, wait_s=wait_s, abort=abort, key=engine.roster.key
            )
            reply = await stub.Record(request, timeout=wait_s + self._config.connect_timeout_s)
        return said(TransferRecord, reply.record)

    async def prewarm(self, engine: Engine, source: str, address: str) -> None:
        """Every other rank shakes hands with this source. Raises KvferryError, which names a rank that could not."""
        if engine.world_size > 1:
            await engine.roster.until_whole(self._config.connect_timeout_s)
            others = engine.roster.other_addresses
            await to_the_end(self._prewarm(engine, rank, at, source, address) for rank, at in others.items())

    async def _prewarm(self, engine: Engine, rank: int, at: str, source: str, address: str) -> None:
        request = peer_pb2.PrewarmRequest(
            engine_id=engine.engine_id, source=engine_pb2.Source(engine_id=source, address=address),
            key=engine.roster.key,
        )  # fmt: skip
        with naming(engine, rank):
            async with self._asking(engine, at) as stub:
                await stub.Prewarm(request, timeout=self._config.deadline_s)

    @contextlib.asynccontextmanager
    async def _leader(self, engine: Engine) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
        """The peer service of rank 0, once the roster is whole; before that it has no key to show."""
        await engine.roster.until_whole(self._config.connect_timeout_s)
        async with self._asking(engine, engine.roster.members[0].address) as stub:
            yield stub

    async def close(self) -> None:
        """Ends of just now are told before, if they can be."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_S
        while (telling := self._calls()) and loop.time() < until:
            await asyncio.wait(telling, timeout=until - loop.time())
        self._timer.set(None)
        left = self._calls()
        for call in left:
            call.cancel()
        if left:
            await asyncio.wait(left)
        for engine in list(self._open):
            await self.leave(engine)

    def _calls(self) -> set[asyncio.Task[None]]:
        return self._telling.union(*(led.calls for led in self._led.values()))

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
        Calls after `leave` keep no channel open."""
        if not engine.session.retiring and address not in (held := self._open.setdefault(engine, {})):
            held[address] = self._channels.open(address)
        async with self._channels.calling(address) as stub:
            yield stub

    # ---- calls: each of them ends as an event ----

    async def _gather(self, part: int, engine: Engine) -> None:
        try:
            await engine.roster.until_whole(self._config.connect_timeout_s)
        except Unavailable as why:
            self._on(e.Incomplete(part, why))
        else:
            self._on(e.Whole(part, {rank: member.instance for rank, member in engine.roster.members.items()}))

    async def _pause(self, part: int, rank: int, seconds: float, engine: Engine) -> None:
        await asyncio.sleep(seconds)
        self._on(e.Again(part, rank, engine.roster.instance(rank)))

    async def _follow(self, part: int, rank: int, led: _Led) -> None:
        """Hand the order to one rank, and keep what it says until its part has ended."""
        engine, address = led.engine, led.engine.roster.address(rank) or "an unknown address"
        try:
            await self._hear(part, rank, led, address)
        except KvferryError as error:
            lost = error.code in LOST
            self._on(e.Unheard(part, rank, _lost(engine, rank, error) if lost else error, lost=lost))
        except Exception as error:
            log.exception("following a rank broke", request_id=led.transfer.request_id, rank=rank, address=address)
            why = f"the daemon failed over what rank {rank} at {address} said: {type(error).__name__}"
            self._on(e.Unheard(part, rank, Internal("internal", why)))

    async def _hear(self, part: int, rank: int, led: _Led, address: str) -> None:
        """Raises KvferryError, of LOST where the rank cannot be reached."""
        request = order_request(led.transfer, led.engine, led.brought.get(rank), self._instance)
        async with self._asking(led.engine, address) as stub:
            call = stub.Order(_as_leader(request, led.transfer))
            try:
                async for reply in call:
                    share = rank_transfer(reply, rank, address)
                    self._set(led.transfer, share)
                    if share.state.ended:  # even if the stream breaks
                        code = share.error.code if share.error else share.state.value
                        self._on(e.Heard(part, rank, share.state is TransferState.DONE, code))
                        return
                    self._on(e.Heard(part, rank))
            finally:
                call.cancel()
        raise PeerFailed("peer_lost", f"rank {rank} at {address} stopped answering")

    async def _tell(self, engine: Engine | None, tell: int, rank: int, end: e.End, seconds: float) -> None:
        lost = engine is not None
        try:
            if seconds:
                await asyncio.sleep(seconds)
            if engine is not None and (address := engine.roster.address(rank)):
                async with self._asking(engine, address) as stub:
                    await stub.Abort(abort_request(engine, end), timeout=self._config.connect_timeout_s)
                lost = False
        except KvferryError as error:
            lost = error.code in LOST
        except Exception:
            log.exception("telling a rank broke", request_id=end.request_id, rank=rank)
            lost = False
        self._on(e.Told(tell, lost=lost))


async def _as_leader(order: peer_pb2.OrderRequest, transfer: Transfer) -> AsyncIterator[peer_pb2.OrderRequest]:
    """The messages of rank 0 to another rank about an attempt."""
    yield order
    if not (order.source.epoch and order.source.lease):  # or else that is the one
        await transfer.ended.wait()
        if transfer.state is TransferState.DONE:
            read = peer_pb2.LeaseRead(epoch=transfer.source_epoch, lease=transfer.lease)
            yield peer_pb2.OrderRequest(read=read)


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


def _late(share: RankTransfer, address: str) -> KvferryError:
    what = f"waited for {share.waits_for.value}" if share.waits_for else f"was {share.state.value}"
    why = f"the deadline passed while rank {share.rank} at {address} {what}"
    remedy = "see whether that rank's daemon is alive, or raise deadline_ms"
    return Deadline("deadline", why, field="rank", value=share.rank, remedy=remedy)


def _because_of(rank: int, code: str) -> tuple[TransferState, KvferryError]:
    """How this rank's part ends where another rank's has: its engine is told now, not at the deadline."""
    if code == "aborted":
        return TransferState.ABORTED, Conflict("aborted", f"rank {rank} of the same engine was aborted")
    message = f"rank {rank} of the same engine failed: {code}"
    remedy = "see that rank's part of the transfer record"
    return TransferState.FAILED, PeerFailed("rank_failed", message, field="rank", value=rank, remedy=remedy)
