"""The daemon's core, which the REST API, the engine service and the peer service share."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from statistics import median
from typing import Any

from kvferry import __version__, schemas
from kvferry.errors import Conflict, KvferryError, Malformed, NotFound, Unavailable
from kvferry.protocol.events import GiveUp, ReplaceWeights
from kvferry.protocol.values import Account
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.v1 import engine_pb2, peer_pb2
from kvferry.wire import LEASE_STATES, problem_to_proto
from kvferryd.aio import Notes, to_the_end
from kvferryd.check import check_destination, check_request_id
from kvferryd.config import Config
from kvferryd.ending import Step, ended
from kvferryd.engine import Engine
from kvferryd.engine.registry import Engines
from kvferryd.leases.record import reader_id
from kvferryd.memory import provider
from kvferryd.memory.kept import Keeper
from kvferryd.memory.node import NodeDir
from kvferryd.observe import logs, spans
from kvferryd.observe.history import History, opened
from kvferryd.observe.metrics import Metrics, total
from kvferryd.paths import refusals
from kvferryd.paths.move import Transport
from kvferryd.peers import allow
from kvferryd.peers.certificates import CertificateFiles, Certificates
from kvferryd.peers.contact import Contact
from kvferryd.peers.inbound import Inbound
from kvferryd.peers.known import KnownPeers
from kvferryd.peers.peer import PHASES, Figures, PeerEngine
from kvferryd.peers.peers import Peers
from kvferryd.peers.remembered import Remembered
from kvferryd.peers.roster import Roster, Seed, for_host
from kvferryd.peers.served import served
from kvferryd.process import heap
from kvferryd.transfers.order import order_of, reservations_of
from kvferryd.transfers.ranks import naming
from kvferryd.transfers.record import json_of, record_of
from kvferryd.transfers.transfer import Transfer
from kvferryd.transfers.transfers import Transfers

log = logs.get(__name__)
LOOK_S, COME_ALONG_S = 1.0, 3.0
"""How often the files of what proves us are looked at; how long callers have to connect anew by theirs."""
NAMED = 32
"""Missing ranks of which /readyz says why."""
UNMET, UNMET_S = 64, 600.0
"""Daemons without a handshake that are said not to answer, and for how long after the last call."""


class Ferry:
    """Owns the engines, peers and transfers of one daemon."""

    def __init__(
        self, config: Config, metrics: Metrics, keeper: Keeper | None = None, history: History | None = None
    ) -> None:
        self.config, self.metrics = config, metrics
        self.history = history or opened()
        self.instance = uuid.uuid4().hex
        self._began = time.monotonic()
        self._stopping = False
        self._fewer = asyncio.Event()
        """Set when a lease or a transfer is over, or a drain begins or is cancelled; another takes its place."""
        self.closing = asyncio.Event()
        """The process ends now: nobody is to wait for anything any more."""
        self.memory = provider(config, keeper)
        self.certificates = CertificateFiles.of(config)
        self.proof = self.certificates or _shared_secret(config)
        """How peers prove themselves; None on loopback only."""
        remembered = Remembered(keeper.peers if keeper else None)
        self.node = NodeDir.of(config)
        self.peers_known, self.inbound = Peers(config, metrics, self.proof, remembered, self.node), Inbound(remembered)
        self.roster = Roster(config, self.peers_known.channels, Seed(), self.instance, self._on_roster)
        self.spans = spans.made(self.instance)
        self.notes = Notes(lambda: self.jobs.unfinished > 0, self.history.flush)
        self.jobs = Transfers(
            config, self.peers_known, metrics, self.history, self.notes, self._one_fewer, self.instance, self.spans
        )
        # Leases of an engine that has left may still be read; nothing more is read for it.
        self.registry = Engines(
            config, self.memory, self._on_lease_end, self._on_served, self.jobs.abort_engine, self._before_retire
        )
        self.known_peers = KnownPeers(config, self.peers_known, lambda: self.registry)

    # ---- transfers ----

    async def order(self, body: schemas.OrderBody, trace: logs.Trace = logs.UNTRACED) -> tuple[schemas.Ordered, bool]:
        """Take a router's order; (its transfer, whether the order is new)."""
        try:
            engine = self.registry.get(body.destination.engine_id if body.destination else None)
            if engine.rank:
                return await self.jobs.ranks.lead(engine, body, trace)
            return self.lead(engine, body, trace)
        except KvferryError as error:
            self.metrics.order_refused(error.code)
            raise

    def lead(self, engine: Engine, body: schemas.OrderBody, trace: logs.Trace) -> tuple[schemas.Ordered, bool]:
        """As `order`, on rank 0, for all ranks of its engine. Raises KvferryError."""
        allow.check(body.source.address, self.config.allow_peers)
        if body.source.engine_id == engine.engine_id:
            why, name = f"engine {engine.engine_id} is to read from itself", engine.engine_id
            remedy = "order at a daemon of the engine that receives; `source` is the other one"
            raise Malformed("own_engine", why, field="source.engine_id", value=name, remedy=remedy)
        order = order_of(body, trace)
        by_rank = reservations_of(body.destination, engine.world_size)
        own = by_rank.get(engine.rank)
        if own is not None:
            check_destination(engine.manifest, own.tables, own.tokens)
        transfer, created = self.jobs.order(
            engine, body.request_id, order, by_rank, number=body.attempt or 0, order_id=body.order_id or ""
        )
        return schemas.Ordered(transfer_id=transfer.transfer_id, state=transfer.state_of_all), created

    async def transfer(self, transfer_id: str, wait_s: float = 0.0, *, abort: bool = False) -> schemas.TransferRecord:
        """The record as it is, at the end of the transfer, or after `wait_s`. abort: end it. Raises KvferryError
        (`unknown_transfer`)."""
        if (transfer := self.jobs.find(transfer_id)) is None:
            if (before := self._before(transfer_id)) is not None:
                return before
            for engine in self.registry:
                if engine.rank:
                    with contextlib.suppress(NotFound):
                        return await self.jobs.ranks.record(engine, transfer_id, wait_s, abort=abort)
        transfer = transfer or self.jobs.get(transfer_id)
        if abort:
            await self.end_transfer(transfer)
        else:
            await self.until_over(transfer, wait_s)
        return record_of(transfer)

    def _before(self, transfer_id: str) -> schemas.TransferRecord | None:
        """The record of a transfer of an earlier daemon, which has ended with it if not before."""
        found = (each.body for each in self.history.earlier if each.transfer_id == transfer_id)
        body = next(found, None)
        return None if body is None else schemas.TransferRecord.model_validate_json(body)

    async def source_half(self, transfer_id: str) -> schemas.SourceHalf:
        """The lease that a transfer reads, as the source's daemons know it. Raises KvferryError
        (`unknown_transfer`)."""
        if self.jobs.find(transfer_id) is None and self._before(transfer_id) is not None:
            return schemas.SourceHalf(why="it ended with the daemon before this one, which alone had met the source")
        transfer = self.jobs.get(transfer_id)
        if (order := transfer.order) is None or not transfer.lease:
            return schemas.SourceHalf(why="it has not learned of a lease")
        for peer in self.peers_known.of_engine(order.engine_id):
            if peer.own.session.rank == transfer.own and peer.epoch == transfer.source_epoch:
                timeout_s = self.config.connect_timeout_s
                return schemas.SourceHalf(ranks=await served(peer, transfer.request_id, transfer.lease, timeout_s))
        return schemas.SourceHalf(why=f"engine {order.engine_id}, as it was read, is not known any more")

    async def until_over(self, transfer: Transfer, wait_s: float) -> None:
        """Or until `wait_s` have passed."""
        await self.jobs.wait(transfer, _over, wait_s)

    async def end_transfer(self, transfer: Transfer) -> None:
        if not transfer.over:
            self.jobs.abort_transfer(transfer, "by DELETE /v1/transfers")
            await self.until_over(transfer, self.config.connect_timeout_s)

    def transfers(
        self, request_id: str | None, state: schemas.TransferState | None, since: str, limit: int
    ) -> tuple[list[bytes], str, bool]:
        """(records as JSON, cursor, whether they are all there are): see `schemas.TransferList`."""

        self.notes.flush()

        def wanted(transfer: Transfer) -> bool:
            return request_id in (None, transfer.request_id) and state in (None, transfer.state_of_all)

        found, cursor, whole = self.jobs.listed(since, limit, wanted)
        records = [json_of(transfer) for transfer in found]
        if whole and len(records) < limit:
            before = [
                each.body
                for each in self.history.earlier
                if request_id in (None, each.request_id) and state in (None, each.state)
            ]
            records = before[len(records) - limit :] + records
        return records, cursor, whole

    async def wait_request(self, request_id: str, wait_s: float) -> None:
        """Until the request's transfer has come and ended, at most `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (transfers := self.jobs.of_request(request_id)):
                    await self.jobs.wait_new(request_id)
                await asyncio.gather(*(self.jobs.wait(transfer, _over, wait_s) for transfer in transfers))

    async def abort_request(self, request_id: str) -> schemas.AbortResult:
        """End the request on both sides: here, on the other ranks, and where its KV comes from."""
        check_request_id(request_id)
        transfers = self.jobs.of_request(request_id)
        reading = {transfer.own for transfer in transfers}
        concerned = [
            engine
            for engine in self.registry
            if engine.rank or engine.session.rank in reading or engine.leases.get(request_id) is not None
        ]
        here = [self.abort_here(engine, request_id, "by the router") for engine in self.registry]
        # The readers first: a reader whose lease ends before its transfer is aborted reports a failed transfer.
        ranks = await asyncio.gather(*(self.fan_out_abort(engine, request_id) for engine in concerned))
        sources = await self.abort_at_sources(transfers)
        ended, revoked = _total([*here, *ranks, sources])
        return schemas.AbortResult(transfers_ended=ended, leases_ended=revoked)

    def replace_weights(self, engine: Engine, weights: str) -> tuple[int, int]:
        """The engine has these from now on: what others computed is not read any more, here or from here. (leases
        revoked, transfers failed.)"""
        before, engine.weights = engine.weights, weights
        ended = engine.leases.ended_by(ReplaceWeights(weights, f"the weights {before!r} were replaced by {weights!r}"))
        failed = self.jobs.replace_weights(engine)
        about = {"leases": ended, "transfers": failed}
        log.info(
            "weights replaced", engine_id=engine.engine_id, rank=engine.rank, weights=weights, before=before, **about
        )
        return ended, failed

    def abort_here(
        self, engine: Engine, request_id: str, why: str, *, reader: peer_pb2.Reader | None = None
    ) -> tuple[int, int]:
        """(transfers, leases) ended on this rank. reader: who asks, where it is no rank of this engine: it ends no
        transfer, and no lease that others read."""
        if reader is not None:
            return 0, engine.leases.ended_by(GiveUp(request_id, f"aborted: {why}", reader_id(reader)))
        ended = self.jobs.abort(engine, request_id, why)
        return int(ended), int(engine.leases.revoke(request_id, f"aborted: {why}"))

    async def fan_out_abort(
        self, engine: Engine, request_id: str, *, reader: peer_pb2.Reader | None = None
    ) -> tuple[int, int]:
        """(transfers, leases) ended by the daemons of the engine's other ranks."""
        shown = {"key": engine.roster.key} if reader is None else {"reader": reader}
        request = peer_pb2.AbortRequest(engine_id=engine.engine_id, request_id=request_id, **shown)
        return _total(
            await asyncio.gather(*(self._abort_at(each, request) for each in engine.roster.other_addresses.values()))
        )

    async def abort_at_sources(self, transfers: Iterable[Transfer]) -> tuple[int, int]:
        """(transfers, leases) ended where these read from."""
        return _total(await asyncio.gather(*map(self._abort_at_source, transfers)))

    async def _abort_at_source(self, transfer: Transfer) -> tuple[int, int]:
        if (order := transfer.order) is None:
            return 0, 0
        request = peer_pb2.AbortRequest(
            engine_id=order.engine_id, request_id=transfer.request_id, fan_out=True, reader=transfer.reader
        )
        return await self._abort_at(order.address, request)

    async def _abort_at(self, address: str, request: peer_pb2.AbortRequest) -> tuple[int, int]:
        """Best effort: a peer that is not reached has its own deadlines."""
        request.reason = "aborted by the router"
        try:
            async with self.peers_known.channels.calling(address) as stub:
                reply = await stub.Abort(request, timeout=self.config.connect_timeout_s)
        except KvferryError as error:
            log.warning("abort not delivered", address=address, request_id=request.request_id, error=str(error))
            return 0, 0
        return reply.transfers_ended, reply.leases_ended

    # ---- leases, engines, peers ----

    def leases(self, limit: int, ended: int) -> schemas.LeaseList:
        """The newest `limit` that are held, and the last `ended` that are not, the oldest first."""
        live = [(engine.leases, lease) for engine in self.registry for lease in engine.leases]
        over = chain.from_iterable(islice(engine.leases.ended(), ended) for engine in self.registry)
        last = sorted(over, key=lambda record: record.ended_at or 0.0)[-ended:] if ended else []
        held = [leases.record(lease) for leases, lease in live[-limit:]]
        return schemas.LeaseList(leases=[*last, *held], total=len(live))

    def revoke_lease(self, request_id: str) -> schemas.LeaseRecord:
        for engine in self.registry:
            if engine.leases.revoke(request_id, "by DELETE /v1/leases"):
                return next(engine.leases.ended())
        why, remedy = f"no lease of request {request_id} is held here", "GET /v1/leases lists them"
        raise NotFound("unknown_lease", why, field="request_id", value=request_id, remedy=remedy)

    def engines(self, *, manifests: bool = True) -> list[schemas.EngineRecord]:
        return [
            schemas.EngineRecord(
                **session.rank._asdict(),
                attached=session.attached,
                members=engine.roster.addresses if engine else {session.rank.rank: self.config.advertise},
                rest=self.roster.rest(engine) if engine else {},
                gone=engine.roster.gone if engine else {},
                notes=list(engine.notes) if engine else [],
                weights=engine.weights if engine else "",
                cache_bytes=sum(region.span.nbytes for region in session.regions.values()),
                arena_bytes=engine.arena.span.nbytes if engine and engine.arena else 0,
                manifest=engine.manifest.model_dump() if engine and manifests else {},
            )
            for session in self.registry.sessions
            for engine in [session.engine]
        ]

    def peers(self) -> schemas.PeerList:
        self.notes.flush()
        inbound = [each for engine in self.registry for each in engine.leases.inbound()]
        lost = [
            schemas.PeerRecord(
                engine_id=engine_id, rank=rank, address=contact.address, epoch=epoch, protocol=0, version="", agent="",
                **_contact_fields(contact, connected=False),
            )
            for engine_id, epoch, rank, contact in self._forgotten()
        ]  # fmt: skip
        unmet = [
            schemas.UnmetRecord(
                engine_id=engine_id, rank=rank, address=contact.address, failures=contact.failures,
                last_error=schemas.ErrorBody.of(contact.error), last_error_at=contact.failed_at,
                last_contact_at=contact.answered_at,
            )
            for engine_id, rank, contact in self._unmet()
            if contact.error and contact.failed_at
        ]  # fmt: skip
        return schemas.PeerList(
            peers=_peer_records(self.peers_known, self.config.advertise), lost=lost, unmet=unmet, inbound=inbound,
            failed=self.history.failures.of_engines(),
        )  # fmt: skip

    def _unmet(self) -> list[tuple[str, int | None, Contact]]:
        """(engine, rank, contact) of daemons that were called lately and do not answer; peers and rank 0 are told
        elsewhere. The engine is known for other ranks of ours; it is empty where nobody was ever met."""
        told = {self.config.roster}.union(*(peer.addresses for peer in self.peers_known))
        told = told.union(*(home.addresses for _, home in self.peers_known.forgotten()))
        since = time.time() - UNMET_S
        found = [
            (contact.failed_at, contact.address, contact)
            for contact in self.peers_known.channels.in_trouble()
            if contact.failed_at and contact.failed_at > since and contact.address not in told
        ]
        return [(*contact.rank, contact) for *_, contact in sorted(found, reverse=True)[:UNMET]]

    def _forgotten(self) -> list[tuple[str, str, int, Contact]]:
        """(engine, epoch, rank, contact) of peers that were forgotten, and have not answered since."""
        ranks = (
            (engine_id, home.epoch, rank, self.peers_known.channels.contact(address))
            for engine_id, home in self.peers_known.forgotten()
            for rank, address in enumerate(home.addresses)
        )
        return [each for each in ranks if each[-1].trouble]

    async def prewarm(self, body: schemas.PeerRequest) -> list[schemas.PeerRecord]:
        """Shake hands now, on all ranks of the engine that will read, so that the first transfer need not. The records
        are of this rank. Raises KvferryError, which names the rank that could not."""
        engine = self.registry.get(body.destination)
        await to_the_end([self._meet(engine, body), self.jobs.ranks.prewarm(engine, body.engine_id, body.address)])
        met = await self.peers_known.of(engine).get(body.engine_id, body.address)
        return _peer_records([met], self.config.advertise)

    async def _meet(self, engine: Engine, body: schemas.PeerRequest) -> None:
        with naming(engine, engine.rank):
            await self.peers_known.of(engine).get(body.engine_id, body.address)

    def peer(self, engine_id: str, destination: str | None) -> PeerEngine:
        """The peer engine as one engine of ours knows it."""
        for peer in self.peers_known.of_engine(engine_id):
            if destination in (None, peer.own.engine_id):
                return peer
        raise _unknown_peer(engine_id)

    def forget_peer(self, engine_id: str) -> list[schemas.PeerRecord]:
        found = self.peers_known.of_engine(engine_id)
        contacts = [contact for forgotten, _, _, contact in self._forgotten() if forgotten == engine_id]
        contacts += [rank.channel.contact for peer in found for rank in peer.ranks.values()]
        if not self.peers_known.unbind(engine_id) and not found:
            raise _unknown_peer(engine_id)
        for peer in found:
            self.peers_known.of(peer.own).forget(peer)
        records = _peer_records(found, self.config.advertise)
        for contact in contacts:
            contact.forgive()
        return records

    # ---- the daemon itself ----

    def info(self) -> schemas.Info:
        gpu = self.config.device != "cpu"
        shown = {"device", "rest", "peer", "advertise", "engine_socket", "way", "strict"}
        return schemas.Info(
            **self.config.model_dump(mode="json", include=shown),
            version=__version__,
            protocol=(PROTOCOL_MIN, PROTOCOL_MAX),
            instance=self.instance,
            transports=[each for each in Transport if gpu or each is Transport.UCX],
            uptime_s=time.monotonic() - self._began,
        )

    def readiness(self) -> schemas.Readiness:
        reasons = []
        if self.jobs.draining:
            reasons.append("draining")
        open_ones = [session for session in self.registry.sessions if session.attached]
        registered = [session.engine for session in open_ones if session.engine is not None]
        if not registered:
            reasons.append("no engine has registered its cache")
        for engine in registered:
            name = f"engine {engine.engine_id}"
            if missing := engine.roster.missing:
                rosters, why = self.roster.seed.rosters, ""
                for rank in missing[:NAMED]:
                    if rank in engine.roster.gone:
                        why += f"; rank {rank} was at {engine.roster.gone[rank]}"
                    if kept_out := rosters.why_missing(engine.engine_id, engine.epoch, rank):
                        why += f"; {kept_out}"
                reasons.append(f"{name}: the daemons of ranks {missing} have not joined, or have gone{why}")
            if fault := self.roster.fault(engine):
                reasons.append(f"{name}: {fault}")
            if engine.agent.broken:
                why = f"NIXL has broken ({engine.agent.broken})"
                reasons.append(f"{name}: {why}: start the daemon and the engine again")
            if draining := list(engine.roster.draining):
                reasons.append(f"{name}: ranks {draining} are draining")
            if awaited := self.peers_known.awaited(engine) + self.inbound.awaited(engine):
                reasons.append(f"{name}: {awaited} peers of the daemon before are not back yet")
            if engine.roster.unseeded:
                reasons.append(f"{name}: the daemon that keeps its roster does not answer: {engine.roster.unseeded}")
        if self.config.require_rdma and self.config.device == "cpu":
            reasons.append("require_rdma is set and host memory moves without it")
        warnings = [_warning(*each) for each in self._silent()] + self.registry.unfreed.said()
        wrong = bool(warnings) or self.history.failures.lately() is not None
        well = schemas.Standing.DEGRADED if wrong else schemas.Standing.READY
        state = schemas.Standing.NOT_READY if reasons else well
        return schemas.Readiness(ready=not reasons, state=state, reasons=reasons, warnings=warnings)

    def _silent(self) -> list[tuple[str, int | None, Contact]]:
        """(engine, rank, contact) of each peer that does not answer or cannot be read; the engine as of `_unmet`."""
        self.notes.flush()
        contacts: dict[tuple[str, int | None], Contact] = {
            (peer.engine_id, rank.rank): rank.channel.contact
            for peer in self.peers_known
            for rank in peer.ranks.values()
        }
        contacts |= {(engine_id, rank): contact for engine_id, _, rank, contact in self._forgotten()}
        met = [(*named, contact) for named, contact in contacts.items() if contact.trouble]
        return met + self._unmet()

    def totals(self) -> schemas.Totals:
        self.notes.flush()
        live = [lease for engine in self.registry for lease in engine.leases]
        arenas = [engine.arena for engine in self.registry if engine.arena is not None]
        states = Counter(each.state_of_all if each.over_number else each.state for each in self.jobs)
        lease_states = sum((engine.leases.states() for engine in self.registry), Counter[schemas.LeaseState]())
        waiting = Counter(each.waits_for for each in self.jobs)
        return schemas.Totals(
            transfers={state.value: states[state] for state in schemas.TransferState},
            waiting={awaited.value: waiting[awaited] for awaited in schemas.Awaited},
            leases={state.value: lease_states[state] for state in schemas.LeaseState},
            live_readers=sum(lease.readers.live for lease in live),
            queue=states[schemas.TransferState.WAITING] + sum(arena.waiting for arena in arenas),
            quarantined_bytes=sum(transfer.quarantined_nbytes for transfer in self.jobs),
            unfreed_bytes=self.registry.unfreed.nbytes,
            staging_bytes=sum(arena.span.nbytes for arena in arenas),
            staging_used_bytes=sum(arena.used_nbytes for arena in arenas),
            read_bytes=total(self.metrics.read),
            served_bytes=total(self.metrics.served),
            process_bytes=heap.resident(),
            failed_lately=self.history.failures.lately(),
            readiness=self.readiness(),
        )

    async def told(self, span_s: int, step_s: int, since: float, *, peers: bool) -> schemas.History:
        """Raises KvferryError (`history_unreadable`)."""
        self.notes.flush()
        now = time.time()
        try:
            told = await asyncio.to_thread(self.history.told, span_s, step_s, since, peers=peers)
        except OSError as error:
            why, remedy = f"the history cannot be read: {error}", "look at the state folder"
            raise Unavailable("history_unreadable", why, remedy=remedy) from None
        points, marks, of_peers = told
        return schemas.History(
            now=now, began_at=self.history.began_at, span_s=span_s, step_s=step_s, points=points, marks=marks,
            peers=of_peers,
        )  # fmt: skip

    def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) of /metrics; gauges are as things stand now."""
        regions = [region for session in self.registry.sessions for region in session.regions.values()]
        owned = sum(region.span.nbytes for region in regions if region.owned)
        expires = {} if self.certificates is None else self.certificates.current().expires
        unmatched = [each.course.began for each in self.jobs if each.state is schemas.TransferState.WAITING]
        totals = self.totals()
        self.metrics.gauge({
            "transfers": totals.transfers, "transfers_waiting": totals.waiting, "leases": totals.leases,
            "live_readers": totals.live_readers, "quarantined_bytes": totals.quarantined_bytes,
            "unfreed_bytes": totals.unfreed_bytes, "staging_bytes": totals.staging_bytes,
            "staging_used_bytes": totals.staging_used_bytes, "queue_depth": totals.queue,
            "region_bytes": {"owned": owned, "adopted": sum(region.span.nbytes for region in regions) - owned},
            "certificate_expiry_timestamp_seconds": expires,
            "queue_oldest_seconds": time.monotonic() - min(unmatched) if unmatched else 0,
            "peers": sum(len(peer.ranks) for peer in self.peers_known),
            "engines_attached": sum(session.attached for session in self.registry.sessions),
            "draining": self.jobs.draining, "ready": self.readiness().ready,
        })  # fmt: skip
        self.metrics.failing((engine_id, rank) for engine_id, rank, _ in self._silent())
        self.metrics.failed(self.history.failures.of_engines())
        return self.metrics.exposition(accept)

    def drain_status(self) -> schemas.DrainStatus:
        leases = sum(len(engine.leases) for engine in self.registry)
        transfers, draining = self.jobs.left, self.jobs.draining
        drained = draining and not leases and not transfers
        return schemas.DrainStatus(draining=draining, leases=leases, transfers=transfers, drained=drained)

    async def drain(self, wait_s: float, asked_by: str, *, stopping: bool = False) -> schemas.DrainStatus:
        """Take no new transfers, and wait until leases are read and transfers ended, at most `wait_s`.

        stopping: the process ends afterwards, and `cancel_drain` comes too late.
        """
        self._stopping = self._stopping or stopping
        if not self.jobs.draining:
            self._set_draining(True, asked_by)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (now := self.drain_status()).draining and not now.drained:
                    await self._fewer.wait()
        return self.drain_status()

    def cancel_drain(self, asked_by: str) -> schemas.DrainStatus:
        """Take new transfers again. Idempotent. Raises KvferryError (`stopping`)."""
        if self._stopping:
            why, remedy = "the daemon drains to stop", "start it again"
            raise Conflict("stopping", why, field="draining", value=True, remedy=remedy)
        if self.jobs.draining:
            self._set_draining(False, asked_by)
        return self.drain_status()

    def _set_draining(self, draining: bool, asked_by: str) -> None:
        self.jobs.draining = draining
        self.history.mark(schemas.MarkKind.DRAIN if draining else schemas.MarkKind.CANCELLED, f"by {asked_by}")
        for engine in self.registry:
            self.jobs.hand_back(engine)
        self.roster.say_draining(draining)
        left = self.drain_status().model_dump(include={"leases", "transfers"})
        log.warning("drain begins" if draining else "drain cancelled", asked_by=asked_by, **left)
        for session in self.registry.sessions:
            session.tell(engine_pb2.Event(draining=engine_pb2.Draining(cancelled=not draining)))
        self._one_fewer()

    def _one_fewer(self) -> None:
        """A lease or a transfer is over: whoever waits for a drain looks again."""
        self._fewer.set()
        self._fewer = asyncio.Event()

    async def follow_proof(self, proof: Certificates, recheck_callers: Callable[[], None]) -> None:
        """For as long as the daemon runs: when its certificate or secret has changed, connect anew by the new one. When
        the authority has changed, end the connections of those that it does not vouch for."""
        before = proof.current()
        while True:
            await asyncio.sleep(LOOK_S)
            now = proof.current()
            if now != before:
                self.roster.renew()
                renewed = [self.peers_known.renew(), self.jobs.ranks.renew()]
                if now.authority != before.authority:
                    renewed.append(self._cut_off(recheck_callers))
                before = now
                for failed in await asyncio.gather(*renewed, return_exceptions=True):
                    if isinstance(failed, Exception):
                        log.error("not renewed", exc_info=failed)

    async def _cut_off(self, recheck_callers: Callable[[], None]) -> None:
        """Callers have a while to connect anew: they look for new files as seldom as we do."""
        await asyncio.gather(self.peers_known.channels.recheck(), asyncio.sleep(COME_ALONG_S))
        recheck_callers()

    async def close(self) -> frozenset[str]:
        """End everything, in the order in which it depends on each other. The names of the steps that have failed."""
        return await ended(
            [
                Step("close the transfers", self.jobs.close),
                Step("close the engines", self.registry.close),
                Step("close the seed", self.roster.seed.close),
                Step("close the peers", self.peers_known.close),
                Step("write the notes", self.notes.flush),
                Step("close the history", self.history.close),
                Step("close the spans", self._close_spans),
            ],
            instance=self.instance,
        )

    async def _close_spans(self) -> None:
        if self.spans is not None:
            await self.spans.close()

    # ---- engines come and go ----

    def _on_lease_end(self, engine: Engine, account: Account) -> None:
        problem = problem_to_proto(account.problem) if account.problem else None
        ended = engine_pb2.LeaseEnded(
            request_id=account.request_id, lease=account.number, state=account.state.value,
            lease_state=LEASE_STATES[account.state], problem=problem,
        )  # fmt: skip
        engine.session.tell(engine_pb2.Event(lease_ended=ended))
        self._one_fewer()
        self.notes.add(partial(self._note_lease_end, engine.engine_id, account))  # the engine first

    def _note_lease_end(self, engine_id: str, account: Account) -> None:
        self.metrics.lease_ended(account.state)
        if account.problem is not None:
            error = schemas.ErrorBody.of(account.problem)
            self.history.failures.note(
                schemas.FailedRequest(at=time.time(), request_id=account.request_id, engine_id=engine_id, error=error)
            )
        if self.spans is not None:
            self.spans.lease(engine_id, account)
        log.info(
            "lease ended", request_id=account.request_id, lease=account.number, engine_id=engine_id,
            state=account.state.value, tokens=account.num_tokens, reason=account.reason,
            age_s=round(account.age_s, 3), bytes=account.nbytes,
            readers=[f"{each.who.engine_id}/{each.who.rank} {each.state} {each.nbytes}" for each in account.readers],
            **logs.Trace(*account.trace).about,
        )  # fmt: skip

    def _on_roster(self, engine: Engine) -> None:
        for rank, address in engine.roster.addresses.items():
            self.peers_known.channels.contact(address).rank = engine.engine_id, rank
        self.jobs.on_roster(engine)
        self.peers_known.notice(engine)

    def _on_served(self, engine_id: str, nbytes: int) -> None:
        self.notes.add(partial(self._note_served, engine_id, nbytes))

    def _note_served(self, engine_id: str, nbytes: int) -> None:
        self.metrics.bytes_served(engine_id, nbytes)
        self.history.served(engine_id, nbytes)

    def _before_retire(self, engine: Engine, why: str) -> list[Step]:
        return [
            Step("end its transfers", partial(self.jobs.abort_engine, engine, why)),
            Step("leave its roster", partial(self.roster.leave, engine)),
            Step("leave its other ranks", partial(self.jobs.leave, engine)),
            Step("forget its peers", partial(self.peers_known.forget_engine, engine)),
        ]


def _shared_secret(config: Config) -> Certificates | None:
    if config.peer_secret_file is None:
        return None
    from kvferryd.peers.secret import PeerSecret  # 60 ms, for who needs it

    return PeerSecret(config.peer_secret_file)


def _unknown_peer(engine_id: str) -> NotFound:
    why, remedy = f"no handshake with engine {engine_id} is kept", "GET /v1/peers lists them, POST makes one"
    return NotFound("unknown_peer", why, field="engine_id", value=engine_id, remedy=remedy)


def _over(transfer: Transfer) -> bool:
    return transfer.over


def _total(ended: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The sum of (transfers, leases)."""
    return sum(transfers for transfers, _ in ended), sum(leases for _, leases in ended)


