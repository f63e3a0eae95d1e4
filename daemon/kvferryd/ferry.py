"""The daemon's core: what the REST API, the engine service and the peer service have in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterable

import structlog

from kvferry import __version__
from kvferry.errors import KvferryError, Malformed, NotFound
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.schemas import (
    AbortResult,
    DrainStatus,
    EngineRecord,
    Info,
    LeaseRecord,
    OrderBody,
    PeerRecord,
    PeerRequest,
    Readiness,
    TransferRecord,
    TransferState,
)
from kvferry.v1 import engine_pb2, peer_pb2
from kvferry.wire import problem_to_proto
from kvferryd.certificates import Certificates
from kvferryd.check import check_destination, check_request_id
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.engine.registry import Engines
from kvferryd.leases.lease import Lease
from kvferryd.memory import provider
from kvferryd.metrics import Metrics, Stats
from kvferryd.paths import PathName, refusals
from kvferryd.peers import allow
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.peers import Peers
from kvferryd.peers.roster import Roster, Seed
from kvferryd.transfers.order import order_of, reservations_of
from kvferryd.transfers.transfer import Transfer
from kvferryd.transfers.transfers import Transfers

log = structlog.get_logger()


class Ferry:
    """Owns the engines, peers and transfers of one daemon."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        _check_ways(config)
        self.config, self.metrics = config, metrics
        self.instance = uuid.uuid4().hex
        self._began = time.monotonic()
        self.memory = provider(config)
        self.registry = Engines(config, self.memory, self._on_lease_end, self._on_detach, self._before_retire)
        self.certificates = Certificates.of(config)
        self.peers_known = Peers(config, metrics, self.certificates)
        self.roster = Roster(config, self.peers_known.channels, Seed())
        self.jobs = Transfers(config, self.peers_known, metrics)

    # ---- transfers ----

    async def order(self, body: OrderBody, traceparent: str = "") -> tuple[TransferRecord, bool]:
        """Take a router's order; (the record, whether it is new)."""
        try:
            wanted = body.destination
            engine = self.registry.get(wanted.engine_id if wanted else None)
            allow.check(body.source.address, self.config.allow_peers)
            order = order_of(body, traceparent)
            by_rank = reservations_of(wanted, engine.world_size)
            own = by_rank.get(engine.rank)
            if own is not None:
                check_destination(engine.manifest, own.tables, own.tokens)
            transfer, created = self.jobs.order(engine, body.request_id, order, by_rank, attempt=body.attempt or 0)
        except KvferryError as error:
            self.metrics.order_refused(error.code)
            raise
        return transfer.record(), created

    def transfer(self, transfer_id: str) -> TransferRecord:
        return self.jobs.get(transfer_id).record()

    async def wait_transfer(self, transfer_id: str, wait_s: float) -> TransferRecord:
        """The record at the end of the transfer, or after `wait_s`."""
        transfer = self.jobs.get(transfer_id)
        await self.jobs.wait(transfer, _over, wait_s)
        return transfer.record()

    def transfers(self, request_id: str | None = None, state: TransferState | None = None) -> list[TransferRecord]:
        records = (transfer.record() for transfer in self.jobs if request_id in (None, transfer.request_id))
        return [record for record in records if state in (None, record.state)]

    async def wait_request(self, request_id: str, wait_s: float) -> list[TransferRecord]:
        """The records once the request's transfer has come and ended, or after `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (transfers := self.jobs.of_request(request_id)):
                    await self.jobs.wait_new()
                await asyncio.gather(*(self.jobs.wait(transfer, _over, wait_s) for transfer in transfers))
        return self.transfers(request_id)

    async def abort_transfer(self, transfer_id: str) -> TransferRecord:
        transfer = self.jobs.get(transfer_id)
        if not transfer.over:
            self.jobs.abort(transfer.engine, transfer.request_id, "by DELETE /v1/transfers")
            await self.jobs.wait(transfer, lambda it: it.ended.is_set(), self.config.connect_timeout_s)
        return transfer.record()

    async def abort_request(self, request_id: str) -> AbortResult:
        """End the request on both sides: here, on the other ranks, and where its KV comes from."""
        check_request_id(request_id)
        ranks, sources = [], []
        for transfer in self.jobs.of_request(request_id):
            engine, order = transfer.engine, transfer.order
            ranks += self._tell_ranks(engine, request_id)
            if order is not None:
                sources.append(self._tell(order.address, order.engine_id, request_id, fan_out=True))
        for engine in self.registry:
            if engine.leases.get(request_id) is not None:
                ranks += self._tell_ranks(engine, request_id)
        ended = [self.abort_here(engine, request_id, "by the router") for engine in self.registry]
        # The readers first: to one that hears of its lease's end before, the transfer has failed.
        replies = [*await asyncio.gather(*ranks), *await asyncio.gather(*sources)]
        return AbortResult(
            transfers_ended=sum(t for t, _ in ended) + sum(reply.transfers_ended for reply in replies),
            leases_ended=sum(leases for _, leases in ended) + sum(reply.leases_ended for reply in replies),
        )

    def abort_here(self, engine: Engine, request_id: str, why: str) -> tuple[int, int]:
        """(transfers, leases) ended on this rank."""
        ended = self.jobs.abort(engine, request_id, why)
        return int(ended), int(engine.leases.revoke(request_id, f"aborted: {why}"))

    def _tell_ranks(self, engine: Engine, request_id: str) -> list[Coroutine[None, None, peer_pb2.AbortReply]]:
        """The daemons of the engine's other ranks."""
        return [
            self._tell(address, engine.engine_id, request_id, fan_out=False)
            for rank, address in engine.members.items()
            if rank != engine.rank
        ]

    async def _tell(self, address: str, engine_id: str, request_id: str, *, fan_out: bool) -> peer_pb2.AbortReply:
        """Best effort: a peer that does not hear of it has its own deadlines."""
        request = peer_pb2.AbortRequest(
            engine_id=engine_id, request_id=request_id, fan_out=fan_out, reason="aborted by the router"
        )
        try:
            async with self.peers_known.channels.calling(address) as stub:
                return await stub.Abort(request, timeout=self.config.connect_timeout_s)
        except KvferryError as error:
            log.warning("abort not delivered", address=address, request_id=request_id, error=str(error))
            return peer_pb2.AbortReply()

    async def fan_out_abort(self, engine: Engine, request_id: str) -> tuple[int, int]:
        replies = await asyncio.gather(*self._tell_ranks(engine, request_id))
        return sum(reply.transfers_ended for reply in replies), sum(reply.leases_ended for reply in replies)

    # ---- leases, engines, peers ----

    def leases(self) -> list[LeaseRecord]:
        return [lease.record() for engine in self.registry for lease in engine.leases]

    async def revoke_lease(self, request_id: str) -> LeaseRecord:
        for engine in self.registry:
            lease = engine.leases.get(request_id)
            if lease is not None:
                engine.leases.revoke(request_id, "by DELETE /v1/leases")
                return lease.record()
        raise NotFound(
            "unknown_lease",
            f"no lease of request {request_id} is held here",
            field="request_id",
            value=request_id,
            remedy="GET /v1/leases lists them",
        )

    def engines(self) -> list[EngineRecord]:
        records = []
        for session in self.registry.sessions:
            engine = session.engine
            records.append(
                EngineRecord(
                    **session.rank._asdict(),
                    attached=session.attached,
                    members=dict(engine.members) if engine else {session.rank.rank: self.config.advertise},
                    notes=list(engine.notes) if engine else [],
                    manifest=engine.manifest.model_dump() if engine else {},
                )
            )
        return records

    def peers(self) -> list[PeerRecord]:
        return _peer_records(self.peers_known)

    async def prewarm(self, body: PeerRequest) -> list[PeerRecord]:
        """Shake hands now, so that the first transfer need not."""
        engine = self.registry.get(body.destination)
        return _peer_records([await self.peers_known.get(engine, body.engine_id, body.address)])

    async def forget_peer(self, engine_id: str) -> list[PeerRecord]:
        found = self.peers_known.of_engine(engine_id)
        if not found:
            raise NotFound(
                "unknown_peer",
                f"no handshake with engine {engine_id} is kept",
                field="engine_id",
                value=engine_id,
                remedy="GET /v1/peers lists them",
            )
        for _, peer in found:
            self.peers_known.forget(peer)
        return _peer_records(peer for _, peer in found)

    # ---- the daemon itself ----

    def info(self) -> Info:
        config = self.config
        return Info(
            version=__version__,
            protocol=(PROTOCOL_MIN, PROTOCOL_MAX),
            instance=self.instance,
            device=config.device,
            rest=config.rest,
            peer=config.peer,
            advertise=config.advertise,
            engine_socket=str(config.engine_socket),
            way=config.way,
            strict=config.strict,
            transports=sorted({path.transport for path in PathName}),
            uptime_s=time.monotonic() - self._began,
        )

    def readiness(self) -> Readiness:
        reasons = []
        if self.jobs.draining:
            reasons.append("draining")
        registered = [engine for engine in self.registry if engine.attached and not engine.retired.is_set()]
        if not registered:
            reasons.append("no engine has registered its cache")
        reasons += [
            f"engine {engine.engine_id}: the daemons of ranks {engine.missing_ranks()} have not joined"
            for engine in registered
            if engine.missing_ranks()
        ]
        if self.config.require_rdma and self.config.device == "cpu":
            reasons.append("require_rdma is set and host memory moves without it")
        return Readiness(ready=not reasons, reasons=reasons)

    def stats(self) -> Stats:
        regions = [region for session in self.registry.sessions for region in session.regions.values()]
        arenas = [engine.arena for engine in self.registry if engine.arena is not None]
        states = Counter(transfer.state for transfer in self.jobs)
        return Stats(
            transfers=states,
            leases=Counter(lease.state for engine in self.registry for lease in engine.leases),
            live_readers=sum(lease.live_readers for engine in self.registry for lease in engine.leases),
            owned_nbytes=sum(region.span.nbytes for region in regions if region.owned),
            adopted_nbytes=sum(region.span.nbytes for region in regions if not region.owned),
            quarantined_nbytes=sum(transfer.quarantined_nbytes for transfer in self.jobs),
            staging_nbytes=sum(arena.span.nbytes for arena in arenas),
            staging_used_nbytes=sum(arena.used_nbytes for arena in arenas),
            queue_depth=states[TransferState.WAITING] + sum(arena.waiting for arena in arenas),
            peers=sum(len(peer.ranks) for peer in self.peers_known),
            engines_attached=sum(session.attached for session in self.registry.sessions),
            draining=self.jobs.draining,
        )

    def drain_status(self) -> DrainStatus:
        leases = sum(len(engine.leases) for engine in self.registry)
        transfers = sum(not _finished(transfer) for transfer in self.jobs)
        return DrainStatus(
            draining=self.jobs.draining,
            leases=leases,
            transfers=transfers,
            drained=self.jobs.draining and not leases and not transfers,
        )

    async def drain(self, wait_s: float) -> DrainStatus:
        """Take no new transfers, and wait until leases are read and transfers ended, at most `wait_s`."""
        if not self.jobs.draining:
            self.jobs.draining = True
            for session in self.registry.sessions:
                session.tell(engine_pb2.Event(draining=engine_pb2.Draining()))
        deadline = asyncio.get_running_loop().time() + wait_s
        while not self.drain_status().drained and (left := deadline - asyncio.get_running_loop().time()) > 0:
            pending = [asyncio.ensure_future(lease.changed()) for engine in self.registry for lease in engine.leases]
            pending += [
                asyncio.ensure_future(_until(transfer.quiet if transfer.ended.is_set() else transfer.ended))
                for transfer in self.jobs
                if not _finished(transfer)
            ]
            try:
                await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in pending:
                    waiter.cancel()
        return self.drain_status()

    async def close(self) -> None:
        """End everything, in the order in which it depends on each other."""
        await self.jobs.close()
        await self.roster.close()
        await self.registry.close()
        await self.peers_known.close()
        self.memory.close()

    # ---- engines come and go ----

    def _on_detach(self, engine: Engine, why: str) -> None:
        """Nothing more is read for it; what it published may still be."""
        self.jobs.abort_engine(engine, why)

    def _on_lease_end(self, engine: Engine, lease: Lease) -> None:
        problem = problem_to_proto(lease.problem) if lease.problem else None
        ended = engine_pb2.LeaseEnded(request_id=lease.request_id, state=lease.state.value, problem=problem)
        engine.tell(engine_pb2.Event(lease_ended=ended))
        asyncio.get_running_loop().call_soon(self._note_lease_end, lease)  # the engine first

    def _note_lease_end(self, lease: Lease) -> None:
        self.metrics.lease_ended(lease.state)
        log.info(
            "lease ended",
            request_id=lease.request_id,
            engine_id=lease.engine_id,
            state=lease.state.value,
            tokens=lease.num_tokens,
            reason=lease.reason,
        )

    async def _before_retire(self, engine: Engine, why: str) -> None:
        self.jobs.abort_engine(engine, why)
        await self.roster.leave(engine)
        await self.jobs.leave(engine)
        await self.peers_known.forget_engine(engine)


