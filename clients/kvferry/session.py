"""An engine rank's session with its daemon: one stream of commands and events, and the calls beside it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from kvferry.errors import KvferryError
from kvferry.handover import fetch, hand_over
from kvferry.rpc import MESSAGE_OPTIONS, error_of
from kvferry.v1 import engine_pb2, engine_pb2_grpc
from kvferry.wire import problem_from_proto

Q = TypeVar("Q")
T = TypeVar("T")


class Session:
    """`attach` begins it. It is over when the stream has ended, from either side; `close` it, whatever came of it."""

    def __init__(
        self, socket: str, hear: Callable[[engine_pb2.Event], None], on_end: Callable[[KvferryError], None]
    ) -> None:
        """hear: called with every event but answers. on_end: once it is over, with what calls raise from then on."""
        self._socket, self._hear, self._on_end = socket, hear, on_end
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=MESSAGE_OPTIONS)
        self.stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(self._channel)
        self.id = ""
        """What calls beside the stream name it by."""
        self.closed = asyncio.Event()
        self._commands: asyncio.Queue[engine_pb2.Command | None] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[engine_pb2.Answer]] = {}
        self._numbers = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None
        self._closing = False
        self._over: KvferryError | None = None
        """Why there is no session any more."""

    async def attach(self, attach: engine_pb2.AttachRequest) -> engine_pb2.Attached:
        """Waits for the daemon to come up; the caller bounds the wait. Raises KvferryError with what it refuses."""
        self._commands.put_nowait(engine_pb2.Command(attach=attach))
        stream = aiter(self.stub.Attach(self._to_say(), wait_for_ready=True))
        try:
            attached = (await anext(stream)).attached
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"the daemon on {self._socket}") from None
        except StopAsyncIteration:
            raise KvferryError("unreachable", f"the daemon on {self._socket} closed the session") from None
        self.id = attached.session
        self._reader = asyncio.create_task(self._read(stream), name="kvferry-events")
        return attached

    async def call(self, method: Callable[[Q], Awaitable[T]], request: Q) -> T:
        """A call beside the stream. Raises KvferryError."""
        if self._over is not None:
            raise self._over
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            raise _closed() if self._closing else error_of(error, f"the daemon on {self._socket}") from None
        except grpc.aio.UsageError:  # what a call on a closed channel raises
            raise _closed() from None
        except asyncio.CancelledError:  # of this task, or of a call whose channel is closed under it
            task = asyncio.current_task()
            if not self._closing or (task is not None and task.cancelling()):
                raise
            raise _closed() from None

    async def command(self, **command: Message) -> engine_pb2.Answer:
        """`say` it and wait for its `answer`."""
        return await self.answer(self.say(**command))

    def say(self, **command: Message) -> asyncio.Future[engine_pb2.Answer]:
        """Put a command on the stream; the future is its answer. Raises KvferryError when there is no session."""
        if self._over is not None:
            raise self._over
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._commands.put_nowait(engine_pb2.Command(id=number, **command))  # type: ignore[arg-type]
        return answer

    async def answer(self, answering: asyncio.Future[engine_pb2.Answer]) -> engine_pb2.Answer:
        """Raises KvferryError with what the daemon says is wrong. The command stands even if this is cancelled."""
        answer = await asyncio.shield(answering)
        if answer.HasField("problem"):
            raise problem_from_proto(answer.problem)
        return answer

    async def hand_over(self, files: Sequence[int]) -> str:
        """As `kvferry.handover.hand_over`, on a thread, with descriptors of its own: a caller that is cancelled may
        close the files at once."""
        copies = [os.dup(file) for file in files]

        def handed() -> str:
            try:
                return hand_over(self._socket, self.id, copies)
            finally:
                for copy in copies:
                    os.close(copy)

        return await asyncio.shield(asyncio.create_task(asyncio.to_thread(handed)))

    async def fetch(self, ticket: str) -> int:
        """As `kvferry.handover.fetch`, on a thread."""
        fetching = asyncio.create_task(asyncio.to_thread(fetch, self._socket, self.id, ticket))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            fetching.add_done_callback(_close_unwanted)
            raise

    async def close(self) -> None:
        """What still waits, and every call from now on, raises KvferryError (`session_closed`)."""
        self._closing = True
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        await self._channel.close()
        self._end(_closed())

    async def _to_say(self) -> AsyncIterator[engine_pb2.Command]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self, events: AsyncIterator[engine_pb2.Event]) -> None:
        why = KvferryError(
            "daemon_gone",
            f"the daemon on {self._socket} ended the session",
            field="socket",
            value=self._socket,
            remedy="connect again; what was in flight has not arrived",
        )
        try:
            async for event in events:
                if event.HasField("answer"):
                    answering = self._answers.pop(event.answer.id, None)
                    if answering is not None:
                        answering.set_result(event.answer)
                else:
                    self._hear(event)
        except grpc.aio.AioRpcError as error:
            why = error_of(error, f"the daemon on {self._socket}", ended=why)
        finally:
            self._end(_closed() if self._closing else why)

    def _end(self, why: KvferryError) -> None:
        self._over = why
        self.closed.set()
        self._on_end(why)
        for answering in self._answers.values():
            refuse(answering, why)
        self._answers.clear()
        self._commands.put_nowait(None)


def _close_unwanted(fetched: asyncio.Task[int]) -> None:
    if fetched.exception() is None:
        os.close(fetched.result())


def refuse(waiting: asyncio.Future[T], why: KvferryError) -> None:
    """Whoever waits for it raises this; nobody may be waiting."""
    if not waiting.done():
        waiting.set_exception(why)
        waiting.exception()  # retrieved


def _closed() -> KvferryError:
    return KvferryError("session_closed", "the session is closed", remedy="connect again")
