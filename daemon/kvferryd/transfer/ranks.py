"""The other ranks of the same engine: an order that reached one rank is handed to all, and they fail together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from kvferry.errors import KvferryError
from kvferry.schemas import ErrorBody, RankTransfer, TransferState
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import problem_from_proto, tables_to_proto
from kvferryd.config import Config
from kvferryd.peers.peers import Peers
from kvferryd.transfer.job import Job
from kvferryd.transfer.transfer import Order, Reservation, Transfer, error_body

LATE = "order_late"
"""The code with which a rank refuses an order that seems to be of an attempt before its own. Only the rank that handed
it on knows: it does so once more if its attempt goes on."""


class Ranks:
    """Speaks to the daemons of the other ranks."""

    def __init__(self, config: Config, peers: Peers) -> None:
        self._config, self._peers = config, peers

    def start(self, job: Job, order: Order, others: Mapping[int, Reservation]) -> None:
        """Hand the order on; `others` are the reservations that came with it."""
        engine = job.transfer.engine
        if engine.world_size > 1:
            for rank in range(engine.world_size):
                if rank != engine.rank:
                    job.ranks[rank] = RankTransfer(rank=rank, state=TransferState.WAITING)
            job.fan_out = asyncio.create_task(self._run(job, order, others))

    async def _run(self, job: Job, order: Order, others: Mapping[int, Reservation]) -> None:
        """Hand the order to the other ranks and keep what they say, until all have ended."""
        engine = job.transfer.engine
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await engine.until_whole()
        except TimeoutError:
            why = KvferryError(
                "roster_incomplete",
                f"ranks {engine.missing_ranks()} of engine {engine.engine_id} have not joined",
                field="roster",
                value=self._config.roster or "",
                remedy="start their daemons with the same roster",
            )
            for rank in job.ranks:
                self._rank_failed(job, rank, why)
            return
        if _failed(job):
            for rank in job.ranks:  # nobody was told: there is nothing to end
                job.ranks[rank] = RankTransfer(rank=rank, state=TransferState.ABORTED)
            job.wake()
            return
        async with asyncio.TaskGroup() as group:
            for rank in job.ranks:
                group.create_task(self._follow_rank(job, rank, engine.members[rank], order, others.get(rank)))

    async def _follow_rank(
        self, job: Job, rank: int, address: str, order: Order, reservation: Reservation | None
    ) -> None:
        engine = job.transfer.engine
        request = peer_pb2.OrderRequest(
            engine_id=engine.engine_id,
            request_id=job.transfer.request_id,
            priority=order.priority,
            source=engine_pb2.Source(engine_id=order.engine_id, address=order.address, epoch=order.epoch),
            deadline_s=order.deadline_s or 0.0,
            traceparent=order.traceparent,
            rank=engine.rank,
            attempt=job.transfer.transfer_id,
            way=order.way,
            again=job.again,
        )
        if reservation is not None:
            request.tables.CopyFrom(tables_to_proto(reservation.tables))
            if reservation.tokens is not None:
                start, stop = reservation.tokens
                request.tokens.CopyFrom(layout_pb2.TokenRange(start=start, stop=stop))
        try:
            try:
                await self._hand_on(job, rank, address, request)
            except KvferryError as error:
                if error.code != LATE or _failed(job):
                    raise
                request.again = True
                await self._hand_on(job, rank, address, request)
        except KvferryError as error:
            self._rank_failed(job, rank, error)
            return
        share = job.ranks[rank]
        if not share.state.ended:
            self._rank_failed(job, rank, KvferryError("peer_lost", f"rank {rank} at {address} stopped answering"))
        elif share.state is not TransferState.DONE:
            code = share.error.code if share.error else share.state.value
            self._stop_own(job, rank, code, aborted=share.state is TransferState.ABORTED)

    async def _hand_on(self, job: Job, rank: int, address: str, request: peer_pb2.OrderRequest) -> None:
        async with self._peers.channels.calling(address) as stub:
            async for said in stub.Order(request):
                job.ranks[rank] = _rank_transfer(said, address)
                job.wake()

    def _rank_failed(self, job: Job, rank: int, why: KvferryError) -> None:
        state = TransferState.ABORTED if why.code == "aborted" else TransferState.FAILED
        job.ranks[rank] = RankTransfer(rank=rank, state=state, error=error_body(why))
        job.wake()
        self._stop_own(job, rank, why.code)

    def _stop_own(self, job: Job, rank: int, code: str, *, aborted: bool = False) -> None:
        """One rank without its KV makes the others' useless: tell this rank's engine now, not at the deadline."""
        if aborted:
            why = KvferryError("aborted", f"rank {rank} of the same engine was aborted")
            job.transfer.stop(TransferState.ABORTED, why)
            return
        job.transfer.stop(
            TransferState.FAILED,
            KvferryError(
                "rank_failed",
                f"rank {rank} of the same engine failed: {code}",
                field="rank",
                value=rank,
                remedy="see that rank's part of the transfer record",
            ),
        )

    def stop(self, job: Job) -> None:
        """This rank has not got its KV: the others need not go on."""
        engine = job.transfer.engine
        why = job.transfer.problem.code if job.transfer.problem else job.transfer.state.value
        for rank, share in job.ranks.items():
            if not share.state.ended and rank in engine.members:
                task = asyncio.create_task(self._abort(job.transfer, rank, why))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _abort(self, transfer: Transfer, rank: int, why: str) -> None:
        engine = transfer.engine
        address = engine.members[rank]
        request = peer_pb2.AbortRequest(
            engine_id=engine.engine_id,
            request_id=transfer.request_id,
            reason=f"rank {engine.rank}: {why}",
            rank=engine.rank,
            attempt=transfer.transfer_id,
            failed=transfer.state is TransferState.FAILED,
        )
        with contextlib.suppress(KvferryError):
            async with self._peers.channels.calling(address) as stub:
                await stub.Abort(request, timeout=self._config.connect_timeout_s)


def _failed(job: Job) -> bool:
    """Whether this rank's transfer has failed or was aborted."""
    return job.transfer.ended.is_set() and job.transfer.state is not TransferState.DONE


def _rank_transfer(said: peer_pb2.RankTransfer, address: str) -> RankTransfer:
    if said.state not in {state.value for state in TransferState}:
        raise KvferryError("protocol", f"peer {address} named a state that is none", field="state", value=said.state)
    error: ErrorBody | None = None
    if said.HasField("problem"):
        error = error_body(problem_from_proto(said.problem))
    return RankTransfer(
        rank=said.rank,
        state=TransferState(said.state),
        bytes=said.nbytes,
        descriptors=said.descriptors,
        path=said.path,
        transport=said.transport,
        estimate_ms=dict(said.estimate_ms),
        phases_ms=dict(said.phases_ms),
        error=error,
    )
