"""What every request passes before a route sees it: a name and a log line, a token, a bounded body.

Plain ASGI: Starlette's BaseHTTPMiddleware hides from a long poll that its client has left.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.errors import Forbidden, Full, Internal, KvferryError, Malformed, Unauthorized
from kvferryd import logs
from kvferryd.api.rest.problems import problem
from kvferryd.api.rest.tokens import TokenFile

log = logs.get(__name__)

MAX_BODY = 4 << 20
BODY_TIMEOUT_S = 30.0
MAX_IN_FLIGHT = 2048
"""Requests at once, long polls included."""
OPEN = frozenset({"/healthz", "/readyz", "/"})
"""Asked for without a token: probes have none, and a browser sends none for the page, which holds no data."""
TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Observed:
    """Names the request (X-Request-Id, traceparent), logs it at debug, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        trace = TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        started, status = time.perf_counter(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        self._in_flight += 1
        with logs.bound(x_request_id=name, trace_id=trace[1] if trace else ""):
            try:
                if self._in_flight > MAX_IN_FLIGHT:
                    full = Full("full", f"{MAX_IN_FLIGHT} requests are being answered", remedy="ask again later")
                    return await problem(full)(scope, receive, named)
                await self._app(scope, receive, named)
            except Exception:
                log.exception("request failed", method=scope["method"], path=scope["path"])
                if status:
                    raise  # too late for an answer: let the server cut the connection
                unexpected = Internal("internal", "the daemon failed", remedy=f"its log has the reason, under {name}")
                await problem(unexpected)(scope, receive, named)
            finally:
                self._in_flight -= 1
                took_ms = round((time.perf_counter() - started) * 1000, 1)
                log.debug("request", method=scope["method"], path=scope["path"], status=status, took_ms=took_ms)


class Authenticated:
    """Lets a request in that carries a token."""

    def __init__(self, app: ASGIApp, tokens: TokenFile) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._tokens.accepts(token.strip()):
                fault = Unauthorized(
                    "unauthorized", "this daemon asks for a bearer token",
                    field="authorization", value=scheme, remedy="send Authorization: Bearer TOKEN",
                )  # fmt: skip
                return await problem(fault)(scope, receive, send)
        return await self._app(scope, receive, send)


class BoundedBody:
    """Reads a body of at most MAX_BODY bytes, JSON by its type, before the route runs.

    Before it sends JSON or a DELETE to another origin a browser asks in advance (CORS preflight), which is not answered
    here. It does send a POST without a body: so the Origin of a request that changes something must be our own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            _same_origin(headers)
            body = await _read(headers, receive)
            _json_by_type(headers, body)
        except _BodyRefused as fault:
            return await problem(fault, fault.status, {"connection": "close"})(scope, receive, send)
        except KvferryError as fault:
            # The rest of a body that is too large is never read: the connection ends with the answer.
            return await problem(fault, headers={"connection": "close"})(scope, receive, send)
        except _Left:
            return None
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return given.pop() if given else await receive()

        return await self._app(scope, replayed, send)


class _Left(Exception):
    pass


class _BodyRefused(Malformed):
    """HTTP has a status of its own for it."""

    def __init__(
        self, status: HTTPStatus, code: str, message: str, *, field: str, value: str = "", remedy: str
    ) -> None:
        super().__init__(code, message, field=field, value=value, remedy=remedy)
        self.status = status


async def _read(headers: Headers, receive: Receive) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY:
        raise _too_large(declared)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Left
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY:
                    raise _too_large(f"more than {MAX_BODY} bytes")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise _BodyRefused(
            HTTPStatus.REQUEST_TIMEOUT,
            "body_timeout",
            f"the body did not arrive within {BODY_TIMEOUT_S:g} s",
            field="body",
            remedy="send it at once",
        ) from None


def _too_large(size: str) -> KvferryError:
    return _BodyRefused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body_too_large",
        "the body is too large",
        field="content-length",
        value=size,
        remedy=f"send at most {MAX_BODY} bytes",
    )


def _json_by_type(headers: Headers, body: bytes) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise _BodyRefused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            "the body is not declared as JSON",
            field="content-type",
            value=kind,
            remedy="send Content-Type: application/json",
        )


def _same_origin(headers: Headers) -> None:
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
        raise Forbidden(
            "cross_origin", "a page of another origin may not change anything here", field="origin", value=origin,
            remedy="call the API from a program",
        )  # fmt: skip
