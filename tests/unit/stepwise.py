"""The world outside kvferry (the event loop's clock, gRPC, NIXL, memory, copying threads), one step at a time.

Daemons run in this process on one loop without real time. Everything that leaves a daemon waits in `World.pending`
until a test has it take its next step: a message that arrives, a piece of a read that is sampled or lands, a part of a
copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from kvferry.v1 import engine_pb2
from kvferryd.api.peer import PeerService
from kvferryd.copy import Batch, host
from kvferryd.copy.copying import Copying
from kvferryd.transport.metadata import Metadata
from kvferryd.transport.read import Descriptors, Read, Span, TransportError

T = TypeVar("T")
WINDOW = 2
"""Messages on their way in one direction of a stream: more make the sender wait."""
TURNS = 100_000
"""A loop that is not idle after so many turns never will be."""
PIECE = 1024
"""Bytes that a read samples at once: a token of one component."""
LENGTH, DESCRIPTOR, KEY = struct.Struct("<Q"), struct.Struct("<QQQ"), struct.Struct("<QB")


Step = Callable[[], None]
"""Has something outside the daemons go one step further."""


# ---- time ----


class Loop(asyncio.BaseEventLoop):
    """Runs until nothing is left to do now. Its clock stands still until a test moves it."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self.now = 1000.0
        self.problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, about: self.problems.append(about))
        self._turns = 0

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        self._turns += 1
        if timeout is None or timeout > 0 or self._turns > TURNS:
            self._stopping = True
        return []

    def _process_events(self, events: object) -> None:
        """There are no files."""

    def _write_to_self(self) -> None:
        """Nothing blocks."""

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """At once: what daemons put on threads of asyncio's is reckoning, whose order means nothing."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  as from a thread
            future.set_exception(error)
        return future

    def settle(self) -> None:
        """Run until idle."""
        self._turns = 0
        self.run_forever()
        assert self._turns <= TURNS, "the daemons never come to rest"

    def call(self, function: Callable[..., T], *args: Any, **more: Any) -> T:
        """Call on the loop, then run until idle. Raises what the function raises."""

        async def called() -> T:
            return function(*args, **more)

        return self.complete(called())

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run what needs nothing from outside."""
        task = self.create_task(work)
        self.settle()
        assert task.done(), "it waits for something outside"
        return task.result()

    def pass_time(self, seconds: float) -> None:
        """Move the clock; every timer on the way is served at its time."""
        until = self.now + seconds
        while (due := self.next_timer()) is not None and due <= until:
            self.now = max(self.now, due)
            self.settle()
        self.now = until
        self.settle()

    def next_timer(self) -> float | None:
        return min((handle.when() for handle in self._scheduled if not handle.cancelled()), default=None)


# ---- memory ----


@dataclass
class Memory:
    """Arrays that stay until the test is over: a read of what a daemon has given back must not end the process."""

    arrays: list[np.ndarray[Any, Any]] = field(default_factory=list)
    free: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    """Given back, by size: the next that is asked for lies at the same addresses."""

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        free = self.free.setdefault(nbytes, [])
        if free:
            array = free.pop()
            array[:] = 0
            return array
        self.arrays.append(np.zeros(nbytes, dtype=np.uint8))
        return self.arrays[-1]

    def keep(self, array: np.ndarray[Any, Any]) -> None:
        self.arrays.append(array)

    def check(self, address: int, nbytes: int) -> None:
        for array in self.arrays:
            if array.ctypes.data <= address and address + nbytes <= array.ctypes.data + array.nbytes:
                return
        raise AssertionError(f"{nbytes} bytes at {address:#x} are nobody's memory")


@dataclass(eq=False)
class Region:
    array: np.ndarray[Any, Any]
    owned: bool
    on_close: Callable[[], None]
    slow_source: str = ""
    unmappable: str = "it is host memory"
    closed: bool = False

    @property
    def span(self) -> Span:
        return Span(self.array.ctypes.data, self.array.nbytes, "host")

    def probe(self) -> None:
        """Nothing is mapped."""

    def exported(self, region: int) -> engine_pb2.Memory:
        return engine_pb2.Memory(region=region, nbytes=self.array.nbytes)

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.on_close()


