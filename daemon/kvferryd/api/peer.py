"""The peer service: what other daemons may ask."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace

from pydantic import ValidationError

from kvferry import __version__
from kvferry.errors import LONGEST, Conflict, Forbidden, KvferryError, Malformed, NotFound, first_breach, shorten
from kvferry.manifest import Manifest
from kvferry.protocol.session_events import Rank
from kvferry.protocol.values import ReaderId
from kvferry.schemas import OrderBody
from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import PATHS, TRANSFER_STATES, manifest_from_proto, problem_to_proto
from kvferryd.aio import running
from kvferryd.api.answer import Context, first_of, protocol, stream, unary
from kvferryd.api.callers import Callers, host_of
from kvferryd.api.node import NodeSocket
from kvferryd.check import check_request_id, check_seconds
from kvferryd.copy.sums import MOST_NBYTES
from kvferryd.engine import Engine
from kvferryd.engine.registry import MAX_WORLD_SIZE
from kvferryd.ferry import Ferry
from kvferryd.leases.gather import Gatherer
from kvferryd.leases.record import reader_id
from kvferryd.leases.stream import ServedStream
from kvferryd.memory import Region
from kvferryd.memory.node import NodeDir
from kvferryd.observe import logs
from kvferryd.peers.roster import member_of
from kvferryd.staging.arena import Arena
from kvferryd.staging.share import pairing_of, prepare_gather
from kvferryd.transfers.order import attempt_from_proto, check_source, order_from_proto, reservation_from_proto
from kvferryd.transfers.record import json_of, share_of
from kvferryd.transfers.transfer import Transfer

log = logs.get(__name__)
PROGRESS_S = 0.1
"""The shortest pause before a rank says again how far its part is. The end is told at once."""
KINDS = {"host": layout_pb2.MEMORY_KIND_HOST, "cuda": layout_pb2.MEMORY_KIND_CUDA}


class PeerService(peer_pb2_grpc.PeerServicer):
    """Every call is one of `callers`."""

    def __init__(self, ferry: Ferry, callers: Callers, node: NodeSocket | None = None) -> None:
        """node: where the other daemons of this node fetch descriptors."""
        self._ferry, self._callers, self._node = ferry, callers, node
        self.admit, self.sent_away = callers.enter, callers.ended

    @unary
    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: Context) -> peer_pb2.HandshakeReply:
        version = protocol(request.protocol_min, request.protocol_max)
        engine = self._ferry.registry.get(request.engine_id or None)
        await engine.roster.until_whole(_left(context, self._ferry.config.connect_timeout_s))
        await self._ferry.peers_known.try_reader(request, _left(context, self._ferry.config.connect_timeout_s))
        if request.staging:
            await engine.need_arena(_left(context, self._ferry.config.connect_timeout_s) / 2)
        engine.agent.attend()
        log.info("handshake", peer=context.peer(), version=request.version, engine_id=engine.engine_id)
        manifest, readable = await engine.described(), {} if self._ferry.config.strict else engine.session.regions
        return peer_pb2.HandshakeReply(
            protocol=version, version=__version__, manifest=manifest,
            agent_name=engine.agent.name, agent_metadata=engine.agent_metadata,
            members=_members(engine.roster.addresses, engine.epoch),
            regions=[
                peer_pb2.RegionAddress(
                    id=id, address=region.span.address, nbytes=region.span.nbytes, kind=KINDS[region.span.kind],
                    device=region.span.device, slow=bool(region.slow_source),
                )
                for id, region in readable.items()
            ],
            staging=_staging(engine.arena) if engine.arena else None, several=True, ucx=engine.agent.listens_at,
            rest=self._ferry.config.rest_url if self._ferry.config.share_rest else "",
        )  # fmt: skip

    @stream
    async def Join(self, request: peer_pb2.JoinRequest, context: Context) -> AsyncIterator[peer_pb2.Roster]:
        protocol(request.protocol_min, request.protocol_max)
        member = request.member
        if max(map(len, (request.engine_id, member.epoch, member.rest))) > 256 or request.world_size > MAX_WORLD_SIZE:
            raise Malformed(
                "malformed_member",
                "engine_id, epoch, rank or rest are out of bounds",
                field="member",
                value=member.rank,
            )
        await self._ferry.roster.admit(request)
        seed = self._ferry.roster.seed
        place = Rank(request.engine_id, member.epoch, member.rank, request.world_size)
        async with aclosing(seed.join(place, member_of(member))) as joined:
            async for members in joined:
                yield peer_pb2.Roster(
                    engine_id=request.engine_id,
                    members=[
                        peer_pb2.Member(rank=rank, epoch=member.epoch, **each._asdict())
                        for rank, each in sorted(members.items())
                    ],
                )

    @unary
    async def Admit(self, request: peer_pb2.AdmitRequest, context: Context) -> peer_pb2.AdmitReply:
        self._ferry.roster.admitted(request)
        return peer_pb2.AdmitReply()

    @stream
    async def Map(self, request: peer_pb2.MapRequest, context: Context) -> AsyncIterator[peer_pb2.MapReply]:
        engine = self._of_epoch(request.engine_id, request.epoch)
        reply, arena, strict = peer_pb2.MapReply(), engine.arena, self._ferry.config.strict or request.strict
        apart = _apart(self._ferry.node, request.node)
        if strict:
            whose = "source" if self._ferry.config.strict else "reader"
            reply.refusal = f"the {whose} is strict: nothing but staging slots is read"
        if self._node is not None and not apart:
            reply.socket, reply.session = self._node.name, secrets.token_urlsafe(16)
        slots = [] if arena is None else [(0, arena.region)]
        regions = [] if strict else [*engine.session.regions.items()]
        try:
            offers = [(id, region, *self._offer(region, reply.session, apart)) for id, region in (*slots, *regions)]
            found = await asyncio.to_thread(lambda: [_mappable(*offer) for offer in offers])
            if slots:
                reply.slots.CopyFrom(found.pop(0))
            reply.regions.extend(found)
            yield reply
            await engine.session.retired.wait()  # the open stream is the memory's liveness
        finally:
            if self._node is not None:
                self._node.withdraw(reply.session)

    def _offer(self, region: Region, session: str, apart: str) -> tuple[str, str]:
        """(the ticket for the descriptors of a region; why there is none). Both are empty for memory with a handle."""
        if self._node is None or apart or region.told.WhichOneof("kind") != "vmm":
            return "", apart
        try:
            return self._node.offer(session, region.files), ""
        except KvferryError as error:
            return "", str(error)

    @stream
    async def Read(
        self, requests: AsyncIterator[peer_pb2.ReadRequest], context: Context
    ) -> AsyncIterator[peer_pb2.ReadReply]:
        try:
            first = await first_of(requests, self._ferry.config.connect_timeout_s)
            if not first.HasField("opening"):
                raise Malformed("malformed_stream", "the first message names reader and source", field="opening")
            opening = first.opening
            engine = self._as_met(opening)
            who = replace(_reader(opening.reader), host=host_of(context))
            gatherer = Gatherer(engine.manifest, engine.addresses, engine.arena, engine.pairings)
            retired, announcing = engine.session.retired, not engine.strict
            served = ServedStream(
                engine.leases, who, gatherer, retired, announcing=announcing, peer=context.peer(),
                several=opening.several,
            )  # fmt: skip
            with self._ferry.inbound.reading(engine, who):
                async with aclosing(served.replies(requests)) as replies:
                    async for reply in replies:
                        yield reply
            self._as_met(opening)  # raises when it is over: the reader shakes hands anew
        except KvferryError as error:
            # As a message: gRPC loses the status of a call whose caller is writing when it ends.
            yield peer_pb2.ReadReply(problem=problem_to_proto(error))

    @unary
    async def Pair(self, request: peer_pb2.PairRequest, context: Context) -> peer_pb2.PairReply:
        engine = self._of_epoch(request.engine_id, request.epoch)
        async with self._callers.turn(context):
            pairing = await asyncio.to_thread(pairing_of, request)
            read = None if pairing in engine.pairings else await asyncio.to_thread(_read, request)
        if read is None:
            share = engine.pairings.get(pairing)
        else:
            share = await engine.pairings.add(pairing, engine.manifest, *read)
        if engine.arena is not None:
            await prepare_gather(engine.arena, share, engine.addresses)
        return peer_pb2.PairReply(pairing=pairing)

    @unary
    async def Sum(self, request: peer_pb2.SumRequest, context: Context) -> peer_pb2.SumReply:
        engine, wanted = self._of_epoch(request.engine_id, request.epoch), request.wanted
        check_request_id(wanted.request_id)
        if not request.wide:
            why, remedy = "the reader asks for CRC-32s, which are not made any more", "upgrade the reader's daemon"
            raise Conflict("no_checksum", why, field="wide", value=False, remedy=remedy)
        lease = engine.leases.get(wanted.request_id)
        if lease is None:
            why, remedy = f"no lease of request {wanted.request_id} is held here", "prefill the request again"
            raise NotFound("unknown_lease", why, field="request_id", value=wanted.request_id, remedy=remedy)
        gatherer = Gatherer(engine.manifest, engine.addresses, None, engine.pairings)
        cutting = gatherer.cutting(wanted, lease.view, MOST_NBYTES)
        sums = await engine.sums.of(cutting, lambda chunk, at: chunk.gather(gatherer.regions, at))
        if lease.state.ended:
            raise lease.over()
        return peer_pb2.SumReply(wide=sums)

    @stream
    async def Order(
        self, requests: AsyncIterator[peer_pb2.OrderRequest], context: Context
    ) -> AsyncIterator[peer_pb2.RankTransfer]:
        ferry = self._ferry
        request = await first_of(requests, ferry.config.connect_timeout_s)
        engine = self._rank_of(request.engine_id, request.key)
        check_request_id(request.request_id)
        order = order_from_proto(request, ferry.config.allow_peers, logs.Trace.of(request))
        logs.begin(request_id=request.request_id, **order.trace.about)
        attempt = attempt_from_proto(request.attempt)
        own = reservation_from_proto(request, engine.manifest) if request.HasField("tables") else None
        transfer = ferry.jobs.handed(engine, request.request_id, attempt, order, own)
        async with running([] if order.lease_id else [_hear(requests, transfer)]):
            while not await _ends_within(transfer, PROGRESS_S):
                changed = transfer.changed
                yield _share(transfer)
                await changed.wait()
            yield _share(transfer)

    @unary
    async def Lead(self, request: peer_pb2.LeadRequest, context: Context) -> peer_pb2.LeadReply:
        engine = self._rank_of(request.engine_id, request.key)
        try:
            body = OrderBody.model_validate_json(request.order)
        except ValidationError as error:
            raise first_breach(error, "order", "malformed_order", "see POST /v1/transfers") from None
        named = body.destination.engine_id if body.destination else None
        if named not in (None, engine.engine_id):
            why, remedy = f"a rank of engine {engine.engine_id} gives it an order for another", "ask that one's daemons"
            raise Malformed("malformed_order", why, field="order.destination.engine_id", value=named, remedy=remedy)
        ordered, created = self._ferry.lead(engine, body, logs.Trace.of(request))
        return peer_pb2.LeadReply(ordered=ordered.model_dump_json().encode(), created=created)

    @unary
    async def Record(self, request: peer_pb2.RecordRequest, context: Context) -> peer_pb2.RecordReply:
        engine = self._rank_of(request.engine_id, request.key)
        check_seconds("wait_s", request.wait_s)
        transfer = self._ferry.jobs.of_engine(engine.engine_id, request.transfer_id)
        if request.abort:
            await self._ferry.end_transfer(transfer)
        else:
            await self._ferry.until_over(transfer, request.wait_s)
        return peer_pb2.RecordReply(record=json_of(transfer))

    @unary
    async def Abort(self, request: peer_pb2.AbortRequest, context: Context) -> peer_pb2.AbortReply:
        check_request_id(request.request_id)
        engine = self._ferry.registry.get(request.engine_id)
        why = shorten(request.reason, LONGEST) or "by a peer"
        from_rank = engine.roster.has(request.key)
        if request.HasField("attempt"):
            attempt, name = attempt_from_proto(request.attempt), request.request_id
            ended = from_rank and self._ferry.jobs.abort_attempt(engine, name, attempt, why, failed=request.failed)
            return peer_pb2.AbortReply(transfers_ended=int(ended))
        reader = None if from_rank else request.reader
        transfers, leases = self._ferry.abort_here(engine, request.request_id, why, reader=reader)
        if request.fan_out:
            more = await self._ferry.fan_out_abort(engine, request.request_id, reader=reader)
            transfers, leases = transfers + more[0], leases + more[1]
        if from_rank and not engine.rank:  # it alone knows the orders that it has not handed on
            known = self._ferry.jobs.of_request(request.request_id)
            more = await self._ferry.abort_at_sources(each for each in known if not each.ranks)
            transfers, leases = transfers + more[0], leases + more[1]
        return peer_pb2.AbortReply(transfers_ended=transfers, leases_ended=leases)

    @unary
    async def Served(self, request: peer_pb2.ServedRequest, context: Context) -> peer_pb2.ServedReply:
        engine, who = self._of_epoch(request.engine_id, request.epoch), _reader(request.reader)
        check_request_id(request.request_id)
        record = engine.leases.served(request.request_id, request.lease, who)
        if record is None:
            why = (
                f"no lease {request.lease} of request {request.request_id} is remembered here that this engine reads, "
                "or has read whole"
            )
            remedy = "ask while it reads, or soon after: a reader that left is forgotten, and so are old leases"
            raise NotFound("unknown_lease", why, field="lease", value=request.lease, remedy=remedy)
        return peer_pb2.ServedReply(record=record.model_dump_json().encode())

    @unary
    async def Prewarm(self, request: peer_pb2.PrewarmRequest, context: Context) -> peer_pb2.PrewarmReply:
        engine, source = self._rank_of(request.engine_id, request.key), request.source
        check_source(source, self._ferry.config.allow_peers)
        await self._ferry.peers_known.of(engine).get(source.engine_id, source.address)
        return peer_pb2.PrewarmReply()

    def _rank_of(self, engine_id: str, key: bytes) -> Engine:
        """The engine, for the daemon of another of its ranks. Raises KvferryError (`not_a_rank`)."""
        engine = self._ferry.registry.get(engine_id)
        if not engine.roster.has(key):
            why, remedy = f"only ranks of engine {engine.engine_id} hand on its orders", "POST /v1/transfers"
            raise Forbidden("not_a_rank", why, field="key", remedy=remedy)
        return engine

    def _as_met(self, opening: peer_pb2.ReadOpening) -> Engine:
        """The engine, for a reader that has met it as it is registered now. Raises KvferryError."""
        engine = self._of_epoch(opening.engine_id, opening.epoch)
        if engine.agent.name != opening.agent_name:
            raise Conflict(
                "stale_instance", f"engine {engine.engine_id} was registered here anew", field="agent_name",
                value=opening.agent_name, remedy="shake hands again, and name the agent that is met then",
            )  # fmt: skip
        return engine

    def _of_epoch(self, engine_id: str, epoch: str) -> Engine:
        engine = self._ferry.registry.get(engine_id)
        if engine.epoch != epoch:
            raise Conflict(
                "stale_epoch", f"engine {engine_id} is in epoch {engine.epoch}", field="epoch", value=epoch,
                remedy="shake hands again; what that epoch held is gone",
            )  # fmt: skip
        return engine


def _read(request: peer_pb2.PairRequest) -> tuple[list[Manifest], Manifest]:
    """Seconds of work, where somebody means harm."""
    return [manifest_from_proto(source) for source in request.sources], manifest_from_proto(request.destination)


def _mappable(id: int, region: Region, ticket: str, why: str) -> peer_pb2.MappableRegion:
    """ticket, why: of `_offer`."""
    mappable, memory = peer_pb2.MappableRegion(id=id, nbytes=region.span.nbytes), region.exported(id)
    if memory.HasField("vmm") and not ticket:
        mappable.refusal = f"it is VMM-backed, which is shared as descriptors, and {why}"
        return mappable
    try:
        probe = region.probe()
    except KvferryError as error:  # its engine is ending
        mappable.refusal = str(error)
        return mappable
    if probe is None:
        mappable.refusal = region.unmappable
        return mappable
    if memory.HasField("vmm"):
        mappable.shared.CopyFrom(memory.vmm)
        mappable.shared.ticket = ticket
    else:
        mappable.allocation.CopyFrom(memory.cuda)
    mappable.probe_offset, mappable.probe = probe.offset, probe.held
    return mappable


def _apart(node: NodeDir | None, theirs: str) -> str:
    """Why no descriptors are handed to a reader that names this node; empty where they are."""
    if node is None or not theirs:
        return f"the {'source' if node is None else 'reader'} has no folder with its node's daemons (node_dir)"
    return "" if theirs == node.id else "the reader is on another node, or shares another folder there (node_dir)"


def _members(members: Mapping[int, str], epoch: str) -> list[peer_pb2.Member]:
    return [peer_pb2.Member(rank=rank, address=address, epoch=epoch) for rank, address in sorted(members.items())]


def _left(context: Context, default: float) -> float:
    """Seconds until the caller gives up, a little less: so that it gets the reason."""
    left = context.time_remaining()
    return default if left is None else max(0.0, min(left, default) - 0.25)


def _staging(arena: Arena) -> peer_pb2.Staging:
    span, slot_nbytes = arena.span, arena.slot_nbytes
    return peer_pb2.Staging(
        address=span.address, nbytes=span.nbytes, kind=KINDS[span.kind], device=span.device, slot_nbytes=slot_nbytes
    )


def _reader(reader: peer_pb2.Reader) -> ReaderId:
    named = 0 < len(reader.engine_id) <= 256 and len(reader.epoch) <= 256 and len(reader.key) <= 256
    if not named or not 0 <= reader.rank < reader.world_size <= MAX_WORLD_SIZE:
        raise Malformed(
            "malformed_reader", "the reader is not a rank of an engine", field="reader",
            value=f"{reader.engine_id} rank {reader.rank} of {reader.world_size}",
            remedy="name the engine, its epoch, the rank and the world size",
        )  # fmt: skip
    return reader_id(reader)


async def _hear(requests: AsyncIterator[peer_pb2.OrderRequest], transfer: Transfer) -> None:
    """Take in the words of rank 0 after its order."""
    async for request in requests:
        if request.HasField("read"):
            transfer.led((request.read.epoch, request.read.lease))


async def _ends_within(transfer: Transfer, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await transfer.ended.wait()
    return transfer.ended.is_set()


def _share(transfer: Transfer) -> peer_pb2.RankTransfer:
    share = share_of(transfer)
    return peer_pb2.RankTransfer(
        rank=share.rank, state=share.state.value, nbytes=share.bytes, descriptors=share.descriptors, path=share.path,
        transport=share.transport, phases_ms=share.phases_ms, waits_for=share.waits_for or "",
        waits=[peer_pb2.Wait(**wait.model_dump()) for wait in share.waits],
        transfer_state=TRANSFER_STATES[share.state], path_taken=PATHS[share.path or "unspecified"],
        problem=problem_to_proto(transfer.problem) if transfer.problem else None,
    )  # fmt: skip
