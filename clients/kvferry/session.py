"""An engine rank's session with its daemon: one stream of commands and events, and the calls beside it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import EncodeError, Message

from kvferry.errors import KvferryError, Malformed, Unavailable
from kvferry.file import File
from kvferry.memory.handover import EXCHANGE_S, fetch, hand_over, open_pipe
from kvferry.outbox import Outbox
from kvferry.pipe import Pipe
from kvferry.process import Process
from kvferry.rpc import MAX_MESSAGE, MESSAGE_OPTIONS, UNREACHABLE, error_of
from kvferry.threads import made
from kvferry.v1 import engine_pb2, engine_pb2_grpc

T = TypeVar("T")
CALL_S = 30.0
"""How long a call may take that does not wait for another party."""
CLOSE_S = 2.0
"""How long `close` waits for the daemon's answer."""
ASK_S, AGAIN_S = 5.0, 0.2
"""How long the daemon is given to confirm the end of a session, and the pause before it is asked again."""
PIPE_S = 2.0
"""How long the pipe and the stream may end one after the other."""
OPTIONS = [*MESSAGE_OPTIONS, ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]


class Session:
    """`attach` opens the session, and either side ends it by ending the stream. The daemon may still read and write the
    engine's blocks until `over` is set. Always `close` it."""

    def __init__(
        self,
        socket: str,
        on_event: Callable[[engine_pb2.Event], None],
        on_end: Callable[[KvferryError], None],
        on_over: Callable[[KvferryError | None], None],
        call_timeout_s: float = CALL_S,
    ) -> None:
        """on_event: called with every event; a KvferryError that it raises ends the session. on_end: called once, with
        the error that calls raise from then on. on_over: called once; with None when nothing of the session is read or
        written any more, or with the reason why that will never be known."""
        self.whom = f"the daemon on {socket}"
        self._socket, self._on_event, self._on_end, self._on_over = socket, on_event, on_end, on_over
        self.call_timeout_s = call_timeout_s
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=OPTIONS)
        self.stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(self._channel)
        self.id = ""
        """Named in every call beside the stream."""
        self.followed = False
        """Another session has resumed this one, and has what was its."""
        self.closed = asyncio.Event()
        self.over = asyncio.Event()
        self._instance = ""
        self._daemon: Process | None = None
        """Watched from the moment when it is known, in whatever state the session is then."""
        self._dead = asyncio.Event()
        self._commands = Outbox(_several)
        self._pipe: Pipe | None = None
        self._reader: asyncio.Task[None] | None = None
        self._confirming: asyncio.Task[None] | None = None
        self._closing = False
        self._ended: KvferryError | None = None
        """Why the session ended."""

    async def attach(self, attach: engine_pb2.AttachRequest, timeout_s: float) -> engine_pb2.Attached:
        """Waits for the daemon to come up. Raises KvferryError: `unreachable`, or what the daemon refuses."""
        attach.several = True
        self._commands.put(engine_pb2.Command(attach=attach))
        stream = aiter(self.stub.Attach(self._to_send(), wait_for_ready=True))
        try:
            async with asyncio.timeout(timeout_s):
                attached = (await anext(stream)).attached
                self.id, self._instance = attached.session, attached.instance
                self._commands.several = attached.several
                self._reader = asyncio.create_task(self._read(stream), name="kvferry-events")
                with contextlib.suppress(KvferryError):  # without it neither side can see that the other's process died
                    await self._open_pipe()
        except grpc.aio.AioRpcError as error:
            why, remedy = f"{self.whom} ended the session before it had begun", "attach again"
            ended = Unavailable(UNREACHABLE, why, field="socket", value=self._socket, remedy=remedy)
            raise error_of(error, self.whom, ended) from None
        except (TimeoutError, StopAsyncIteration):
            message = f"no daemon opened a session on {self._socket} within {timeout_s:g} s"
            remedy = "start `kvferry serve`, or give the engine_socket it listens on"
            raise Unavailable("unreachable", message, field="socket", value=self._socket, remedy=remedy) from None
        return attached

    async def call(self, method: Callable[..., Any], request: Message, timeout_s: float = 0.0) -> Any:
        """A call beside the stream. timeout_s: added to `call_timeout_s`. Raises KvferryError."""
        if self._ended is not None:
            raise self._ended
        check_size(request, type(request).__name__)
        try:
            return await method(request, timeout=self.call_timeout_s + timeout_s)
        except grpc.aio.AioRpcError as error:
            raise session_closed() if self._closing else error_of(error, self.whom) from None
        except grpc.aio.UsageError:  # a call on a closed channel
            raise session_closed() from None
        except asyncio.CancelledError:  # this task, or a call whose channel is closed under it
            task = asyncio.current_task()
            if not self._closing or (task is not None and task.cancelling()):
                raise
            raise session_closed() from None

    def send(self, id: int, kind: str, request: Message) -> None:
        """Put a command on the stream; its answer is an event. Ignored when the session has ended."""
        self._commands.put(engine_pb2.Command(id=id, **{kind: request}))  # type: ignore[arg-type]  # one field of `oneof`

    async def hand_over(self, files: Sequence[int]) -> str:
        """As `handover.hand_over`, on a thread, with descriptors of its own: a caller that is cancelled may close the
        files at once."""
        if self._closing:
            raise session_closed()
        try:
            copies = File.copies(files)
        except OSError as error:
            message = f"{len(files)} files cannot be handed over: {error}"
            remedy = "raise the limit of open files (ulimit -n)"
            raise Unavailable("handover_failed", message, field="files", value=len(files), remedy=remedy) from None

        def handed() -> tuple[str, Process | None]:
            try:
                return hand_over(self._socket, self.id, [copy.fileno() for copy in copies])
            finally:
                for copy in copies:
                    copy.close()

        async def watched() -> str:
            ticket, process = await self._exchanged(handed)
            self._watch(process)
            return ticket

        return await asyncio.shield(asyncio.create_task(watched()))

    def _watch(self, process: Process | None) -> None:
        """The daemon's, and ours to close."""
        if process is not None:
            if self._daemon is None and not self._closing:
                self._daemon = process
                process.watch(self._dead.set)
            else:
                process.close()

    async def _open_pipe(self) -> None:
        """Commands and events go by it from now on. The stream has them where this raises KvferryError: the daemon's
        handover socket is not there, for example."""

        def closed(opened: tuple[socket.socket, Process | None]) -> None:
            for each in opened:
                if each is not None:
                    each.close()

        connection, process = await self._exchanged(partial(open_pipe, self._socket, self.id), closed)
        self._watch(process)
        pipe = self._pipe = Pipe(self._commands, lambda message: self._hear(engine_pb2.Event.FromString(message)))
        pipe.over.add_done_callback(self._on_pipe_over)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: pipe, sock=connection)
        pipe.begin(transport)

    def _on_pipe_over(self, _: asyncio.Future[None]) -> None:
        """The stream tells why; where it does not, it is ended."""
        assert self._pipe is not None and self._reader is not None
        loop, problem = asyncio.get_running_loop(), self._pipe.problem
        if problem is not None and not isinstance(problem, KvferryError):
            loop.call_exception_handler({"message": "an event was not taken: the session ends", "exception": problem})
        if not self._reader.done():
            loop.call_later(PIPE_S if problem is None else 0, self._reader.cancel)

    async def fetch(self, ticket: str) -> File:
        """As `kvferry.memory.handover.fetch` of one file, on a thread."""
        return (await self._exchanged(partial(fetch, self._socket, self.id, ticket))).pop()

    async def _exchanged(self, exchange: Callable[[], T], end: Callable[[T], object] = lambda _: None) -> T:
        """Exchange files on a thread of its own: those of the loop may all wait for the engine's GPU. end: called with
        what nobody waits for any more."""
        try:
            return await made("kvferry-exchange", exchange, EXCHANGE_S, end)
        except TimeoutError:
            message, remedy = f"{self.whom} exchanged no files within {EXCHANGE_S:g} s", "see the daemon's log"
            raise Unavailable("handover_failed", message, field="socket", value=self._socket, remedy=remedy) from None

    async def close(self, *, leave: bool = True) -> None:
        """Calls that wait, and all from now on, raise KvferryError (`session_closed`). leave: the engine ends;
        the daemon keeps whole leases until they are read or expire, and not for a session that resumes this one."""
        self._closing = True
        try:
            if self.id and not self.followed:
                await self._tell_end(self.stub, leave=leave)
        finally:
            await self._close_channel()

    async def leave(self) -> None:
        """The engine ends after all: no session will resume this one, which was closed for one that does."""
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=OPTIONS) as channel:
            await self._tell_end(engine_pb2_grpc.EngineStub(channel), leave=True)

    async def _tell_end(self, stub: engine_pb2_grpc.EngineAsyncStub, *, leave: bool) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            await stub.End(engine_pb2.EndRequest(session=self.id, leave=leave), timeout=CLOSE_S)

    async def _close_channel(self) -> None:
        try:
            if self._pipe is not None:
                self._pipe.abort()
            tasks = [task for task in (self._reader, self._confirming) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()
        finally:
            self._end(session_closed())
            self._settle(session_closed())
            if self._daemon is not None:
                self._daemon.close()

    async def _to_send(self) -> AsyncIterator[engine_pb2.Command]:
        while (command := await self._commands.take()) is not None:
            yield command
        await self.closed.wait()  # the session ends with the stream, which a pipe may have replaced

    async def _read(self, events: AsyncIterator[engine_pb2.Event]) -> None:
        message, remedy = f"{self.whom} ended the session", "connect again; what was in flight has not arrived"
        why: KvferryError = Unavailable("daemon_gone", message, field="socket", value=self._socket, remedy=remedy)
        try:
            try:
                async for told in events:
                    self._hear(told)
            finally:  # the pipe may have brought more than was heard yet
                if self._pipe is not None:
                    await asyncio.wait([self._pipe.over], timeout=PIPE_S)
        except grpc.aio.AioRpcError as error:
            why = error_of(error, self.whom, ended=why)
        except KvferryError as malformed:
            why = malformed
        finally:
            if self._pipe is not None and isinstance(self._pipe.problem, KvferryError):
                why = self._pipe.problem
            self._end(session_closed() if self._closing else why)

    def _hear(self, told: engine_pb2.Event) -> None:
        for event in told.several.events if told.HasField("several") else (told,):
            self._on_event(event)

    def _end(self, why: KvferryError) -> None:
        if self._ended is not None:
            return
        self._ended = why
        self.closed.set()
        self._commands.end()
        if not self._closing:
            self._confirming = asyncio.create_task(self._confirm(), name="kvferry-confirm")
        self._on_end(why)

    async def _confirm(self) -> None:
        """Wait until the daemon has confirmed that it reads and writes nothing of the session any more, or until its
        process is dead. A silent daemon may go on at any time."""
        while not self._dead.is_set():
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await self.stub.End(engine_pb2.EndRequest(session=self.id), timeout=ASK_S)
                # Another daemon takes the socket only when nobody serves it any more; where its predecessor's process
                # is known its death is waited for all the same.
                if self._daemon is None or reply.instance == self._instance:
                    break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dead.wait(), AGAIN_S)
        self._settle(None)

    def _settle(self, unknown: KvferryError | None) -> None:
        """unknown: why the effect of the commands that were not answered will never be known."""
        if not self.over.is_set():
            self.over.set()
            self._on_over(unknown)


def _several(commands: list[engine_pb2.Command]) -> engine_pb2.Command:
    return engine_pb2.Command(several=engine_pb2.Commands(commands=commands))


def check_size(message: Message, kind: str) -> None:
    """Raises KvferryError (`message_too_large`) for one that gRPC does not carry: sending it would end the session."""
    try:
        nbytes = message.ByteSize()
    except EncodeError:
        nbytes = MAX_MESSAGE + 1
    if nbytes > MAX_MESSAGE:
        body = getattr(message, kind, message)
        sizes = {field.name: _nbytes(value) for field, value in body.ListFields()}
        largest = max(sizes, key=lambda name: sizes[name])
        field, value = f"{kind}.{largest}", f"{sizes[largest]} bytes"
        why, remedy = f"a message may have {MAX_MESSAGE} bytes, not {nbytes}", "use larger blocks, or split the request"
        raise Malformed("message_too_large", why, field=field, value=value, remedy=remedy)


def _nbytes(value: Any) -> int:
    return value.ByteSize() if isinstance(value, Message) else len(value) if isinstance(value, bytes | str) else 8


def session_closed() -> KvferryError:
    return Unavailable("session_closed", "the session is closed", remedy="connect again")
