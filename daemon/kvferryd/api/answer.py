"""How a gRPC service answers an error: status, message, and a `Problem` in the trailing metadata."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import grpc

from kvferry.errors import Conflict, Internal, KvferryError, Malformed
from kvferry.rpc import PROBLEM_KEY, PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.wire import problem_to_proto
from kvferryd import logs

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]

log = logs.get(__name__)
MAX_TEXT, MAX_REFUSALS = 500, 8
"""A problem travels in trailing metadata, of which gRPC takes 8 KiB in all, and percent-encoded text is up to 12 bytes
a character."""


async def _refuse(context: Context, error: KvferryError) -> NoReturn:
    status = grpc.StatusCode[error.kind.grpc]
    message = error.message if len(error.message) <= MAX_TEXT else f"{error.message[: MAX_TEXT - 3]}..."
    problem = problem_to_proto(error)
    problem.message, problem.remedy = message, error.remedy[:MAX_TEXT]
    del problem.refusals[MAX_REFUSALS:]
    await context.abort(status, message, ((PROBLEM_KEY, problem.SerializeToString()),))


async def _broke(context: Context, method: str) -> NoReturn:
    log.exception("a call broke", method=method)
    await _refuse(context, broken())


def broken() -> KvferryError:
    return Internal("internal", "the daemon failed; its log says how")


def _admit(service: object, context: Context) -> None:
    """Ask the service whether it speaks to this caller at all, if it cares."""
    admit = getattr(service, "admit", None)
    if admit is not None:
        admit(context)


def unary(
    method: Callable[[Any, Request, Context], Awaitable[Reply]],
) -> Callable[[Any, Request, Context], Awaitable[Reply]]:
    """A unary method whose KvferryErrors reach the caller whole."""

    @functools.wraps(method)
    async def answer(self: Any, request: Request, context: Context) -> Reply:
        try:
            _admit(self, context)
            return await method(self, request, context)
        except KvferryError as error:
            await _refuse(context, error)
        except Exception:  # noqa: BLE001  whatever it was, the daemon lives on
            await _broke(context, method.__name__)

    return answer


def stream(
    method: Callable[[Any, Request, Context], AsyncIterator[Reply]],
) -> Callable[[Any, Request, Context], AsyncIterator[Reply]]:
    """The same for a method that streams."""

    @functools.wraps(method)
    async def answer(self: Any, request: Request, context: Context) -> AsyncIterator[Reply]:
        replies = method(self, request, context)
        try:
            _admit(self, context)
            async for reply in replies:
                yield reply
        except KvferryError as error:
            await _refuse(context, error)
        except Exception:  # noqa: BLE001  whatever it was, the daemon lives on
            await _broke(context, method.__name__)
        finally:
            await replies.aclose()  # type: ignore[attr-defined]  # an async generator: its clean-up is not left to the collector

    return answer


async def first_of(requests: AsyncIterator[Request], timeout_s: float) -> Request:
    """What a stream begins with. Raises KvferryError (`malformed_stream`) when nothing comes."""
    try:
        return await asyncio.wait_for(anext(aiter(requests)), timeout_s)
    except (TimeoutError, StopAsyncIteration):
        raise Malformed(
            "malformed_stream",
            f"the stream did not begin within {timeout_s:g} s",
            remedy="send the first message, which names the sender, at once",
        ) from None


async def said_beside(said: asyncio.Queue[Reply | None], work: Coroutine[None, None, None]) -> AsyncIterator[Reply]:
    """What is put into the queue while `work` runs, until that ends or None is put. Raises what `work` raises."""
    working = asyncio.create_task(work)
    working.add_done_callback(lambda _: said.put_nowait(None))
    try:
        while (reply := await said.get()) is not None:
            yield reply
        if working.done():
            working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def protocol(lowest: int, highest: int) -> int:
    """The highest version both sides speak. Raises KvferryError (`protocol`) naming both ranges."""
    version = min(highest, PROTOCOL_MAX)
    if version < max(lowest, PROTOCOL_MIN):
        raise Conflict(
            "protocol",
            f"you speak protocol {lowest} to {highest}, this daemon {PROTOCOL_MIN} to {PROTOCOL_MAX}",
            field="protocol",
            value=f"{lowest}-{highest}",
            remedy="upgrade the older side; one version apart is fine",
        )
    return version
