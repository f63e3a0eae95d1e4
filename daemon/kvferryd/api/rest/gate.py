"""The gate before every route: a request gets a name and a log line, its token and body are checked.

Plain ASGI: Starlette's BaseHTTPMiddleware hides from a long poll that its client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.asgi import replayed
from kvferry.descriptors import shortage
from kvferry.errors import Forbidden, Internal, KvferryError, Malformed, Unauthorized
from kvferryd.api.rest import page
from kvferryd.api.rest.problems import problem
from kvferryd.observe import logs
from kvferryd.observe.metrics import Metrics

log = logs.get(__name__)

MAX_BODY = 4 << 20
BODY_TIMEOUT_S = 30.0
LINGER_S = 3.0
"""How long a client that is refused may go on sending its request before its connection ends."""
OPEN = frozenset({"/healthz", "/readyz", *page.FILES})
"""Asked for without a token: probes have none, and a browser sends none for the page, which holds no data."""


class Gate:
    """Names the request (X-Request-Id, traceparent), logs it at debug, refuses what may not enter, and answers
    an unexpected exception with 500."""

    def __init__(self, app: ASGIApp, tokens: TokenFile | None, metrics: Metrics) -> None:
        self._app, self._tokens, self._metrics = app, tokens, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if logs.REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        trace = logs.TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        started, status, more = time.perf_counter(), 0, True

        async def heard() -> Message:
            nonlocal more
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def refusing(message: Message) -> None:
            """The connection ends with the answer, and not before the request has come: a client that still sends it
            would find the connection reset, and no answer."""
            if message["type"] == "http.response.body":
                await named({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while more:
                            await heard()
                message = {"type": "http.response.body", "body": b""}
            await named(message)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update({"x-request-id": name, "x-content-type-options": "nosniff"})
            await send(message)

        with logs.bound(x_request_id=name, trace_id=trace[1] if trace else ""):
            try:
                received = await self._enter(scope, headers, heard)
                await self._app(scope, received, named)
            except KvferryError as fault:
                await problem(fault, {"connection": "close"})(scope, receive, refusing)
            except ClientDisconnect:
                pass  # before its request had arrived
            except Exception as fault:
                log.exception("request failed", method=scope["method"], path=scope["path"])
                if status:
                    raise  # too late for an answer: let the server cut the connection
                failed = Internal("internal", "the daemon failed", remedy=f"its log has the reason, under {name}")
                await problem(shortage(fault) or failed)(scope, receive, named)
            finally:
                took_s = time.perf_counter() - started
                if route := getattr(scope.get("route"), "path", ""):  # the template: ids are no labels
                    waited = "?wait" if b"wait=" in scope["query_string"] else ""
                    self._metrics.rest(scope["method"], route + waited, status, took_s)
                took_ms = round(took_s * 1000, 1)
                log.debug("request", method=scope["method"], path=scope["path"], status=status, took_ms=took_ms)

    async def _enter(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Check the request; returns the `receive` of its route, whose body has been read already. Raises KvferryError.

        Before it sends JSON or a DELETE to another origin a browser asks in advance (CORS preflight), which is not
        answered here. It does send a POST without a body: so the Origin of a request that changes something must be
        our own; and no name, where neither token nor certificate is asked for: a name's owner can have it lead here.
        """
        if self._tokens is not None and scope["path"] not in OPEN:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._tokens.accepts(token.strip()):
                why, remedy = "this daemon asks for a bearer token", "send Authorization: Bearer TOKEN"
                if scheme.lower() == "bearer" and token.strip():
                    why, remedy = "the token is none of this daemon's", "send one of those in its token_file"
                raise Unauthorized("unauthorized", why, field="authorization", value=scheme, remedy=remedy)
        if scope["method"] in ("GET", "HEAD"):
            return receive
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
            why, remedy = "a page of another origin may not change anything here", "call the API from a program"
            raise Forbidden("cross_origin", why, field="origin", value=origin, remedy=remedy)
        if origin is not None and self._tokens is None and scope["scheme"] == "http" and not _own(origin):
            why, remedy = "a page may have any name lead here", "open it by the daemon's IP address, or set token_file"
            raise Forbidden("cross_origin", why, field="origin", value=origin, remedy=remedy)
        body = await _read(headers, receive)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind != "application/json":
            why, remedy = "the body is not declared as JSON", "send Content-Type: application/json"
            raise Malformed("unsupported_media_type", why, field="content-type", value=kind, remedy=remedy)
        return replayed(body, receive)


def _own(origin: str) -> bool:
    """Whether it is an address, or this machine: no name server is asked then."""
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or bool(ip_address(host))
    except ValueError:
        return False


async def _read(headers: Headers, receive: Receive) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY:
        raise _too_large(declared)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise _too_large(f"more than {MAX_BODY} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        why = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise Malformed("body_timeout", why, field="body", remedy="send it at once") from None


def _too_large(size: str) -> KvferryError:
    remedy = f"send at most {MAX_BODY} bytes"
    return Malformed("body_too_large", "the body is too large", field="content-length", value=size, remedy=remedy)


class TokenFile:
    """Bearer tokens, one a line, so that a new one can be let in before the old one goes.

    The file is looked at on every request and read when it changed. While it cannot be read every request is refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = ()
        """mtime, size and inode; None once it could not be read."""
        self._tokens: list[bytes] = []

    def accepts(self, token: str) -> bool:
        """Whether it is one of the tokens, in a time that does not depend on how much of it is right."""
        given = token.encode("utf-8", "surrogateescape")
        found = False
        for held in self._current():
            found |= hmac.compare_digest(held, given)
        return found

    def _current(self) -> list[bytes]:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen != self._seen:
                self._tokens = [line.strip() for line in self._path.read_bytes().splitlines() if line.strip()]
                self._seen = seen
        except OSError as error:
            if self._seen is not None:
                reason = error.strerror
                log.error("no token file, every request is refused", path=str(self._path), reason=reason)
            self._seen, self._tokens = None, []
        return self._tokens
