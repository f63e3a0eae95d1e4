"""Daemons as processes, the doors to them, and waiting for what they do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.rpc import PROTOCOL_MAX, PROTOCOL_MIN, error_of
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferry.wire import problem_from_proto
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.memory.host import NAME

T = TypeVar("T")
SPOKEN = {"protocol_min": PROTOCOL_MIN, "protocol_max": PROTOCOL_MAX}
"""The protocol of this build, as a caller says it."""
BEFORE = {"protocol_min": PROTOCOL_MIN - 1, "protocol_max": PROTOCOL_MIN - 1}
"""The protocol of the build before the last change of the wire."""
TIMEOUT_S = 60.0
"""The longest wait of a test for anything. Nothing comes near it on a machine that has no other work."""
TCP_ALONE = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"
"""UCX_TLS where no CMA and no shared memory are wanted: beside a GPU, NIXL does not start without cuda_copy."""


class Daemons:
    """Starts daemons of one fleet, all with the flags that tests want."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def start(self, name: str, count: int = 1, *flags: str) -> list[DaemonService]:
        """The daemons of one engine's ranks, ready to be spoken to."""
        started = self.fleet.daemons(name, count, flags=flags)
        await self.fleet.ready(*started, timeout_s=TIMEOUT_S)
        return started

    async def start_rank(self, name: str, roster: DaemonService, *flags: str) -> DaemonService:
        started = self.fleet.daemon(name, roster=roster, flags=flags)
        await self.fleet.ready(started, timeout_s=TIMEOUT_S)
        return started


async def until(holds: Callable[[], Awaitable[object]], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Ask again until it holds: for what another process does without telling. Fails with `what` when it never does."""
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)


async def logged(daemon: DaemonService, event: str, request_id: str = "") -> list[dict[str, Any]]:
    """Lines of its log on this event, of this request if one is named, once there are any: a thread writes them."""
    found: list[dict[str, Any]] = []

    async def written() -> bool:
        whole, _, _ = daemon.log.read_text().rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        found[:] = [each for each in lines if each["event"] == event and request_id in ("", each.get("request_id"))]
        return bool(found)

    await until(written, f"{daemon.name} logs: {event} {request_id}")
    return found


async def retired(*daemons: DaemonService) -> None:
    """Until no engine of an earlier test is left on them."""
    for daemon in daemons:
        async with RouterClient(daemon.url) as router:

            async def empty(router: RouterClient = router) -> bool:
                return not await router.engines()

            await until(empty, f"the engines of the last test on {daemon.name} are retired")


@asynccontextmanager
async def under_way(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """`work` as a task that ends with the block, awaited by then or not."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(daemon: DaemonService, number: signal.Signals) -> int:
    """Signal the daemon and return its exit status."""
    daemon.signal(number)
    return await asyncio.to_thread(daemon.process.wait, TIMEOUT_S)


@asynccontextmanager
async def peer_stub(daemon: DaemonService) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
    """The peer service as another daemon, or something that pretends to be one, would see it."""
    async with grpc.aio.insecure_channel(daemon.peer) as channel:
        yield peer_pb2_grpc.PeerStub(channel)


class Joining(peer_pb2_grpc.PeerServicer):
    """A rank's daemon as far as its seed asks it."""

    key = b""

    async def Admit(self, request: peer_pb2.AdmitRequest, context: object) -> peer_pb2.AdmitReply:
        self.key = request.key
        return peer_pb2.AdmitReply()


@asynccontextmanager
async def serving(service: peer_pb2_grpc.PeerServicer) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Tap:
    """Stands before a daemon, passes on what is said to it, and keeps every byte."""

    def __init__(self) -> None:
        self.to = ""
        """Callers are kept out while it is empty."""
        self._through: set[asyncio.StreamWriter] = set()
        self.said: list[bytearray] = []
        """The bytes that each connection's caller sent."""
        self.answered = bytearray()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.to:
            writer.close()
            return
        host, _, port = self.to.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        self.said.append(bytearray())
        self._through |= {writer, back}
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, back, self.said[-1]), self._pass(there, writer, self.answered))
        self._through -= {writer, back}

    def cut(self) -> None:
        """Every connection is reset, and none is made until `to` is set again."""
        self.to = ""
        for writer in self._through:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        while chunk := await reader.read(1 << 16):
            kept += chunk
            writer.write(chunk)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def tap() -> AsyncIterator[tuple[Tap, str]]:
    """Give `to` the address of the daemon that it stands before."""
    tapping = Tap()
    server = await asyncio.start_server(tapping, "127.0.0.1", 0)
    try:
        yield tapping, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def refusal(call: Awaitable[object]) -> KvferryError:
    """The error with which a call is refused, be it a client's or raw gRPC."""
    try:
        answer = await call
    except KvferryError as error:
        return error
    except grpc.aio.AioRpcError as error:
        return error_of(error, "the daemon")
    if isinstance(answer, peer_pb2.ReadReply) and not answer.reading and answer.HasField("problem"):
        return problem_from_proto(answer.problem)
    raise AssertionError(f"it was not refused: {answer}")