@dataclass
class Provider:
    """Engines bring their own memory (the next to be adopted is `brought`); arenas are small."""

    memory: Memory
    arena_nbytes: int
    brought: np.ndarray[Any, Any] | None = None

    def allocate(self, nbytes: int) -> Region:
        array = self.memory.take(self.arena_nbytes)
        return Region(array, True, lambda: self.memory.free[self.arena_nbytes].append(array))

    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> Region:
        assert self.brought is not None
        return Region(self.brought, False, lambda: None)


# ---- copies ----


class Copies:
    """Copies between slots and the cache: in parts, one copy after another."""

    zeros = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self.queue: deque[_Copying] = deque()

    def start(self, nbytes: int, build: Callable[[], Sequence[Batch]], priority: int = 0) -> Copying:
        copy = Copying(nbytes, self._world.loop.create_future(), self._world.loop.create_future())
        self.queue.append(_Copying(self, list(_parts(build())), copy))
        return copy

    async def prepare(self, batches: Sequence[Batch]) -> None:
        """Nothing to prepare."""

    async def close(self) -> bool:
        while self.queue:
            await asyncio.wait([self.queue[-1].copy.quiet])
        return True


@dataclass(eq=False)
class _Copying:
    of: Copies
    parts: list[Batch]
    copy: Copying

    def step(self) -> None:
        if self.parts:
            host.copy([self.parts.pop(0)])
        if not self.parts:
            self.of.queue.popleft()
            self.copy.end()


def _parts(batches: Sequence[Batch]) -> Iterator[Batch]:
    for batch in batches:
        for at in range(len(batch.source.segments)):
            yield replace(batch, source=batch.source.part(at, 1), destination=batch.destination.part(at, 1))


# ---- NIXL ----


class Agent:
    """NIXL between agents of one process, in pieces: each is sampled at one step, and lands at the next.

    Reads of an agent that was closed still reach its memory, as between processes of one host, but those of a process
    that has died fail. A read that was given up, or has failed, may go on landing until it is quiet.
    """

    def __init__(self, world: World, name: str, **_: object) -> None:
        self._world, self.name, self.device, self.listens_at = world, name, None, ()
        self.process = PROCESS.get()
        self._spans: list[Span] = []
        self._peers: dict[str, int] = {}
        self.flights: list[Flight] = []
        self._closed = False
        world.agents[name] = self

    async def start(self) -> None:
        """At once."""

    async def register(self, *spans: Span) -> bytes:
        """Metadata as NIXL writes it."""
        self._spans += spans
        fields = [_field(b"Agent", self.name.encode()), _field(b"Conns", LENGTH.pack(1)), _field(b"t", b"UCX"),
                  _field(b"c", b"address"), _field(b"", b"MemSection"), _field(b"nixlSecElms", LENGTH.pack(1)),
                  _field(b"bknd", b"UCX"), _field(b"nixlDList", b"nixlSDList"), _field(b"t", bytes(4)),
                  _field(b"n", LENGTH.pack(len(self._spans)))]  # fmt: skip
        fields += [_field(b"", DESCRIPTOR.pack(span.address, span.nbytes, 0) + KEY.pack(0, 0)) for span in self._spans]
        return b"nixlSerDes|" + b"".join(fields)

    def rehearse(self) -> None:
        """The first connection is as quick as the next."""

    def attend(self) -> None:
        """Always."""

    async def add_peer(self, peer: Metadata) -> None:
        self._peers[peer.alias] = self._peers.get(peer.alias, 0) + 1

    async def remove_peer(self, alias: str) -> None:
        """Its name stays loaded until reads from it are quiet."""
        self._peers[alias] -= 1
        if not self._peers[alias]:
            del self._peers[alias]

    async def warm(self, peer: str, span: Span) -> None:
        """Nothing to wire up."""

    async def peek(self, peer: str, address: int, *, alone: bool = True) -> int:
        word = np.zeros(1, dtype=np.uint64)
        self._world.memory.keep(word)
        rows = [np.array([(at, word.nbytes, 0)], dtype=np.uint64) for at in (word.ctypes.data, address)]
        await self.read(peer, rows[0], rows[1], "DRAM", "DRAM").done
        return int(word[0])

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, local_type: str, remote_type: str, priority: int = 0
    ) -> Read:
        loop = self._world.loop
        done, quiet = loop.create_future(), loop.create_future()
        read = Read(peer, local, remote, local_type, remote_type, priority, done, quiet)
        if self._closed or peer not in self._peers:
            done.set_exception(TransportError("transport_failed", f"{self.name} cannot read {peer}"))
            done.exception()  # retrieved: nobody may be waiting
            quiet.set_result(None)
        else:
            self.flights.append(Flight(self, read))
        return read

    async def close(self) -> bool:
        """Every read of it ends here."""
        self._closed = True
        for flight in self.flights[:]:
            flight.end(TransportError("agent_closed", f"{self.name} was closed"))
        return True

    def lives(self, alias: str) -> bool:
        return self._world.agents[alias.partition("#")[0]].process.alive


