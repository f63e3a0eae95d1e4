"""An engine and a reader without a client: they say whatever they are given."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from fleet import SPOKEN, TIMEOUT_S, Joining, serving, until
from google.protobuf.message import Message
from ranks import Blocks
from target import Target

from kvferry.errors import KvferryError
from kvferry.file import File
from kvferry.memory.handover import framed, hand_over, open_pipe, sealed_file
from kvferry.v1 import engine_pb2, engine_pb2_grpc, layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_to_proto, tables_to_proto

REQUESTS = [f"r{n}" for n in range(6)]
LONG_S = 600.0
M = TypeVar("M", bound=Message)


class RawEngine:
    """Rank 0, registered. Give it commands of any kind."""

    def __init__(self, target: Target, channel: grpc.aio.Channel, ranks: int = 1) -> None:
        self.target, self.channel, self.ranks = target, channel, ranks
        self.engine_id, self.epoch = f"raw-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        self.stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)
        self.session, self.key = "", b""
        self.attached = engine_pb2.Attached()
        self.said = self.answered = 0
        self._call: Any = None
        self._pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.hearing: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        self._call = self.stub.Attach()
        await self._call.write(engine_pb2.Command(attach=attaching(self.engine_id, self.epoch, self.ranks)))
        self.attached = (await self._call.read()).attached
        self.session = self.attached.session

    async def open_pipe(self) -> None:
        connection, process = await asyncio.to_thread(open_pipe, str(self.target.daemon.socket), self.session)
        if process is not None:
            process.close()
        self._pipe = await asyncio.open_unix_connection(sock=connection)

    async def register(self) -> None:
        manifest = self.manifest()
        for region in manifest.regions:
            asked = engine_pb2.AllocateRequest(session=self.session, region=region.id, nbytes=region.nbytes)
            await self.stub.Allocate(asked)
        await self.stub.Register(engine_pb2.RegisterRequest(session=self.session, manifest=manifest))
        self.hearing = asyncio.create_task(self._hear())

    def manifest(self) -> layout_pb2.Manifest:
        manifest = manifest_to_proto(self.target.engine.ranks[0].manifest)
        manifest.engine_id, manifest.epoch, manifest.world_size = self.engine_id, self.epoch, self.ranks
        return manifest

    def ticket(self) -> str:
        """A sealed file of one page is handed over for it; empty where the session has ended. Blocks."""
        ticket = ""
        with File(sealed_file("raw", 4096)) as file, contextlib.suppress(KvferryError):
            ticket, process = hand_over(str(self.target.daemon.socket), self.session, [file.fileno()])
            if process is not None:
                process.close()
        return ticket

    async def say(self, command: engine_pb2.Command) -> None:
        self.said += len(command.several.commands) if command.HasField("several") else 1
        if self._pipe is None:
            await self._call.write(command)
        else:
            self._pipe[1].write(framed(command))
            await self._pipe[1].drain()

    async def all_answered(self) -> None:
        async def answered() -> bool:
            assert self.hearing is not None
            assert not self.hearing.done(), self.hearing.exception() or "the session has ended"
            return self.answered == self.said

        await until(answered, f"each of {self.said} commands is answered")

    async def some_moved(self) -> None:
        async def moved() -> bool:
            return bool(self.target.said["moved"])

        await until(moved, "a transfer is done")

    async def _event(self) -> engine_pb2.Event | None:
        if self._pipe is None:
            event = await self._call.read()
            return None if event is grpc.aio.EOF else event
        try:
            length = int.from_bytes(await self._pipe[0].readexactly(4), "big")
            return engine_pb2.Event.FromString(await self._pipe[0].readexactly(length))
        except asyncio.IncompleteReadError:
            return None

    async def _hear(self) -> None:
        while (event := await self._event()) is not None:
            if event.HasField("answer"):
                self.answered += 1
                if event.answer.HasField("problem"):
                    self.target.judge_problem(event.answer.problem, "a command")
                else:
                    self.target.said["ok"] += 1
            elif event.HasField("transfer_ended"):
                ended = event.transfer_ended
                if ended.HasField("problem"):
                    self.target.judge_problem(ended.problem, ended)
                else:
                    self.target.said["moved"] += 1

    async def leave(self) -> None:
        """Not by ending the stream: then its memory would be kept for a while."""
        if self.session:
            await self.stub.End(engine_pb2.EndRequest(session=self.session, leave=True))
        if self.hearing is not None:
            self.hearing.cancel()
        if self._pipe is not None:
            self._pipe[1].close()
        self._call.cancel()


def attaching(engine_id: str, epoch: str, world_size: int) -> engine_pb2.AttachRequest:
    return engine_pb2.AttachRequest(**SPOKEN, client="raw", engine_id=engine_id, epoch=epoch, world_size=world_size)


@asynccontextmanager
async def raw_engine(target: Target, ranks: int = 1, *, piped: bool = False) -> AsyncIterator[RawEngine]:
    """Registered and whole: rank 1 is played where there are two. Leases that it could read are published at the
    friend: REQUESTS."""
    async with (
        grpc.aio.insecure_channel(f"unix:{target.daemon.socket}") as channel,
        grpc.aio.insecure_channel(target.daemon.peer) as peer,
        serving(played := Joining()) as address,
    ):
        engine, client = RawEngine(target, channel, ranks), target.friend.ranks[0].client
        await engine.attach()
        try:
            if piped:
                await engine.open_pipe()
            await engine.register()
            if ranks == 2:
                member = peer_pb2.Member(rank=1, address=address, epoch=engine.epoch)
                held = peer_pb2_grpc.PeerStub(peer).Join(joining(engine.engine_id, member))
                await held.read()
                engine.key = played.key
            for request_id in REQUESTS:
                await client.publish(request_id, blocks().tables(), 20, readers=1 << 20, ttl_s=LONG_S)
            yield engine
        finally:
            for request_id in REQUESTS:
                await client.abort(request_id)
            await engine.leave()
            for lease in await target.router.leases():
                with contextlib.suppress(KvferryError):  # it has ended meanwhile
                    await target.router.revoke_lease(lease.request_id)


def joining(engine_id: str, member: peer_pb2.Member) -> peer_pb2.JoinRequest:
    return peer_pb2.JoinRequest(**SPOKEN, engine_id=engine_id, member=member, world_size=2, challenge=bytes(32))


def blocks(n: int = 1) -> Blocks:
    """Room for 20 tokens."""
    return Blocks((2 * n, 2 * n + 1), n)


def commands(target: Target) -> Iterator[engine_pb2.Command]:
    """Good ones, for ever, of every kind."""
    source = engine_pb2.Source(engine_id=target.friend.engine_id, address=target.friend.address)
    for n in itertools.count(1):
        tables, request_id = tables_to_proto(blocks(n % 16).tables()), REQUESTS[n % len(REQUESTS)]
        yield engine_pb2.Command(
            id=n,
            publish=engine_pb2.PublishRequest(request_id=f"own-{request_id}", tables=tables, num_tokens=20, lease=n),
        )
        yield engine_pb2.Command(
            id=n,
            receive=engine_pb2.ReceiveRequest(
                request_id=request_id, tables=tables, tokens=layout_pb2.TokenRange(stop=20), source=source, attempt=n
            ),
        )
        if n % 8 == 0:
            yield engine_pb2.Command(id=n, abort=engine_pb2.EngineAbortRequest(request_id=request_id))
            yield engine_pb2.Command(id=n, probe=engine_pb2.Probe())


def unary(
    channel: grpc.Channel, service: str, method: str, reply: type[M], said: Message | bytes,
    timeout_s: float = TIMEOUT_S,
) -> M:  # fmt: skip
    """Blocks. Raises grpc.RpcError."""
    name = f"/kvferry.v1.{service}/{method}"
    return channel.unary_unary(name, _bytes, reply.FromString)(said, timeout=timeout_s)  # type: ignore[no-any-return]


def streamed(
    channel: grpc.Channel, service: str, method: str, reply: type[M], said: Iterable[Message | bytes], most: int
) -> list[M]:
    """At most so many replies of a stream that is told all this and then nothing more. Blocks; raises grpc.RpcError."""
    call = channel.stream_stream(f"/kvferry.v1.{service}/{method}", _bytes, reply.FromString)
    replies = call(iter(said), timeout=TIMEOUT_S)
    try:
        return list(itertools.islice(replies, most))
    finally:
        replies.cancel()


def _bytes(said: Message | bytes) -> bytes:
    return said if isinstance(said, bytes) else said.SerializeToString()
