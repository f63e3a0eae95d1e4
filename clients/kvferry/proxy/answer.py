"""The client's side of a request: an answer that starts once, streams, and ends whole or visibly broken."""

from __future__ import annotations

import json
from collections.abc import Iterable

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from kvferry.asgi import openai_error
from kvferry.errors import KvferryError

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
})  # fmt: skip
"""Headers of one connection (RFC 9110, 7.6.1), never passed on."""
STATUS = {
    **dict.fromkeys(("malformed_json", "malformed_request_id"), 400),
    **dict.fromkeys(("engine_timeout", "daemon_timeout", "deadline"), 504),
    "unauthorized": 401, "prefiller_not_allowed": 403, "body_timeout": 408, "body_too_large": 413, "full": 429,
    "draining": 503,
}  # fmt: skip
"""Statuses by code; every other code means that something behind the proxy failed: 502."""


def refusal(error: KvferryError) -> Response:
    """The error as a response of its own."""
    status, headers = STATUS.get(error.code, 502), {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if (retry_after_s := getattr(error, "retry_after_s", None)) is not None:
        headers["retry-after"] = f"{retry_after_s:.0f}"
    return JSONResponse(openai_error(error, status), status, headers)


def of_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[str]:
    """The names of those that end with their connection: HOP_BY_HOP, and what its own Connection names."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection").decode("latin-1")
    return HOP_BY_HOP | {name.strip().lower() for name in named.split(",")}


def passed_on(response: httpx.Response, *, decoded: bool = False) -> list[tuple[bytes, bytes]]:
    """An engine's response headers, byte for byte, without those of its own connection or that we answer ourselves."""
    unwanted = of_connection(response.headers.raw) | {"date", "server", "content-length", "x-request-id"}
    unwanted |= {"content-encoding"} if decoded else set()
    return [(name, value) for name, value in response.headers.raw if name.decode("latin-1").lower() not in unwanted]


async def whole(response: httpx.Response) -> Response:
    """An engine's complete answer."""
    answer = Response(await response.aread(), response.status_code)
    answer.raw_headers += passed_on(response, decoded=True)
    return answer


class Answer:
    """Writes one response over ASGI. `status` is 0 until it has started, `complete` is set when it ended whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events = False
        self.status = 0
        self.complete = False
        self.nbytes = 0

    async def whole(self, answer: Response) -> None:
        await self.start(answer.status_code, answer.raw_headers)
        await self.write(bytes(answer.body))
        await self.end()

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        assert not self.status, "an answer starts once"
        self.status = status
        raw = [(name.lower(), value) for name, value in headers]
        self._events = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in raw)
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Returns when the client has taken enough of it: a slow client slows the engine's stream."""
        self.nbytes += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.complete = True

    async def fail(self, error: KvferryError) -> None:
        """The error as a response of its own, or, in a started stream, as its last event.

        A started answer is then left incomplete: the connection closes without the final chunk, so that no client
        takes the beginning of an answer for the whole.
        """
        if not self.status:
            await self.whole(refusal(error))
        elif self._events:
            await self.write(f"\n\ndata: {json.dumps(openai_error(error, STATUS.get(error.code, 502)))}\n\n".encode())
