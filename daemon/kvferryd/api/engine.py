"""The engine service, on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from kvferry import __version__
from kvferry.digest import check_weights
from kvferry.errors import Conflict, KvferryError, Malformed, Unavailable
from kvferry.manifest import Manifest
from kvferry.memory.fences import WORDS, Fence
from kvferry.outbox import SEVERAL
from kvferry.pipe import Pipe
from kvferry.protocol.attempts import Attempt, replaced
from kvferry.protocol.events import Lose, Refuse
from kvferry.protocol.session_events import Rank
from kvferry.protocol.values import Publication
from kvferry.v1 import engine_pb2, engine_pb2_grpc
from kvferry.wire import TRANSFER_STATES, manifest_from_proto, problem_to_proto, tables_from_proto
from kvferryd.api.answer import Context, first_of, protocol, stream, told, unary
from kvferryd.api.handover import Handovers
from kvferryd.check import check_digest, check_number, check_request_id, check_seconds, check_source, check_way
from kvferryd.engine import Engine
from kvferryd.engine.session import Session
from kvferryd.ferry import Ferry
from kvferryd.memory import Files
from kvferryd.observe import logs
from kvferryd.transfers.order import Order, Reservation, order_from_proto, reservation_from_proto

log = logs.get(__name__)
ANSWERS = 1024
"""So many events wait for an engine that sends commands; then its commands do."""
UNREAD_S = 60.0
"""How long an engine may take none of its events while some wait, beside those on their way in gRPC."""


class EngineService(engine_pb2_grpc.EngineServicer):
    """Every other call names the session that Attach opened."""

    def __init__(self, ferry: Ferry) -> None:
        self._ferry, self._session = ferry, ferry.registry.of_session
        self.handovers = Handovers(ferry.registry.introduce, self._pipe)

    def admit(self, context: Context) -> None:
        """Admits every caller: the mode of the socket keeps others out."""

    def sent_away(self, context: Context) -> KvferryError | None:
        """Never cuts a caller off."""

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
        attached = engine_pb2.Attached(
            session=session.id, protocol=version, version=__version__, peer_address=ferry.config.advertise,
            device=ferry.config.device, instance=ferry.instance, deadline_s=ferry.config.deadline_s,
            resumed=session.resumed, several=True,
        )  # fmt: skip
        session.events.several = request.several
        obeying = asyncio.create_task(self._obey(session, commands))
        obeying.add_done_callback(lambda _: session.events.end())
        watching = asyncio.create_task(self._watch(session))
        try:
            yield engine_pb2.Event(attached=attached)
            while (event := await session.events.take()) is not None:
                yield event
            if (pipe := session.pipe) is not None:
                ends: list[asyncio.Future[Any]] = [pipe.over, watching]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if pipe.problem is not None:
                    raise pipe.problem
            if watching.done():
                raise watching.result()
            if obeying.done():
                obeying.result()
        finally:
            obeying.cancel()
            watching.cancel()
            if session.pipe is not None:
                session.pipe.abort()
            ferry.registry.stream_ended(session)
            await asyncio.gather(obeying, watching, return_exceptions=True)

    async def _watch(self, session: Session) -> KvferryError:
        """Why it is let go: its engine takes too few of its events, which would grow without end. Its session is over
        then; who is to write to the stream may wait for the engine still."""
        events, before = session.events, -1
        while not session.overfull.is_set() and (not len(events) or events.taken != before):
            before = events.taken if len(events) else -1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.overfull.wait(), UNREAD_S)
        waiting = len(events)
        self._ferry.registry.stream_ended(session)
        while events.pop() is not None:
            pass
        bounds = f"at most {session.most_events}, for {UNREAD_S:g} s"
        why = f"engine {session.rank.engine_id} takes too few of its events: {waiting} wait ({bounds})"
        log.warning("engine let go", why=why, **session.about)
        remedy = "read the stream of events whatever else the engine does; attach again"
        return Unavailable("events_not_taken", why, field="events", value=waiting, remedy=remedy)

    async def _obey(self, session: Session, commands: AsyncIterator[engine_pb2.Command]) -> None:
        async for command in commands:
            if session.pipe is not None and session.pipe.connected:
                remedy = "send them by the pipe alone, in one order"
                raise Malformed("malformed_stream", "commands come by the pipe already", field="kind", remedy=remedy)
            await session.events.until_fewer(ANSWERS)
            self._hear(session, command)

    def _hear(self, session: Session, command: engine_pb2.Command) -> None:
        said = command.several.commands if command.HasField("several") else (command,)
        if (count := len(said)) > SEVERAL:
            remedy = f"at most {SEVERAL} in one"
            raise Malformed("malformed_command", "too many commands", field="several", value=count, remedy=remedy)
        for each in said:
            session.tell(engine_pb2.Event(answer=self._answer(session, each)))

    def _pipe(self, session_id: str) -> Pipe:
        """A new one, of this session. Raises KvferryError (`unknown_session`, `pipe_open`)."""
        session = self._session(session_id)
        if session.pipe is not None:
            why = f"engine {session.rank.engine_id} has a pipe already"
            raise Conflict("pipe_open", why, field="pipe", value=True, remedy="use it, or attach again")

        def came(message: bytes) -> None:
            self._hear(session, engine_pb2.Command.FromString(message))
            if len(session.events) >= ANSWERS:
                pipe.hold()
                asyncio.ensure_future(session.events.until_fewer(ANSWERS)).add_done_callback(lambda _: pipe.go_on())

        def over(_: asyncio.Future[None]) -> None:
            if not pipe.connected:  # its engine has given it up meanwhile: the stream goes on
                session.pipe = None

        pipe = session.pipe = Pipe(session.events, came)
        pipe.over.add_done_callback(over)
        return pipe

    def _answer(self, session: Session, command: engine_pb2.Command) -> engine_pb2.Answer:
        """To a command that is obeyed now, or refused."""
        answer, kind = engine_pb2.Answer(id=command.id), command.WhichOneof("kind")
        try:
            session.check_open()
            match kind:
                case "publish":
                    answer.publish.CopyFrom(self._publish(_registered(session), command.publish))
                case "receive":
                    answer.receive.CopyFrom(self._receive(_registered(session), command.receive))
                case "abort":
                    answer.abort.CopyFrom(self._abort(session, command.abort))
                case "weights":
                    answer.weights.CopyFrom(self._replace_weights(session, command.weights.weights))
                case "probe":
                    pass
                case _:
                    raise Malformed(
                        "malformed_command", "the command is empty: no kind is set", field="kind", value=kind
                    )
        except Exception as error:  # noqa: BLE001  see told
            answer.problem.CopyFrom(problem_to_proto(told(error, f"command {kind}")))
        return answer

    @unary
    async def End(self, request: engine_pb2.EndRequest, context: Context) -> engine_pb2.EndReply:
        await self._ferry.registry.end(request.session, leave=request.leave)
        return engine_pb2.EndReply(instance=self._ferry.instance)

    @unary
    async def Allocate(self, request: engine_pb2.AllocateRequest, context: Context) -> engine_pb2.Memory:
        session = self._session(request.session)
        region = await session.once(
            request.idempotency_key,
            ("allocate", request.region, request.nbytes),
            lambda: self._ferry.registry.allocate(session, request.region, request.nbytes),
        )
        memory = region.exported(request.region)
        if region.files:
            ticket = self.handovers.offer(request.session, region.files)
            if memory.HasField("handed"):
                memory.handed.ticket = ticket
            elif memory.HasField("vmm"):
                memory.vmm.ticket = ticket
            else:
                memory.cuda.ticket = ticket
        return memory

    @unary
    async def Adopt(self, request: engine_pb2.AdoptRequest, context: Context) -> engine_pb2.Memory:
        session, memory = self._session(request.session), request.memory
        ticket = memory.handed.ticket or memory.cuda.ticket or memory.vmm.ticket
        files = self.handovers.take(request.session, ticket) if ticket else Files()
        try:
            await session.once(
                request.idempotency_key,
                ("adopt", _without_ticket(memory)),
                lambda: self._ferry.registry.adopt(session, memory, files.moved()),
            )
        finally:
            files.close()
        return memory

    @unary
    async def OpenFences(self, request: engine_pb2.OpenFencesRequest, context: Context) -> engine_pb2.OpenFencesReply:
        session = self._session(request.session)
        self._ferry.registry.open_fences(session, self.handovers.take(request.session, request.ticket))
        return engine_pb2.OpenFencesReply(words=WORDS)

    @unary
    async def Register(self, request: engine_pb2.RegisterRequest, context: Context) -> engine_pb2.RegisterReply:
        self._session(request.session)
        check_weights(request.weights)
        manifest = await asyncio.to_thread(manifest_from_proto, request.manifest)  # seconds, where it is large
        session = self._session(request.session)  # which may have ended meanwhile
        engine = await session.once(
            request.idempotency_key, ("register", manifest), lambda: self._register(session, manifest, request.weights)
        )
        if engine.weights != request.weights:
            self._ferry.replace_weights(engine, request.weights)
        engine.leases.on(Lose(tuple((each.request_id, each.lease) for each in request.lost)))
        return engine_pb2.RegisterReply(notes=engine.notes)

    async def _register(self, session: Session, manifest: Manifest, weights: str) -> Engine:
        engine = await self._ferry.registry.register(session, manifest)
        engine.weights = weights
        self._ferry.roster.follow(engine)
        self._ferry.peers_known.expect(engine)
        self._ferry.inbound.expect(engine)
        self._ferry.known_peers.look()
        nbytes = sum(region.nbytes for region in manifest.regions)
        log.info("engine registered", **session.rank._asdict(), components=len(manifest.components), bytes=nbytes)
        return engine

    def _publish(self, engine: Engine, request: engine_pb2.PublishRequest) -> engine_pb2.PublishReply:
        check_request_id(request.request_id)
        tables = tables_from_proto(request.tables)
        check_source(engine.manifest, tables, request.num_tokens, request.metadata)
        check_digest(request.digest)
        check_number("lease", request.lease)
        check_weights(request.weights)
        if request.weights != engine.weights:
            why = (
                f"request {request.request_id} was computed, at least in part, by weights {request.weights!r}, and the "
                f"engine has {engine.weights!r} now"
            )
            remedy = "compute the request again; publish no request that an update of the weights has found under way"
            mixed = Conflict("mixed_weights", why, field="weights", value=request.weights, remedy=remedy)
            engine.leases.on(Refuse(request.request_id, request.lease, mixed))
            raise mixed
        check_seconds("ttl_s", request.ttl_s)
        fence = self._fence(engine, request.after) if request.HasField("after") else None
        state = engine.leases.publish(
            request.request_id,
            request.lease,
            Publication(tables, request.num_tokens, request.metadata, request.more, request.digest, request.weights),
            ttl_s=request.ttl_s or self._ferry.config.lease_ttl_s,
            readers=request.readers or 1,
            after=fence,
        )
        return engine_pb2.PublishReply(state=state.value)

    def _receive(self, engine: Engine, request: engine_pb2.ReceiveRequest) -> engine_pb2.ReceiveReply:
        check_request_id(request.request_id)
        check_number("attempt", request.attempt)
        deadline_s, name, number = request.deadline_s or None, request.request_id, request.attempt
        with self._ferry.jobs.refusing(engine, name, Attempt(number)):
            reserved, order = self._halves(engine, request)
        transfer = self._ferry.jobs.receive(engine, name, number, reserved, order, deadline_s)
        state = TRANSFER_STATES[transfer.state]
        return engine_pb2.ReceiveReply(
            transfer_id=transfer.transfer_id, state=transfer.state.value, transfer_state=state
        )

    def _halves(self, engine: Engine, request: engine_pb2.ReceiveRequest) -> tuple[Reservation, Order | None]:
        """The reservation, and the order if the engine names the source; checked. Raises KvferryError."""
        check_digest(request.digest)
        check_weights(request.weights)
        if request.weights != engine.weights:
            raise replaced(request.request_id, request.weights, engine.weights)
        check_seconds("deadline_s", request.deadline_s)
        check_way(request.way)
        reserved = reservation_from_proto(request, engine.manifest, request.digest)
        named = request.HasField("source")
        return reserved, order_from_proto(request, self._ferry.config.allow_peers) if named else None

    def _abort(self, session: Session, request: engine_pb2.EngineAbortRequest) -> engine_pb2.EngineAbortReply:
        if session.engine is None:
            return engine_pb2.EngineAbortReply()
        transfers, leases = self._ferry.abort_here(session.engine, request.request_id, "by the engine")
        return engine_pb2.EngineAbortReply(transfer_ended=bool(transfers), lease_ended=bool(leases))

    def _replace_weights(self, session: Session, weights: str) -> engine_pb2.WeightsReply:
        """A session that has not registered has published nothing, and names its weights when it does."""
        check_weights(weights)
        if session.engine is None:
            return engine_pb2.WeightsReply()
        leases, transfers = self._ferry.replace_weights(session.engine, weights)
        return engine_pb2.WeightsReply(leases=leases, transfers=transfers)

    def _fence(self, engine: Engine, after: engine_pb2.Fence) -> asyncio.Future[None]:
        fences = engine.session.fences
        if fences is None:
            raise Conflict(
                "no_fences", f"engine {engine.engine_id} has opened no page of fences", field="after",
                value=f"word {after.word}",
                remedy="make fences with EngineClient.fence, or synchronise the stream and publish without one",
            )  # fmt: skip
        return fences.reached(Fence(after.word, after.value), self._ferry.config.fence_timeout_s)


def _without_ticket(memory: engine_pb2.Memory) -> engine_pb2.Memory:
    """The same in each call that repeats another."""
    same = engine_pb2.Memory()
    same.CopyFrom(memory)
    if (kind := same.WhichOneof("kind")) is not None:
        getattr(same, kind).ClearField("ticket")
    return same


def _registered(session: Session) -> Engine:
    if session.engine is None:
        raise Conflict(
            "not_registered", f"engine {session.rank.engine_id} has not described its cache", field="session",
            remedy="call Register with the manifest first",
        )  # fmt: skip
    return session.engine
