"""The peer service: what other daemons may ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from urllib.parse import unquote

from kvferry import __version__
from kvferry.errors import Conflict, KvferryError, Malformed
from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_from_proto, manifest_to_proto, problem_to_proto, tables_from_proto
from kvferryd import logs
from kvferryd.api.answer import Context, first_of, protocol, stream, unary
from kvferryd.check import check_destination, check_request_id, check_seconds, check_way
from kvferryd.engine import Engine
from kvferryd.engine.registry import MAX_WORLD_SIZE
from kvferryd.ferry import Ferry
from kvferryd.leases.gather import Gatherer
from kvferryd.leases.lease import ReaderId
from kvferryd.leases.stream import ServedStream
from kvferryd.memory import Region
from kvferryd.peers import allow
from kvferryd.staging.arena import Arena
from kvferryd.staging.share import prepare_gather
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

log = logs.get(__name__)
KINDS = {"host": layout_pb2.MEMORY_KIND_HOST, "cuda": layout_pb2.MEMORY_KIND_CUDA}


class PeerService(peer_pb2_grpc.PeerServicer):
    """Every call is refused unless `allow_peers` admits the caller's address."""

    def __init__(self, ferry: Ferry) -> None:
        self._ferry = ferry

    def admit(self, context: Context) -> None:
        # "ipv4:10.0.0.7:41234" or "ipv6:%5B::1%5D:41234"
        kind, _, address = unquote(context.peer()).partition(":")
        if kind in ("ipv4", "ipv6"):
            allow.check(address, self._ferry.config.allow_peers)

    @unary
    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: Context) -> peer_pb2.HandshakeReply:
        version = protocol(request.protocol_min, request.protocol_max)
        engine = self._ferry.registry.get(request.engine_id)
        await engine.until_whole(_left(context, self._ferry.config.connect_timeout_s))
        log.info("handshake", peer=context.peer(), version=request.version, engine_id=engine.engine_id)
        return peer_pb2.HandshakeReply(
            protocol=version,
            version=__version__,
            manifest=manifest_to_proto(engine.manifest),
            agent_name=engine.agent.name,
            agent_metadata=engine.agent_metadata,
            members=[
                peer_pb2.Member(rank=rank, address=address, epoch=engine.epoch)
                for rank, address in sorted(engine.members.items())
            ],
            regions=[
                peer_pb2.RegionAddress(
                    id=id,
                    address=region.span.address,
                    nbytes=region.span.nbytes,
                    kind=KINDS[region.span.kind],
                    device=region.span.device,
                )
                for id, region in (engine.regions.items() if not self._ferry.config.strict else ())
            ],
            staging=_staging(engine.arena) if engine.arena else None,
        )

    @stream
    async def Join(self, request: peer_pb2.JoinRequest, context: Context) -> AsyncIterator[peer_pb2.Roster]:
        protocol(request.protocol_min, request.protocol_max)
        member = request.member
        allow.check(member.address, self._ferry.config.allow_peers)
        if max(len(request.engine_id), len(member.epoch)) > 256 or member.rank >= MAX_WORLD_SIZE:
            raise Malformed(
                "malformed_member", "engine_id, epoch or rank are out of bounds", field="member", value=member.rank
            )
        joined = self._ferry.roster.seed.join(request.engine_id, member.epoch, member.rank, member.address)
        try:
            async for members in joined:
                yield peer_pb2.Roster(
                    engine_id=request.engine_id,
                    members=[
                        peer_pb2.Member(rank=rank, address=address, epoch=member.epoch)
                        for rank, address in sorted(members.items())
                    ],
                )
        finally:
            await joined.aclose()

    @stream
    async def Map(self, request: peer_pb2.MapRequest, context: Context) -> AsyncIterator[peer_pb2.MapReply]:
        engine = self._of_epoch(request.engine_id, request.epoch)
        reply, arena = peer_pb2.MapReply(), engine.arena
        if arena is not None and arena.span.kind == "cuda":
            reply.slots.CopyFrom(arena.exported.cuda)
        if self._ferry.config.strict:
            reply.refusal = "the source is strict: it lets peers read staging slots only"
        else:
            reply.regions.extend(await asyncio.to_thread(_mappable, dict(engine.regions)))
        yield reply
        await engine.retired.wait()  # the open stream is the memory's liveness

    @stream
    async def Read(
        self, requests: AsyncIterator[peer_pb2.ReadRequest], context: Context
    ) -> AsyncIterator[peer_pb2.ReadReply]:
        try:
            async for reply in self._read(requests):
                yield reply
        except KvferryError as error:
            # As a message: gRPC loses the status of a call whose caller is writing when it ends.
            yield peer_pb2.ReadReply(problem=problem_to_proto(error))

    async def _read(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> AsyncIterator[peer_pb2.ReadReply]:
        first = await first_of(requests, self._ferry.config.connect_timeout_s)
        if not first.HasField("opening"):
            raise Malformed("malformed_stream", "the first message says who reads from whom", field="opening")
        opening = first.opening
        engine = self._of_epoch(opening.engine_id, opening.epoch)
        gatherer = Gatherer(engine.manifest, engine.addresses, engine.arena, engine.pairings)
        who = _reader(opening.reader)
        served = ServedStream(engine.leases, who, gatherer, engine.retired, announcing=not engine.strict)
        replies = served.replies(requests)
        try:
            async for reply in replies:
                yield reply
        finally:
            await replies.aclose()
        self._of_epoch(opening.engine_id, opening.epoch)  # raises when it is over: the reader must shake hands anew

    @unary
    async def Pair(self, request: peer_pb2.PairRequest, context: Context) -> peer_pb2.PairReply:
        engine = self._of_epoch(request.engine_id, request.epoch)
        sources = [manifest_from_proto(source) for source in request.sources]
        destination = manifest_from_proto(request.destination)
        said = request.SerializeToString(deterministic=True)
        pairing = await engine.pairings.add(engine.manifest, sources, destination, said)
        if engine.arena is not None:
            await prepare_gather(engine.arena, engine.pairings.get(pairing), engine.addresses)
        return peer_pb2.PairReply(pairing=pairing)

    @stream
    async def Order(self, request: peer_pb2.OrderRequest, context: Context) -> AsyncIterator[peer_pb2.RankTransfer]:
        ferry = self._ferry
        engine = ferry.registry.get(request.engine_id)
        check_request_id(request.request_id)
        source = request.source
        allow.check(source.address, ferry.config.allow_peers)
        check_seconds("deadline_s", request.deadline_s)
        check_way(request.way)
        own = None
        if request.HasField("tables"):
            wanted = (request.tokens.start, request.tokens.stop) if request.HasField("tokens") else None
            own = Reservation(tables_from_proto(request.tables), wanted)
            check_destination(engine.manifest, own.tables, own.tokens)
        order = Order(
            source.engine_id,
            source.address,
            source.epoch,
            request.priority,
            request.deadline_s or None,
            request.way,
            request.traceparent,
        )
        brought = {engine.rank: own} if own is not None else {}
        transfer, _ = ferry.jobs.order(
            engine, request.request_id, order, brought,
            attempt=request.attempt, counted=request.counted, from_rank=request.rank,
        )  # fmt: skip
        while not transfer.ended.is_set():
            changed = transfer.changed
            yield _share(transfer)
            await changed.wait()
        yield _share(transfer)

    @unary
    async def Abort(self, request: peer_pb2.AbortRequest, context: Context) -> peer_pb2.AbortReply:
        check_request_id(request.request_id)
        engine = self._ferry.registry.get(request.engine_id)
        why = request.reason or "by a peer"
        if request.attempt:
            attempt, failed = request.attempt, request.failed
            ended = self._ferry.jobs.abort(engine, request.request_id, why, attempt=attempt, failed=failed)
            return peer_pb2.AbortReply(transfers_ended=int(ended))
        transfers, leases = self._ferry.abort_here(engine, request.request_id, why)
        if request.fan_out:
            more_transfers, more_leases = await self._ferry.fan_out_abort(engine, request.request_id)
            transfers, leases = transfers + more_transfers, leases + more_leases
        return peer_pb2.AbortReply(transfers_ended=transfers, leases_ended=leases)

    def _of_epoch(self, engine_id: str, epoch: str) -> Engine:
        engine = self._ferry.registry.get(engine_id)
        if engine.epoch != epoch:
            raise Conflict(
                "stale_epoch",
                f"engine {engine_id} is in epoch {engine.epoch}",
                field="epoch",
                value=epoch,
                remedy="shake hands again; what that epoch held is gone",
            )
        return engine


def _mappable(regions: Mapping[int, Region]) -> list[peer_pb2.MappableRegion]:
    found = []
    for id, region in regions.items():
        probe = region.probe()
        if probe is None:
            nbytes = region.span.nbytes
            found.append(peer_pb2.MappableRegion(id=id, nbytes=nbytes, refusal=region.unmappable))
        else:
            found.append(
                peer_pb2.MappableRegion(
                    id=id,
                    nbytes=region.span.nbytes,
                    allocation=region.exported(id).cuda,
                    probe_offset=probe.offset,
                    probe=probe.held,
                )
            )
    return found


def _left(context: Context, default: float) -> float:
    """Seconds until the caller gives up, a little less: it should hear why."""
    left = context.time_remaining()
    return default if left is None else max(0.0, min(left, default) - 0.25)


def _staging(arena: Arena) -> peer_pb2.Staging:
    span = arena.span
    return peer_pb2.Staging(
        address=span.address,
        nbytes=span.nbytes,
        kind=KINDS[span.kind],
        device=span.device,
        slot_nbytes=arena.slot_nbytes,
    )


def _reader(reader: peer_pb2.Reader) -> ReaderId:
    named = 0 < len(reader.engine_id) <= 256 and len(reader.epoch) <= 256
    if not named or not 0 <= reader.rank < reader.world_size <= MAX_WORLD_SIZE:
        raise Malformed(
            "malformed_reader",
            "the reader is not a rank of an engine",
            field="reader",
            value=f"{reader.engine_id} rank {reader.rank} of {reader.world_size}",
        )
    return ReaderId(reader.engine_id, reader.epoch, reader.rank, reader.world_size)


def _share(transfer: Transfer) -> peer_pb2.RankTransfer:
    share = transfer.share()
    return peer_pb2.RankTransfer(
        rank=share.rank,
        state=share.state.value,
        nbytes=share.bytes,
        descriptors=share.descriptors,
        path=share.path,
        transport=share.transport,
        phases_ms=share.phases_ms,
        problem=problem_to_proto(transfer.problem) if transfer.problem else None,
    )