class Flight:
    """A read under way."""

    def __init__(self, agent: Agent, read: Read) -> None:
        self.agent, self.read = agent, read
        self._pieces = deque(_pieces(read))
        self._sampled: tuple[int, bytes] | None = None

    def step(self) -> None:
        if self._sampled is not None:
            address, held = self._sampled
            ctypes.memmove(address, held, len(held))
            self._sampled = None
        if not self._pieces:
            self.end(None)
        elif not self.agent.lives(self.read.peer):
            self.end(TransportError("peer_lost", f"the connection to {self.read.peer} broke during a read"))
        else:
            local, remote, nbytes = self._pieces.popleft()
            self.agent._world.memory.check(remote, nbytes)
            self.agent._world.memory.check(local, nbytes)
            self._sampled = local, ctypes.string_at(remote, nbytes)

    def fail(self) -> None:
        """NIXL says that something went wrong, and not that it is over."""
        if not self.read.done.done():
            self.read.done.set_exception(TransportError("transport_failed", "NIXL failed"))
            self.read.done.exception()  # retrieved

    def end(self, why: TransportError | None) -> None:
        self.agent.flights.remove(self)
        read = self.read
        if why is None and read.abandoned:
            why = TransportError("abandoned", "the read was given up")
        if not read.done.done() and why is not None:
            read.done.set_exception(why)
            read.done.exception()  # retrieved
        elif not read.done.done():
            read.done.set_result(None)
        if not read.quiet.done():
            read.quiet.set_result(None)

    def writes(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of what may still land."""
        if self._sampled is not None:
            yield self._sampled[0], len(self._sampled[1])
        yield from ((local, nbytes) for local, _, nbytes in self._pieces)


def _pieces(read: Read) -> Iterator[tuple[int, int, int]]:
    for (local, nbytes, _), (remote, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
        for at in range(0, nbytes, PIECE):
            yield local + at, remote + at, min(PIECE, nbytes - at)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + LENGTH.pack(len(value)) + value + b"|"


class Screen:
    """The process that tries metadata: NIXL's here takes all that is well-formed."""

    held_up = ""

    def __init__(self) -> None:
        """Nothing to start."""

    async def prepare(self) -> None:
        """There is nothing to start."""

    async def check(self, metadata: Metadata, spans: Sequence[Span], timeout_s: float) -> None:
        """Fine."""

    async def close(self) -> None:
        """Nothing to end."""


# ---- gRPC ----


@dataclass(eq=False)
class Process:
    """A daemon's: what has died neither sends nor answers."""

    address: str
    service: PeerService | None = None
    alive: bool = True


PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")
"""The process whose code runs: the one that makes an agent or dials."""


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, bytes]]) -> None:
        self.error = _rpc_error(code, details, trailing)


