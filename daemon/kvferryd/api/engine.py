"""The engine service, on a Unix socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from kvferry import __version__
from kvferry.errors import Conflict, KvferryError, Malformed
from kvferry.memory.fences import WORDS, Fence
from kvferry.v1 import engine_pb2, engine_pb2_grpc
from kvferry.wire import manifest_from_proto, problem_to_proto, tables_from_proto
from kvferryd import logs
from kvferryd.api.answer import Context, broken, first_of, protocol, said_beside, stream, unary
from kvferryd.api.handover import Handovers
from kvferryd.check import check_destination, check_digest, check_request_id, check_seconds, check_source, check_way
from kvferryd.engine import Engine
from kvferryd.engine.session import Rank, Session
from kvferryd.ferry import Ferry
from kvferryd.memory import Files
from kvferryd.peers import allow
from kvferryd.transfers.order import Order, reservation

log = logs.get(__name__)


class EngineService(engine_pb2_grpc.EngineServicer):
    """Every other call names the session that Attach opened."""

    def __init__(self, ferry: Ferry, handovers: Handovers) -> None:
        self._ferry, self._handovers = ferry, handovers

    @stream
    async def Attach(
        self, commands: AsyncIterator[engine_pb2.Command], context: Context
    ) -> AsyncIterator[engine_pb2.Event]:
        ferry = self._ferry
        first = await first_of(commands, ferry.config.connect_timeout_s)
        if not first.HasField("attach"):
            raise Malformed("malformed_stream", "the first command is to attach", field="kind")
        request = first.attach
        version = protocol(request.protocol_min, request.protocol_max)
        rank = Rank(request.engine_id, request.epoch, request.rank, request.world_size)
        session = await ferry.registry.attach(rank, request.resume)
        log.info("engine attached", **rank._asdict(), client=request.client, resumed=session.resumed)
        try:
            yield engine_pb2.Event(
                attached=engine_pb2.Attached(
                    session=session.id,
                    protocol=version,
                    version=__version__,
                    peer_address=ferry.config.advertise,
                    device=ferry.config.device,
                    instance=ferry.instance,
                    deadline_s=ferry.config.deadline_s,
                    resumed=session.resumed,
                )
            )
            async for event in said_beside(session.events, self._obey(session, commands)):
                yield event
        finally:
            ferry.registry.stream_ended(session)

    async def _obey(self, session: Session, commands: AsyncIterator[engine_pb2.Command]) -> None:
        async for command in commands:
            answer = engine_pb2.Answer(id=command.id)
            try:
                session.check_open()
                match command.WhichOneof("kind"):
                    case "publish":
                        answer.publish.CopyFrom(self._publish(_registered(session), command.publish))
                    case "receive":
                        answer.receive.CopyFrom(self._receive(_registered(session), command.receive))
                    case "abort":
                        answer.abort.CopyFrom(self._abort(session, command.abort))
                    case "probe":
                        pass
                    case kind:
                        raise Malformed("malformed_command", "the command is none", field="kind", value=kind)
            except KvferryError as error:
                answer.problem.CopyFrom(problem_to_proto(error))
            except Exception:
                log.exception("a command broke", command=command.WhichOneof("kind"))
                answer.problem.CopyFrom(problem_to_proto(broken()))
            session.tell(engine_pb2.Event(answer=answer))

    @unary
    async def End(self, request: engine_pb2.EndRequest, context: Context) -> engine_pb2.EndReply:
        await self._ferry.registry.end(request.session, leave=request.leave)
        return engine_pb2.EndReply(instance=self._ferry.instance)

    @unary
    async def Allocate(self, request: engine_pb2.AllocateRequest, context: Context) -> engine_pb2.Memory:
        session = self._session(request.session)
        memory = await self._ferry.registry.allocate(session, request.region, request.nbytes)
        shared = session.regions[request.region].shared
        if shared is not None:
            memory.handed.ticket = self._handovers.hold(request.session, Files([os.dup(shared.file)]))
        return memory

    @unary
    async def Adopt(self, request: engine_pb2.AdoptRequest, context: Context) -> engine_pb2.Memory:
        session, memory = self._session(request.session), request.memory
        ticket = memory.handed.ticket or memory.vmm.ticket
        files = self._handovers.take(request.session, ticket) if ticket else Files()
        await self._ferry.registry.adopt(session, memory, files)
        return memory

    @unary
    async def OpenFences(self, request: engine_pb2.OpenFencesRequest, context: Context) -> engine_pb2.OpenFencesReply:
        session = self._session(request.session)
        self._ferry.registry.open_fences(session, self._handovers.take(request.session, request.ticket))
        return engine_pb2.OpenFencesReply(words=WORDS)

    @unary
    async def Register(self, request: engine_pb2.RegisterRequest, context: Context) -> engine_pb2.RegisterReply:
        session, manifest = self._session(request.session), manifest_from_proto(request.manifest)
        engine = await self._ferry.registry.register(session, manifest)
        self._ferry.roster.follow(engine)
        log.info(
            "engine registered",
            engine_id=engine.engine_id,
            epoch=engine.epoch,
            rank=engine.rank,
            world_size=engine.world_size,
            components=len(manifest.components),
            bytes=sum(region.nbytes for region in manifest.regions),
        )
        return engine_pb2.RegisterReply(notes=engine.notes)

    def _publish(self, engine: Engine, request: engine_pb2.PublishRequest) -> engine_pb2.PublishReply:
        check_request_id(request.request_id)
        tables = tables_from_proto(request.tables)
        check_source(engine.manifest, tables, request.num_tokens, request.metadata)
        check_digest(request.digest)
        check_seconds("ttl_s", request.ttl_s)
        lease = engine.leases.publish(
            request.request_id,
            tables,
            request.num_tokens,
            more=request.more,
            metadata=request.metadata,
            ttl_s=request.ttl_s or self._ferry.config.lease_ttl_s,
            readers=request.readers or 1,
            digest=request.digest,
            after=self._fence(engine, request.after) if request.HasField("after") else None,
        )
        return engine_pb2.PublishReply(state=lease.state.value)

    def _receive(self, engine: Engine, request: engine_pb2.ReceiveRequest) -> engine_pb2.ReceiveReply:
        check_request_id(request.request_id)
        check_seconds("deadline_s", request.deadline_s)
        check_way(request.way)
        wanted = (request.tokens.start, request.tokens.stop) if request.HasField("tokens") else None
        check_digest(request.digest)
        reserved = reservation(tables_from_proto(request.tables), wanted, request.digest)
        check_destination(engine.manifest, reserved.tables, reserved.tokens)
        order = None
        if request.HasField("source"):
            source = request.source
            allow.check(source.address, self._ferry.config.allow_peers)
            deadline_s = request.deadline_s or None
            order = Order(source.engine_id, source.address, source.epoch, request.priority, deadline_s, request.way)
        deadline_s, attempt = request.deadline_s or None, request.attempt
        transfer = self._ferry.jobs.receive(engine, request.request_id, reserved, order, deadline_s, attempt=attempt)
        return engine_pb2.ReceiveReply(transfer_id=transfer.transfer_id, state=transfer.state.value)

    def _abort(self, session: Session, request: engine_pb2.EngineAbortRequest) -> engine_pb2.EngineAbortReply:
        if session.engine is None:
            return engine_pb2.EngineAbortReply()
        transfers, leases = self._ferry.abort_here(session.engine, request.request_id, "by the engine")
        return engine_pb2.EngineAbortReply(transfer_ended=bool(transfers), lease_ended=bool(leases))

    def _fence(self, engine: Engine, after: engine_pb2.Fence) -> asyncio.Future[None]:
        fences = engine.session.fences
        if fences is None:
            raise Conflict(
                "no_fences",
                f"engine {engine.engine_id} has opened no page of fences",
                field="after",
                value=f"word {after.word}",
                remedy="make fences with EngineClient.fence, or synchronise the stream and publish without one",
            )
        return fences.reached(Fence(after.word, after.value), self._ferry.config.fence_timeout_s)

    def _session(self, id: str) -> Session:
        return self._ferry.registry.of_session(id)


def _registered(session: Session) -> Engine:
    if session.engine is None:
        raise Conflict(
            "not_registered",
            f"engine {session.rank.engine_id} has not described its cache",
            field="session",
            remedy="call Register with the manifest first",
        )
    return session.engine