def _ways(peer: PeerEngine) -> dict[str, str]:
    """Every path; and why NIXL reads the slots of `staged`, where this engine could map them."""
    ways = {name.value: why for name, why in refusals(peer.own, peer).items()}
    if slots := peer.unmapped_slots:
        rank, why = next(iter(slots.items()))
        ways["mapped slots"] = f"rank {rank}: {why}"
    return ways


def _peer_records(peers: Iterable[PeerEngine], own: str) -> list[schemas.PeerRecord]:
    return [
        schemas.PeerRecord(
            engine_id=peer.engine_id,
            rank=rank.rank,
            address=rank.address,
            epoch=peer.epoch,
            protocol=rank.protocol,
            version=rank.version,
            agent=rank.agent_name,
            rest=rank.rest if for_host(rank.rest, rank.address, own) else "",
            ways=ways,
            bytes_read=figures.bytes_read,
            transfers=figures.transfers,
            path=figures.path,
            p50_ms=round(median(ms for ms, _ in figures.lately), 3) if figures.lately else None,
            p99_ms=round(_p99([ms for ms, _ in figures.lately]), 3) if figures.lately else None,
            bytes_per_s=round(median(rate for _, rate in figures.lately)) if figures.lately else None,
            phases=_phases(figures),
            **_contact_fields(rank.channel.contact, connected=rank.connected),
        )
        for peer in peers
        for ways in [_ways(peer)]
        for rank in peer.ranks.values()
        for figures in [rank.figures]
    ]