class _Context:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:9"

    def time_remaining(self) -> float | None:
        return None

    def add_done_callback(self, then: Callable[[object], object]) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        serving.add_done_callback(then)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, bytes]] = ()) -> None:
        raise _Aborted(code, details, trailing)


def _rpc_error(code: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, bytes]] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def _gone() -> grpc.aio.AioRpcError:
    return _rpc_error(grpc.StatusCode.UNAVAILABLE, "the connection is gone")


class Channel:
    """The part of a grpc.aio.Channel that generated stubs need."""

    def __init__(self, world: World, address: str) -> None:
        self._world, self._address = world, address
        self._calls: list[Unary | Stream] = []

    def unary_unary(self, path: str, **_: object) -> Callable[..., Coroutine[Any, Any, Any]]:
        def call(request: Any, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
            unary = Unary(self._world, self._address, _method(path), _sent(request))
            self._world.asked[_method(path)] += 1
            self._calls.append(unary)
            return unary.answer(timeout)

        return call

    def stream_stream(self, path: str, **_: object) -> Callable[..., Stream]:
        def call(request: Any = None) -> Stream:
            stream = Stream(self._world, PROCESS.get(), self._address, _method(path), request)
            self._calls.append(stream)
            return stream

        return call

    unary_stream = stream_stream

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.IDLE  # every call dials

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()


def _method(path: str) -> str:
    return path.rpartition("/")[2]


def _sent(message: Any) -> Any:
    """As the other side reads it."""
    return type(message).FromString(message.SerializeToString())


class Unary:
    """A call with one answer. Steps: the request arrives, the answer arrives."""

    def __init__(self, world: World, address: str, method: str, request: Any) -> None:
        self._world, self._address, self._method, self._request = world, address, method, request
        self._client = PROCESS.get(None)
        self._reply: asyncio.Future[Any] = world.loop.create_future()
        self._serving: asyncio.Task[Any] | None = None
        self.over = False
        world.calls.append(self)

    def steps(self) -> list[Step]:
        return [self._step] if self._serving is None or self._serving.done() else []

    def _step(self) -> None:
        process = self._world.processes.get(self._address)
        said = self._client is None or self._client.alive
        if self._serving is None and said and process is not None and process.alive:
            with self._world.within(process):
                method = getattr(process.service, self._method)
                self._serving = self._world.loop.create_task(method(self._request, _Context()))
            self._serving.add_done_callback(_retrieve)
            self.process = process
            return
        self.over = True
        if self._reply.done():
            return
        if self._serving is None or self._serving.cancelled() or not self.process.alive:
            self._reply.set_exception(_gone())
        elif error := self._serving.exception():
            assert isinstance(error, _Aborted), error
            self._reply.set_exception(error.error)
        else:
            self._reply.set_result(_sent(self._serving.result()))

    async def answer(self, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._reply
        except TimeoutError:
            raise _rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        if not self._reply.done():
            self._reply.cancel()
        elif not self._reply.cancelled():
            self._reply.exception()  # retrieved
        if self._serving is not None and not self._serving.done():
            self._serving.cancel()


@dataclass(frozen=True)
class _End:
    """The end of a direction of a stream. error: why; None for an end in good order. cancelled: the client gave up."""

    error: grpc.aio.AioRpcError | None = None
    cancelled: bool = False


class _Direction:
    """Messages of one direction: on their way until a step has the next one arrive."""

    def __init__(self) -> None:
        self.on_way: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def arrive(self) -> Any:
        message = self.on_way.popleft()
        self._arrived.append(message)
        self.wake()
        return message

    async def send(self, message: Any) -> None:
        self.on_way.append(_sent(message))
        while len(self.on_way) >= WINDOW:
            await self._changed.wait()

    async def receive(self) -> Any:
        while not self._arrived:
            await self._changed.wait()
        if isinstance(self._arrived[0], _End):
            return self._arrived[0]
        return self._arrived.popleft()

    def end(self, end: _End, *, lost: bool = False) -> None:
        if lost:
            self.on_way.clear()
        self.on_way.append(end)
        self.wake()


class Stream:
    """A call of streams. Steps: the next message, or the end, arrives at one side."""

    def __init__(self, world: World, client: Process, address: str, method: str, request: Any = None) -> None:
        """request: the only message of a client that sends no stream, or what its messages come from."""
        self._world, self._client, self._address = world, client, address
        self._to_server, self._to_client = _Direction(), _Direction()
        self._single = isinstance(request, Message)
        self._saying: asyncio.Task[None] | None = None
        if isinstance(request, Message):
            self._to_server.on_way.append(_sent(request))
        elif request is not None:
            self._saying = world.loop.create_task(self._say(request))
        self._over = False
        """At the client."""
        self._method = method
        self._server: Process | None = None
        self._serving: asyncio.Task[None] | None = None
        world.calls.append(self)

    # ---- the client's side ----

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        message = await self._to_client.receive()
        if not isinstance(message, _End):
            return message
        self._over = True
        if message.error is not None:
            raise message.error
        raise StopAsyncIteration

    async def read(self) -> Any:
        return await anext(self, grpc.aio.EOF)

    async def write(self, message: Any) -> None:
        if self._over:
            raise asyncio.InvalidStateError("the call is over")
        await self._to_server.send(message)

    async def _say(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            await self._to_server.send(request)
        await self.done_writing()

    async def done_writing(self) -> None:
        self._to_server.end(_End())

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            self._hush()
            self._to_server.end(_End(cancelled=True))
            self._to_client.end(_End(_rpc_error(grpc.StatusCode.CANCELLED, "cancelled here")), lost=True)
            self._to_client.arrive()

    def _hush(self) -> None:
        if self._saying is not None:
            self._saying.cancel()

    # ---- outside ----

    def steps(self) -> list[Step]:
        found: list[Step] = []
        if self._to_server.on_way:
            found.append(self._to_server_step)
        if self._to_client.on_way:
            found.append(self._to_client.arrive)
        return found

    @property
    def open(self) -> bool:
        return not self._over and self._serving is not None and not self._serving.done()

    @property
    def over(self) -> bool:
        """Nothing comes of it any more."""
        return self._serving is not None and self._serving.done() and not self.steps()

    def _to_server_step(self) -> None:
        if self._serving is None:
            self._begin()
        message = self._to_server.arrive()
        if isinstance(message, _End) and message.cancelled and self._serving is not None:
            self._serving.cancel()

    def break_down(self) -> None:
        """The connection is lost; each side sees it at a step of its own."""
        self._hush()
        self._to_server.end(_End(cancelled=True), lost=True)
        self._to_client.end(_End(_gone()), lost=True)

    def touches(self, process: Process) -> bool:
        return process in (self._client, self._server)

    # ---- the server's side ----

    def _begin(self) -> None:
        process = self._world.processes.get(self._address)
        if process is None or not process.alive or not self._client.alive:
            self._to_client.end(_End(_gone()), lost=True)
            self._serving = self._world.loop.create_task(_nothing())
            return
        self._server = process
        with self._world.within(process):
            self._serving = self._world.loop.create_task(self._serve(process))

    async def _requests(self) -> AsyncIterator[Any]:
        while not isinstance(message := await self._to_server.receive(), _End):
            yield message

    async def _serve(self, process: Process) -> None:
        end = _End()
        asked = await self._to_server.receive() if self._single else self._requests()
        replies = getattr(process.service, self._method)(asked, _Context())
        try:
            async for reply in replies:
                await self._to_client.send(reply)
        except _Aborted as error:
            end = _End(error.error)
        finally:
            await replies.aclose()
            self._to_client.end(end)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Its caller may have given up."""
    if not task.cancelled():
        task.exception()


async def _nothing() -> None:
    """The answer of a call that nobody answers."""


# ---- all of it ----


class World:
    """Everything outside the daemons of one test."""

    def __init__(self, arena_nbytes: int) -> None:
        self.loop = Loop()
        asyncio.set_event_loop(self.loop)
        self.memory = Memory()
        self.arena_nbytes = arena_nbytes
        self.agents: dict[str, Agent] = {}
        self.copies: list[Copies] = []
        self.calls: list[Unary | Stream] = []
        self.processes: dict[str, Process] = {}
        self.maps_slots = False
        """Whether a reader has its source's slots mapped: at their own address, for there is one process."""
        self.asked: Counter[str] = Counter()
        """How often each call with one answer was made."""

    @contextlib.contextmanager
    def within(self, process: Process) -> Iterator[None]:
        """Calls and starts inside run in this process."""
        token = PROCESS.set(process)
        try:
            yield
        finally:
            PROCESS.reset(token)

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        """Put this world in the place of the real one."""

        def copies() -> Copies:
            self.copies.append(Copies(self))
            return self.copies[-1]

        for clock in ("time.monotonic", "time.time"):
            patched.setattr(clock, self.loop.time)  # a run is the same however long its steps take
        patched.setattr("time.clock_gettime", lambda _: self.loop.time())
        patched.setattr("kvferryd.engine.registration.Agent", functools.partial(Agent, self))
        patched.setattr("kvferryd.engine.registration.HostCopies", copies)
        patched.setattr("kvferryd.ferry.provider", lambda *_: Provider(self.memory, self.arena_nbytes))
        patched.setattr("kvferryd.peers.peers.Screen", Screen)
        slots = property(lambda rank: rank.staging.span.address if self.maps_slots else None)
        patched.setattr("kvferryd.peers.peer.PeerRank.slots_here", slots)
        patched.setattr("kvferryd.peers.channels._dial", lambda address, _: Channel(self, address))

    def pending(self) -> list[Step]:
        """The next step of everything that is under way."""
        found = [step for call in self.calls for step in call.steps()]
        found += [flight.step for flight in self.flights()]
        found += [copies.queue[0].step for copies in self.copies if copies.queue]
        return found

    def flights(self) -> list[Flight]:
        return [flight for agent in self.agents.values() for flight in agent.flights]

    def streams(self) -> list[Stream]:
        return [call for call in self.calls if isinstance(call, Stream) and call.open]

    def step(self, choice: int) -> bool:
        """A step of one of them, and what follows from it; whether there was one."""
        pending = self.pending()
        if pending:
            self.take(pending[choice % len(pending)])
        return bool(pending)

    def take(self, step: Step) -> None:
        step()
        self.loop.settle()
        self.calls = [call for call in self.calls if not call.over]

    def take_all(self, choose: Callable[[], list[Step]], until: Callable[[], bool] = lambda: False) -> None:
        """Take the first of these steps, again and again, until there is none or that holds."""
        for _ in range(5000):
            steps = choose()
            if until() or not steps:
                return
            self.take(steps[0])
        raise AssertionError("what is under way never ends")

    def run(self, most: int = 10_000) -> None:
        """Step until nothing is under way."""
        for _ in range(most):
            if not self.step(0):
                return
        raise AssertionError("what is under way never ends")

    def kill(self, process: Process) -> None:
        """The process dies: its streams are lost, its memory cannot be read."""
        process.alive = False
        for call in self.calls:
            if isinstance(call, Stream) and call.touches(process):
                call.break_down()
        self.loop.settle()

    def dispose(self) -> None:
        for _ in range(3):  # ends tell others so, in tasks of their own
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            with contextlib.suppress(AssertionError):
                self.loop.settle()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        asyncio.set_event_loop(None)
