"""What the HTTP servers of engines and proxies share, and a middleware for engines that cannot refuse a request
themselves: it answers malformed kv_transfer_params with 400 before the engine sees them.

    vllm serve MODEL --middleware kvferry.asgi.CheckTransferParams ...
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from kvferry.errors import KvferryError
from kvferry.handoff import PARAMS, Handoff, check_one_prompt

MARKS = (PARAMS.encode(), b"\\u", b"\0")
"""A body without any of these has no kv_transfer_params: the name as it is, an escaped letter, UTF-16 or UTF-32."""
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class CheckTransferParams:
    """Checks bodies that may have kv_transfer_params; all others pass unparsed."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            if any(mark in body for mark in MARKS):
                check(bytes(body))
        except KvferryError as error:
            await _refuse(send, error)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, again, send)


def check(body: bytes) -> None:
    """Leaves what is no JSON object to the engine.

    Raises KvferryError: `malformed_kv_transfer_params`, `batch_of_prompts`.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(asked, dict):
        return
    for holder in (asked, asked.get("vllm_xargs")):
        if isinstance(holder, dict) and holder.get(PARAMS):
            check_one_prompt(asked.get("prompt"))
            handoff = Handoff.parse(holder[PARAMS])
            if handoff.reads:
                handoff.source()


async def _refuse(send: Send, error: KvferryError) -> None:
    content = json.dumps(openai_error(error, 400)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def openai_error(error: KvferryError, status: int) -> dict[str, dict[str, str | None]]:
    """The body that OpenAI's clients read; `param` names the field."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": error.code}}


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. Its body has been read: nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