def _check_ways(config: Config) -> None:
    """Refuse at the start what contradicts itself, rather than do something else."""
    if not config.arena_mb and (config.strict or config.way == "staged"):
        raise Malformed(
            "bad_config",
            f"{'strict = true' if config.strict else 'way = staged'} needs a staging arena",
            field="arena_mb",
            value=config.arena_mb,
            remedy="raise arena_mb, or set strict = false and way = auto, direct or mapped",
        )
    if config.strict and config.way in ("direct", "mapped"):
        raise Malformed(
            "bad_config",
            f"strict = true leaves nothing to be read {config.way}",
            field="way",
            value=config.way,
            remedy="set way = auto or staged, or strict = false",
        )


def _over(transfer: Transfer) -> bool:
    return transfer.over


def _finished(transfer: Transfer) -> bool:
    """Its part on this rank has ended, and nothing can be written any more."""
    return transfer.ended.is_set() and transfer.quiet.is_set()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def _peer_records(peers: Iterable[PeerEngine]) -> list[PeerRecord]:
    return [
        PeerRecord(
            engine_id=peer.engine_id,
            rank=rank.rank,
            address=rank.address,
            epoch=peer.epoch,
            protocol=rank.protocol,
            version=rank.version,
            agent=rank.agent_name,
            ways=refusals(peer.own, peer),
            bytes_read=rank.bytes_read,
            transfers=rank.transfers,
        )
        for peer in peers
        for rank in peer.ranks.values()
    ]
