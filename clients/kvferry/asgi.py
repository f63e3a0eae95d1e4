"""Code that HTTP servers of engines and proxies share, and a middleware for engines that cannot refuse a request
themselves: it answers malformed kv_transfer_params with 400 before the engine sees them.

    vllm serve MODEL --middleware kvferry.asgi.CheckTransferParams ...
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Coroutine
from typing import Any, Never, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.errors import KvferryError
from kvferry.handoff import PARAMS, Handoff

T = TypeVar("T")
MARKS = (PARAMS.encode(), b"\\u", b"\0")
"""A body without any of these has no kv_transfer_params: the name as it is, an escaped letter, UTF-16 or UTF-32."""


class CheckTransferParams:
    """Checks bodies that may have kv_transfer_params; all others pass unparsed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
            if any(mark in body for mark in MARKS):
                check(body)
        except ClientDisconnect:
            return
        except KvferryError as error:
            await JSONResponse(openai_error(error, 400), 400)(scope, receive, send)
            return
        await self._app(scope, replayed(body, receive), send)


def check(body: bytes) -> None:
    """Check the kv_transfer_params in a request's body. A body that is not a JSON object passes: the engine refuses it.

    Raises KvferryError (`malformed_kv_transfer_params`).
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(asked, dict):
        return
    for holder in (asked, asked.get("vllm_xargs")):
        if isinstance(holder, dict) and holder.get(PARAMS):
            handoff = Handoff.parse(holder[PARAMS])
            if handoff.reads:
                handoff.source()


def openai_error(error: KvferryError, status: int) -> dict[str, dict[str, str | None]]:
    """The body that OpenAI's clients read; `param` names the field."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": error.code}}


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` for an application that is to read a body which was read already."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. Its body has been read: nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless(end: Coroutine[Any, Any, Never], work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when `end` comes first; raises what that raises then."""
    working, ending = asyncio.ensure_future(work), asyncio.create_task(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else ending.result()
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection; raises ClientDisconnect then."""

    async def left() -> Never:
        await disconnected(receive)
        raise ClientDisconnect

    return await unless(left(), work)


async def client_gone(request: Request, error: Exception) -> Response:
    """Handles ClientDisconnect: no client sees this answer. 499 is nginx's status for it, in logs."""
    return Response(status_code=499)