def _phases(figures: Figures) -> dict[str, schemas.PhaseTimes]:
    """The phases that took any time."""
    worst = dict(zip(PHASES, figures.worst_ms(), strict=False))
    p99 = {name: _p99(list(spent)) for name, spent in zip(PHASES, zip(*figures.phases, strict=True), strict=False)}
    return {
        name: schemas.PhaseTimes(p99_ms=round(ms, 3), worst_ms=round(worst.get(name, 0.0), 3))
        for name, ms in p99.items()
        if ms or worst.get(name)
    }


def _p99(values: list[float]) -> float:
    """Nearest rank: of fewer than a hundred the greatest."""
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def _warning(engine_id: str, rank: int | None, contact: Contact) -> str:
    name = f"engine {engine_id}: rank {rank}" if engine_id else "a daemon that was never met"
    what = f"has not answered ({contact.failures} in a row)" if contact.failures else "answers and cannot be read"
    assert contact.trouble is not None
    return f"{name} at {contact.address} {what}: {contact.trouble.message}"


def _contact_fields(contact: Contact, *, connected: bool) -> dict[str, Any]:
    state = schemas.PeerState.CONNECTED if connected else schemas.PeerState.IDLE
    return {
        "state": schemas.PeerState.FAILING if contact.trouble else state,
        "last_contact_at": contact.answered_at,
        "last_error": schemas.ErrorBody.of(contact.error) if contact.error else None,
        "last_error_at": contact.failed_at,
        "failures": contact.failures,
    }
