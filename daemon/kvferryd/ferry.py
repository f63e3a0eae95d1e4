"""The daemon's core, which the REST API, the engine service and the peer service share."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence

import structlog

from kvferry import __version__, schemas
from kvferry.errors import KvferryError, NotFound
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import engine_pb2, peer_pb2
from kvferry.wire import LEASE_STATES, problem_to_proto
from kvferryd.certificates import CertificateFiles, Certificates
from kvferryd.check import check_destination, check_request_id
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.engine.registry import Engines
from kvferryd.leases.lease import Lease
from kvferryd.memory import provider
from kvferryd.metrics import Metrics
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
        self.config, self.metrics = config, metrics
        self.instance = uuid.uuid4().hex
        self._began = time.monotonic()
        self.memory = provider(config)
        self.certificates = CertificateFiles.of(config)
        self.proof = self.certificates or _shared_secret(config)
        """How peers prove themselves; None on loopback only."""
        self.peers_known = Peers(config, metrics, self.proof)
        self.roster = Roster(config, self.peers_known.channels, Seed())
        self.jobs = Transfers(config, self.peers_known, metrics)
        # What an engine that has left published may still be read; nothing more is read for it.
        self.registry = Engines(config, self.memory, self._on_lease_end, self.jobs.abort_engine, self._before_retire)

    # ---- transfers ----

    async def order(self, body: schemas.OrderBody, traceparent: str = "") -> tuple[schemas.TransferRecord, bool]:
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

    def transfer(self, transfer_id: str) -> schemas.TransferRecord:
        return self.jobs.get(transfer_id).record()

    async def wait_transfer(self, transfer_id: str, wait_s: float) -> schemas.TransferRecord:
        """The record at the end of the transfer, or after `wait_s`."""
        transfer = self.jobs.get(transfer_id)
        await self.jobs.wait(transfer, _over, wait_s)
        return transfer.record()

    def transfers(
        self, request_id: str | None = None, state: schemas.TransferState | None = None
    ) -> list[schemas.TransferRecord]:
        records = (transfer.record() for transfer in self.jobs if request_id in (None, transfer.request_id))
        return [record for record in records if state in (None, record.state)]

    async def wait_request(self, request_id: str, wait_s: float) -> None:
        """Until the request's transfer has come and ended, at most `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (transfers := self.jobs.of_request(request_id)):
                    await self.jobs.wait_new()
                await asyncio.gather(*(self.jobs.wait(transfer, _over, wait_s) for transfer in transfers))

    async def abort_transfer(self, transfer_id: str) -> schemas.TransferRecord:
        transfer = self.jobs.get(transfer_id)
        if not transfer.over:
            self.jobs.abort(transfer.engine, transfer.request_id, "by DELETE /v1/transfers")
            await self.jobs.wait(transfer, lambda it: it.ended.is_set(), self.config.connect_timeout_s)
        return transfer.record()

    async def abort_request(self, request_id: str) -> schemas.AbortResult:
        """End the request on both sides: here, on the other ranks, and where its KV comes from."""
        check_request_id(request_id)
        transfers = self.jobs.of_request(request_id)
        reading = [transfer.engine for transfer in transfers]
        holding = [engine for engine in self.registry if engine.leases.get(request_id) is not None]
        orders = [transfer.order for transfer in transfers if transfer.order is not None]
        here = [self.abort_here(engine, request_id, "by the router") for engine in self.registry]
        # The readers first: a reader whose lease ends before its transfer is aborted reports a failed transfer.
        ranks = await asyncio.gather(*(self.fan_out_abort(engine, request_id) for engine in {*reading, *holding}))
        sources = [self._abort_at(order.address, order.engine_id, request_id, fan_out=True) for order in orders]
        ended, revoked = _total([*here, *ranks, *await asyncio.gather(*sources)])
        return schemas.AbortResult(transfers_ended=ended, leases_ended=revoked)

    def abort_here(self, engine: Engine, request_id: str, why: str, *, lease_only: bool = False) -> tuple[int, int]:
        """(transfers, leases) ended on this rank."""
        ended = not lease_only and self.jobs.abort(engine, request_id, why)
        return int(ended), int(engine.leases.revoke(request_id, f"aborted: {why}"))

    async def fan_out_abort(self, engine: Engine, request_id: str, *, lease_only: bool = False) -> tuple[int, int]:
        """(transfers, leases) ended by the daemons of the engine's other ranks."""
        others = [address for rank, address in engine.members.items() if rank != engine.rank]
        key = b"" if lease_only else engine.roster_key
        aborts = (self._abort_at(each, engine.engine_id, request_id, key=key) for each in others)
        return _total(await asyncio.gather(*aborts))

    async def _abort_at(
        self, address: str, engine_id: str, request_id: str, *, fan_out: bool = False, key: bytes = b""
    ) -> tuple[int, int]:
        """Best effort: a peer that is not reached has its own deadlines."""
        request = peer_pb2.AbortRequest(
            engine_id=engine_id, request_id=request_id, fan_out=fan_out, reason="aborted by the router", key=key
        )
        try:
            async with self.peers_known.channels.calling(address) as stub:
                reply = await stub.Abort(request, timeout=self.config.connect_timeout_s)
        except KvferryError as error:
            log.warning("abort not delivered", address=address, request_id=request_id, error=str(error))
            return 0, 0
        return reply.transfers_ended, reply.leases_ended

    # ---- leases, engines, peers ----

    def leases(self) -> list[schemas.LeaseRecord]:
        return [lease.record() for engine in self.registry for lease in engine.leases]

    def revoke_lease(self, request_id: str) -> schemas.LeaseRecord:
        for engine in self.registry:
            lease = engine.leases.get(request_id)
            if lease is not None:
                engine.leases.revoke(request_id, "by DELETE /v1/leases")
                return lease.record()
        why, remedy = f"no lease of request {request_id} is held here", "GET /v1/leases lists them"
        raise NotFound("unknown_lease", why, field="request_id", value=request_id, remedy=remedy)

    def engines(self) -> list[schemas.EngineRecord]:
        records = []
        for session in self.registry.sessions:
            engine = session.engine
            records.append(
                schemas.EngineRecord(
                    **session.rank._asdict(),
                    attached=session.attached,
                    members=dict(engine.members) if engine else {session.rank.rank: self.config.advertise},
                    notes=list(engine.notes) if engine else [],
                    manifest=engine.manifest.model_dump() if engine else {},
                )
            )
        return records

    def peers(self) -> list[schemas.PeerRecord]:
        return _peer_records(self.peers_known)

    async def prewarm(self, body: schemas.PeerRequest) -> list[schemas.PeerRecord]:
        """Shake hands now, so that the first transfer need not."""
        engine = self.registry.get(body.destination)
        return _peer_records([await self.peers_known.get(engine, body.engine_id, body.address)])

    def forget_peer(self, engine_id: str) -> list[schemas.PeerRecord]:
        found = self.peers_known.of_engine(engine_id)
        if not self.peers_known.unbind(engine_id) and not found:
            why, remedy = f"no handshake with engine {engine_id} is kept", "GET /v1/peers lists them"
            raise NotFound("unknown_peer", why, field="engine_id", value=engine_id, remedy=remedy)
        for peer in found:
            self.peers_known.forget(peer)
        return _peer_records(found)

    # ---- the daemon itself ----

    def info(self) -> schemas.Info:
        shown = {"device", "rest", "peer", "advertise", "engine_socket", "way", "strict"}
        return schemas.Info(
            **self.config.model_dump(mode="json", include=shown),
            version=__version__,
            protocol=(PROTOCOL_MIN, PROTOCOL_MAX),
            instance=self.instance,
            transports=sorted({path.transport for path in PathName}),
            uptime_s=time.monotonic() - self._began,
        )

    def readiness(self) -> schemas.Readiness:
        reasons = []
        if self.jobs.draining:
            reasons.append("draining")
        open_ones = [session for session in self.registry.sessions if session.attached and not session.retired.is_set()]
        registered = [session.engine for session in open_ones if session.engine is not None]
        if not registered:
            reasons.append("no engine has registered its cache")
        reasons += [
            f"engine {engine.engine_id}: the daemons of ranks {engine.missing_ranks()} have not joined"
            for engine in registered
            if engine.missing_ranks()
        ]
        if self.config.require_rdma and self.config.device == "cpu":
            reasons.append("require_rdma is set and host memory moves without it")
        return schemas.Readiness(ready=not reasons, reasons=reasons)

    def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) of /metrics; gauges are as things stand now."""
        leases = [lease for engine in self.registry for lease in engine.leases]
        regions = [region for session in self.registry.sessions for region in session.regions.values()]
        arenas = [engine.arena for engine in self.registry if engine.arena is not None]
        states, lease_states = Counter(each.state for each in self.jobs), Counter(lease.state for lease in leases)
        metrics = self.metrics
        for state in schemas.TransferState:
            metrics.transfers.labels(state.value).set(states[state])
        for lease_state in schemas.LeaseState:
            metrics.leases.labels(lease_state.value).set(lease_states[lease_state])
        for owned, name in ((True, "owned"), (False, "adopted")):
            metrics.regions.labels(name).set(sum(each.span.nbytes for each in regions if each.owned is owned))
        metrics.live_readers.set(sum(lease.live_readers for lease in leases))
        metrics.quarantined.set(sum(transfer.quarantined_nbytes for transfer in self.jobs))
        metrics.staging.set(sum(arena.span.nbytes for arena in arenas))
        metrics.staging_used.set(sum(arena.used_nbytes for arena in arenas))
        waiting = states[schemas.TransferState.WAITING]  # for the router's order or the engine's reservation
        metrics.queue_depth.set(waiting + sum(arena.waiting for arena in arenas))
        metrics.peers.set(sum(len(peer.ranks) for peer in self.peers_known))
        metrics.engines_attached.set(sum(session.attached for session in self.registry.sessions))
        metrics.draining.set(self.jobs.draining)
        metrics.ready.set(self.readiness().ready)
        return metrics.exposition(accept)

    def drain_status(self) -> schemas.DrainStatus:
        leases = sum(len(engine.leases) for engine in self.registry)
        transfers = sum(not _finished(transfer) for transfer in self.jobs)
        draining = self.jobs.draining
        drained = draining and not leases and not transfers
        return schemas.DrainStatus(draining=draining, leases=leases, transfers=transfers, drained=drained)

    async def drain(self, wait_s: float) -> schemas.DrainStatus:
        """Take no new transfers, and wait until leases are read and transfers ended, at most `wait_s`."""
        if not self.jobs.draining:
            self.jobs.draining = True
            for session in self.registry.sessions:
                session.tell(engine_pb2.Event(draining=engine_pb2.Draining()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self.drain_status().drained:
                    await self._one_ends()
        return self.drain_status()

    async def _one_ends(self) -> None:
        """Until a lease changes, or a transfer ends or is quiet."""
        leases = [lease.changing for engine in self.registry for lease in engine.leases]
        unfinished = [transfer for transfer in self.jobs if not _finished(transfer)]
        transfers = [each.quiet if each.ended.is_set() else each.ended for each in unfinished]
        waiting = [asyncio.ensure_future(event.wait()) for event in (*leases, *transfers)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    async def close(self) -> None:
        """End everything, in the order in which it depends on each other."""
        await self.jobs.close()
        await self.registry.close()
        await self.peers_known.close()

    # ---- engines come and go ----

    def _on_lease_end(self, engine: Engine, lease: Lease) -> None:
        problem = problem_to_proto(lease.problem) if lease.problem else None
        ended = engine_pb2.LeaseEnded(
            request_id=lease.request_id, state=lease.state.value, lease_state=LEASE_STATES[lease.state], problem=problem
        )
        engine.session.tell(engine_pb2.Event(lease_ended=ended))
        asyncio.get_running_loop().call_soon(self._note_lease_end, lease)  # the engine first

    def _note_lease_end(self, lease: Lease) -> None:
        self.metrics.lease_ended(lease.state)
        log.info(
            "lease ended", request_id=lease.request_id, engine_id=lease.engine_id, state=lease.state.value,
            tokens=lease.num_tokens, reason=lease.reason,
        )  # fmt: skip

    async def _before_retire(self, engine: Engine, why: str) -> None:
        self.jobs.abort_engine(engine, why)
        await self.roster.leave(engine)
        await self.jobs.leave(engine)
        await self.peers_known.forget_engine(engine)


def _shared_secret(config: Config) -> Certificates | None:
    if config.peer_secret_file is None:
        return None
    from kvferryd.peers.secret import PeerSecret  # 60 ms, for who needs it

    return PeerSecret(config.peer_secret_file)


def _over(transfer: Transfer) -> bool:
    return transfer.over


def _finished(transfer: Transfer) -> bool:
    """Its part on this rank has ended, and nothing can be written any more."""
    return transfer.ended.is_set() and transfer.quiet.is_set()


def _total(ended: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of (transfers, leases)."""
    return sum(transfers for transfers, _ in ended), sum(leases for _, leases in ended)


def _peer_records(peers: Iterable[PeerEngine]) -> list[schemas.PeerRecord]:
    return [
        schemas.PeerRecord(
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
