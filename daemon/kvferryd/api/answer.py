"""How a gRPC service answers an error: status, message, and a `Problem` in the trailing metadata."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvferry.descriptors import shortage
from kvferry.errors import Conflict, Internal, KvferryError, Malformed
from kvferry.rpc import PROBLEM_KEY, PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.wire import problem_to_proto
from kvferryd.observe import logs

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]

log = logs.get(__name__)
MAX_TEXT, MAX_REFUSALS = 500, 8
"""A problem travels in trailing metadata, of which gRPC takes 8 KiB in all, and percent-encoded text is up to 12 bytes
a character."""


def _admit(service: Any, request: object, context: Context) -> None:
    """Raises KvferryError where the service does not admit the caller, DecodeError for what cannot be read."""
    service.admit(context)
    if isinstance(request, DecodeError):
        raise request


async def _refuse(service: Any, context: Context, error: BaseException, method: str) -> NoReturn:
    """End the call with this error, as `told` tells it; a call that was cancelled with why the service did so."""
    if isinstance(error, asyncio.CancelledError):
        if (why := service.sent_away(context)) is None:
            raise error
        error = why
    error = told(error, method)
    problem = problem_to_proto(error)
    message = error.message if len(error.message) <= MAX_TEXT else f"{error.message[: MAX_TEXT - 3]}..."
    problem.message, problem.remedy = message, error.remedy[:MAX_TEXT]
    del problem.refusals[MAX_REFUSALS:]
    await context.abort(grpc.StatusCode[error.kind.grpc], message, ((PROBLEM_KEY, problem.SerializeToString()),))


def told(error: BaseException, call: str) -> KvferryError:
    """The KvferryError to send for any exception. Unknown ones become `internal`, and the daemon lives on;
    a lack of file handles is known wherever it comes (`out_of_descriptors`)."""
    if isinstance(error, KvferryError):
        return error
    if isinstance(error, DecodeError):
        why, remedy = f"what came is no message of {call}", "send what proto/kvferry/v1 says"
        return Malformed("malformed_message", why, remedy=remedy)
    if lacks := shortage(error):
        return lacks
    log.error("a call broke", call=call, exc_info=error)
    return Internal("internal", "the daemon failed; its log says how")


def unary(
    method: Callable[[Any, Request, Context], Awaitable[Reply]],
) -> Callable[[Any, Request, Context], Awaitable[Reply]]:
    """A unary method whose KvferryErrors reach the caller whole. Its service admits the caller first."""

    @functools.wraps(method)
    async def answer(self: Any, request: Request, context: Context) -> Reply:
        try:
            _admit(self, request, context)
            return await method(self, request, context)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  see told
            await _refuse(self, context, error, method.__name__)

    return answer


def stream(
    method: Callable[[Any, Request, Context], AsyncIterator[Reply]],
) -> Callable[[Any, Request, Context], AsyncIterator[Reply]]:
    """The same for a method that streams."""

    @functools.wraps(method)
    async def answer(self: Any, request: Request, context: Context) -> AsyncIterator[Reply]:
        replies = method(self, request, context)
        try:
            _admit(self, request, context)
            async for reply in replies:
                yield reply
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  see told
            await _refuse(self, context, error, method.__name__)
        finally:
            await replies.aclose()  # type: ignore[attr-defined]  # an async generator: its clean-up is not left to the collector

    return answer


class Undecoded(grpc.aio.ServerInterceptor):
    """Gives a method the error instead of a message that cannot be decoded, so that it is refused like any other. gRPC
    would answer UNKNOWN, with a traceback in the log for anybody who sends a few bytes."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler  # a stream raises it where it is read
        decode = handler.request_deserializer

        def decoded(said: bytes) -> Any:
            try:
                return decode(said)
            except DecodeError as error:
                return error

        return handler._replace(request_deserializer=decoded)


async def first_of(requests: AsyncIterator[Request], timeout_s: float) -> Request:
    """The first message of a stream. Raises KvferryError (`malformed_stream`) when none comes in time."""
    try:
        return await asyncio.wait_for(anext(aiter(requests)), timeout_s)
    except (TimeoutError, StopAsyncIteration):
        raise Malformed(
            "malformed_stream", f"the stream did not begin within {timeout_s:g} s",
            remedy="send the first message, which names the sender, at once",
        ) from None  # fmt: skip


def protocol(lowest: int, highest: int) -> int:
    """The highest version both sides speak. Raises KvferryError (`protocol`) naming both ranges."""
    version = min(highest, PROTOCOL_MAX)
    if version < max(lowest, PROTOCOL_MIN):
        raise Conflict(
            "protocol", f"you speak protocol {lowest} to {highest}, this daemon {PROTOCOL_MIN} to {PROTOCOL_MAX}",
            field="protocol", value=f"{lowest}-{highest}", remedy="upgrade the older side; one version apart is fine",
        )  # fmt: skip
    return version
