"""All transfers of the daemon: rendezvous, idempotency, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping

from kvferry.errors import KvferryError
from kvferry.schemas import TransferState
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.metrics import Metrics
from kvferryd.peers.peers import Peers
from kvferryd.transfer.job import Job, Origin
from kvferryd.transfer.ranks import LATE, Ranks
from kvferryd.transfer.transfer import Order, Reservation, Transfer, log

OVER = 4096


class Transfers:
    """Owns every transfer: `close` aborts those that are under way."""

    def __init__(self, config: Config, peers: Peers, metrics: Metrics) -> None:
        self._config, self._peers, self._metrics = config, peers, metrics
        self._ranks = Ranks(config, peers)
        self._by_id: OrderedDict[str, Job] = OrderedDict()
        self._finished: dict[str, Job] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        """Attempts of other ranks that ended before their order came here, or with it."""
        self._after: set[asyncio.Task[None]] = set()
        self._by_request: dict[tuple[str, str], Job] = {}
        self.unfinished = 0
        """Transfers of this rank that have not ended."""
        self.draining = False
        self._appeared = asyncio.Event()

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_id.values()))

    def get(self, transfer_id: str) -> Job:
        job = self._by_id.get(transfer_id)
        if job is None:
            raise KvferryError(
                "unknown_transfer",
                f"transfer {transfer_id} is not known",
                field="transfer_id",
                value=transfer_id,
                remedy="the daemon keeps the last ones only (history); look it up by request_id at the right daemon",
            )
        return job

    def of_request(self, request_id: str) -> list[Job]:
        return [job for job in self if job.transfer.request_id == request_id]

    def order(
        self,
        engine: Engine,
        request_id: str,
        order: Order,
        reservation: Reservation | None = None,
        others: Mapping[int, Reservation] | None = None,
        *,
        origin: Origin | None = None,
    ) -> tuple[Job, bool]:
        """Take an order; (its job, whether the order is new).

        others: reservations it brought for other ranks. origin: the rank that handed it on; None for an order of a
        router, which is handed on from here. Raises KvferryError: `order_conflict`, `receive_conflict`, `full`,
        `draining`, LATE.
        """
        job = self._by_request.get((engine.engine_id, request_id))
        if origin is not None and origin.attempt in self._over:
            why = KvferryError(
                "aborted", f"request {request_id} ended on rank {origin.rank} before its order came here"
            )
            if job is not None and job.transfer.order is None and not job.outlives(origin):
                job.transfer.stop(TransferState.ABORTED, why)
            raise why
        if job is not None and origin is not None:
            if origin.attempt in job.past:
                raise job.conflict("has come again since")
            if job.outlives(origin):
                raise KvferryError(
                    LATE,
                    f"request {request_id} is tried again here",
                    field="attempt",
                    value=origin.attempt,
                    remedy="an attempt that goes on hands its order on once more, with `again`",
                )
            if job.outlived_by(origin):
                job = self._new(engine, request_id, after=job)
            job.join(origin)
        brought = others or {}
        if job is not None and job.ordered(order, exactly=origin is None):
            if origin is None and brought != job.brought:
                raise job.conflict("was ordered already, with other tables")
            job.check_reserved(reservation)
            return job, False
        if job is not None and job.transfer.ended.is_set():
            raise job.conflict("has ended already")
        if job is None:
            job = self._new(engine, request_id)
            if origin is not None:
                job.join(origin)
        job.check_reserved(reservation)
        job.brought = brought
        job.transfer.match(order=order, reservation=reservation)
        if origin is None:
            self._ranks.start(job, order, brought)
        return job, True

    def receive(
        self, engine: Engine, request_id: str, reservation: Reservation, order: Order | None, deadline_s: float | None
    ) -> Job:
        """Take an engine's reservation, and its order if it names the source. Raises as `order`.

        A request that has failed, or that was preempted and has other blocks now, begins anew.
        """
        job = self._by_request.get((engine.engine_id, request_id))
        if job is None:
            job = self._new(engine, request_id, deadline_s)
        elif job.transfer.ended.is_set():
            if job.transfer.state is TransferState.DONE and job.transfer.reservation == reservation:
                engine.tell(job.transfer.event())
                return job
            job = self._new(engine, request_id, deadline_s, after=job)
        job.check_reserved(reservation)
        new = order is not None and not job.ordered(order, exactly=False)
        job.transfer.match(order=order if new else None, reservation=reservation)
        if order is not None and new:
            self._ranks.start(job, order, {})
        return job

    def _new(self, engine: Engine, request_id: str, deadline_s: float | None = None, after: Job | None = None) -> Job:
        if self.draining:
            raise KvferryError(
                "draining",
                "the daemon is draining and takes no new transfers",
                remedy="send the request to another decode worker",
            )
        if not engine.attached:
            raise KvferryError(
                "unknown_engine",
                f"engine {engine.engine_id} is gone; only what it published is still here",
                field="engine_id",
                value=engine.engine_id,
                remedy="send the request to another decode worker",
            )
        if self.unfinished >= self._config.max_transfers:
            raise KvferryError(
                "full",
                f"{self._config.max_transfers} transfers are under way",
                field="max_transfers",
                value=self._config.max_transfers,
                remedy="try again shortly, or send the request to another worker",
            )
        transfer = Transfer(
            engine,
            request_id,
            self._peers,
            deadline_s or self._config.deadline_s,
            self._on_end,
            self._spawn,
            self._config.way,
        )
        job = Job(transfer)
        if after is not None:
            job.past = after.past | set(after.origins.values())
            job.again = after.transfer.engine is engine
        self.unfinished += 1
        self._by_id[transfer.transfer_id] = job
        self._by_request[engine.engine_id, request_id] = job
        self._appeared.set()
        self._appeared = asyncio.Event()
        return job

    def _on_end(self, transfer: Transfer) -> None:
        self.unfinished -= 1
        job = self._by_id[transfer.transfer_id]
        job.wake()
        self._finished[transfer.transfer_id] = job
        if transfer.state is not TransferState.DONE:
            self._ranks.stop(job)
        source = transfer.order.engine_id if transfer.order else ""
        share = transfer.share()
        self._metrics.transfer_ended(share, source)
        say = log.info if transfer.problem is None else log.warning
        say(
            "transfer ended",
            request_id=transfer.request_id,
            transfer_id=transfer.transfer_id,
            engine_id=transfer.engine.engine_id,
            rank=transfer.engine.rank,
            source=source,
            state=transfer.state.value,
            bytes=transfer.nbytes,
            descriptors=transfer.descriptors,
            path=share.path,
            transport=share.transport,
            announced=transfer.announced,
            phases_ms=share.phases_ms,
            traceparent=transfer.order.traceparent if transfer.order else "",
            **({"code": transfer.problem.code, "why": str(transfer.problem)} if transfer.problem else {}),
        )
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Keep `history` ended transfers; one whose other ranks or reads go on is kept until they end."""
        oldest = itertools.islice(self._finished.values(), max(0, len(self._finished) - self._config.history))
        for job in list(oldest):
            if job.ended and job.transfer.quiet.is_set():
                del self._finished[job.transfer.transfer_id]
                del self._by_id[job.transfer.transfer_id]
                key = (job.transfer.engine.engine_id, job.transfer.request_id)
                if self._by_request.get(key) is job:
                    del self._by_request[key]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """What is still to be said or awaited after a transfer has ended."""
        task = asyncio.create_task(work)
        self._after.add(task)
        task.add_done_callback(self._after.discard)

    def abort(
        self, engine: Engine, request_id: str, why: str, origin: Origin | None = None, *, failed: bool = False
    ) -> bool:
        """Abort the request's transfer; whether there was one under way. Idempotent.

        origin: the attempt of another rank that is over; a later one is left alone. failed: it did not abort but fail.
        """
        if origin is not None:
            self._over[origin.attempt] = None
            while len(self._over) > OVER:
                self._over.popitem(last=False)
        job = self._by_request.get((engine.engine_id, request_id))
        if job is None or job.ended or (origin is not None and not job.meant_by(origin)):
            return False
        if job.transfer.ended.is_set():
            self._ranks.stop(job)
            return True
        if failed:
            job.transfer.stop(TransferState.FAILED, KvferryError("rank_failed", f"another rank failed: {why}"))
        else:
            job.transfer.stop(
                TransferState.ABORTED, KvferryError("aborted", f"request {request_id} was aborted: {why}")
            )
        return True

    def abort_engine(self, engine: Engine, why: str) -> None:
        """The engine is gone or retired: nothing is read for it any more."""
        for job in self:
            if job.transfer.engine is engine:
                job.transfer.stop(TransferState.FAILED, KvferryError("engine_gone", why))

    async def wait_new(self) -> None:
        """Wait until there is one more transfer. The caller bounds the wait."""
        await self._appeared.wait()

    async def wait(self, job: Job, until: Callable[[Job], bool], wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not until(job):
                    changed = job.changed
                    await changed.wait()

    async def close(self, timeout_s: float = 10.0) -> None:
        running = [job for job in self if not job.transfer.ended.is_set()]
        for job in running:
            job.transfer.stop(TransferState.ABORTED, KvferryError("aborted", "the daemon stops"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for job in running:
                    await job.transfer.ended.wait()
        for job in self:
            if job.fan_out is not None:
                job.fan_out.cancel()
        if self._after:
            await asyncio.wait(self._after, timeout=timeout_s)