def open_files(daemon: DaemonService) -> int:
    return psutil.Process(daemon.process.pid).num_fds()


def screens(daemon: DaemonService) -> list[psutil.Process]:
    """Its processes that try peers' metadata."""
    found = []
    for child in psutil.Process(daemon.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "kvferryd.transport.screening" in child.cmdline():
                found.append(child)
    return found


def owned_regions(daemon: DaemonService) -> int:
    """How many regions of host memory it has made and not closed."""
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines()
    return sum(NAME in line for line in maps)


NO_REGIONS = "/memfd:kvferry-history", "/memfd:kvferry-peers"
"""Files for the daemon that comes next."""


def memory_files(daemon: DaemonService) -> set[int]:
    """The host memory regions that the daemon holds, by inode."""
    files = Path(f"/proc/{daemon.process.pid}/fd")
    found = set()
    for file in files.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = str(file.readlink())
            if name.startswith("/memfd:kvferry") and not name.startswith(NO_REGIONS):
                found.add(file.stat().st_ino)
    return found


def resident_mb(daemon: DaemonService) -> float:
    return psutil.Process(daemon.process.pid).memory_info().rss / (1 << 20)


async def agent_of(stub: peer_pb2_grpc.PeerAsyncStub, engine_id: str) -> str:
    """The name that an opening for this engine has to give; empty where the handshake is refused."""
    try:
        met = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=engine_id))
    except grpc.aio.AioRpcError:
        return ""
    return met.agent_name


class ByHand:
    """A reader that says what a test wants; `opening` names whom it reads."""

    def __init__(self, stub: peer_pb2_grpc.PeerAsyncStub, opening: peer_pb2.ReadOpening) -> None:
        self._stub, self.call = stub, stub.Read()
        self._opening: peer_pb2.ReadOpening | None = opening

    async def say(self, **request: Any) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # refused meanwhile: `read` tells why
            await self.introduce()
            await self.call.write(peer_pb2.ReadRequest(**request))

    async def introduce(self) -> None:
        """Say whom it reads, after meeting that engine, and nothing else: grpc.aio loses a refusal that comes while a
        write is under way."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            opening.agent_name = opening.agent_name or await agent_of(self._stub, opening.engine_id)
            await self.call.write(peer_pb2.ReadRequest(opening=opening))

    async def open(self, request_id: str, reading: int = 1) -> peer_pb2.ReadReply:
        await self.say(open=peer_pb2.LeaseOpen(reading=reading, request_id=request_id))
        return await self.heard()

    async def waits(self) -> None:
        """Until the source has said that what was asked for is still to come: it knows of this reader."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                reply = await self.call.read()
                assert isinstance(reply, peer_pb2.ReadReply)
                if reply.HasField("unpublished"):
                    return

    async def heard(self) -> peer_pb2.ReadReply:
        """The source's next message about what it was asked: leases are announced beside that."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                reply = await self.call.read()
                assert isinstance(reply, peer_pb2.ReadReply)
                if not reply.HasField("announced") and not reply.HasField("unpublished"):
                    return reply
