"""The proxy as a web application: what comes in is checked here, and everything that was opened is closed here."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.asgi import client_gone
from kvferry.errors import Forbidden, KvferryError, Malformed, Unauthorized
from kvferry.proxy import fleet
from kvferry.proxy.answer import of_connection, refusal, whole
from kvferry.proxy.exchange import Asked, Daemons, Exchange, leg
from kvferry.proxy.legs import read_body
from kvferry.proxy.options import Endpoint, Options

log = logging.getLogger("kvferry.proxy")
HEALTH_TIMEOUT_S = 2.0
MODELS_TIMEOUT_S = 10.0
UNSENT_S = 30.0
"""The longest pause between two parts of a request's body."""
OURS = {
    "accept-encoding", "content-length", "content-type", "expect", "host", "x-prefiller-host-port", "x-request-id",
}  # fmt: skip
"""Request headers that the proxy answers for itself on both legs."""
NAME = re.compile(r"[\x21-\x7e]{1,256}")
ID = "kvferry.request_id"
"""In the scope of a request: the id that its answer has."""
OF_THE_CLIENTS = 128
"""Characters of a client's X-Request-Id in the id of a handover. Engines add to it, and take 200 (or 256) in all."""


class Ring:
    """Engines in turn."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = deque(endpoints)

    def turn(self) -> list[Endpoint]:
        """All of them, beginning with the next one."""
        turn = list(self._endpoints)
        self._endpoints.rotate(-1)
        return turn

    def among(self, host_ports: str) -> list[Endpoint]:
        """The endpoints that an x-prefiller-host-port header names. Raises KvferryError `prefiller_not_allowed`."""
        wanted = {name.strip().lower() for name in host_ports.split(",") if name.strip()}
        for name in wanted - {endpoint.host_port for endpoint in self._endpoints}:
            raise Forbidden(
                "prefiller_not_allowed", f"{name[:100]} is not a prefill engine of this proxy",
                field="x-prefiller-host-port", value=name, remedy="name engines given with --prefill, as host:port",
            )  # fmt: skip
        return [endpoint for endpoint in self.turn() if not wanted or endpoint.host_port in wanted]


class Proxy:
    """The state of the application: the connection pool, the rings of engines, the daemons' clients."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.prefills = Ring(options.prefill)
        self.decodes = Ring(options.decode)
        # No proxy of the environment between us and engines; every leg has its own deadline around reads and writes.
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=options.connect_timeout_s, pool=options.connect_timeout_s),
            # Below the 5 s after which uvicorn closes an idle connection: a request sent then would be lost.
            limits=httpx.Limits(
                max_connections=options.max_connections, max_keepalive_connections=256, keepalive_expiry=3.0
            ),
            headers={"accept-encoding": "identity"},
            # Keeps no cookie: an engine gives it to one client. Cookies pass as headers, both ways.
            cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),
            trust_env=False,
        )
        self.daemons = Daemons(options)

    async def relay(self, request: Request) -> Response:
        """Check a request; the returned response carries it through both legs. Raises KvferryError."""
        self.authorize(request)
        client_id, answer_id = _client_id(request), request.scope[ID]
        body = read_body(await _content(request, round(self.options.max_body_mb * 2**20)))
        prefills = self.prefills.among(",".join(request.headers.getlist("x-prefiller-host-port")))
        handover_id = _handover_id(client_id) if client_id else answer_id
        headers = self._headers(request, handover_id)
        asked = Asked(request.url.path, body, headers, answer_id, handover_id)
        return Exchange(asked, prefills, self.decodes.turn(), self.options, self.http, self.daemons)

    async def models(self, request: Request) -> Response:
        """/v1/models of the first decode engine that answers. Raises KvferryError."""
        self.authorize(request)
        headers = self._headers(request, _client_id(request) or request.scope[ID])
        for endpoint in self.decodes.turn():
            try:
                async with leg("decode", endpoint, MODELS_TIMEOUT_S):
                    return await whole(await self.http.get(f"{endpoint.url}/v1/models", headers=headers))
            except KvferryError as error:
                failed = error
        raise failed

    async def health(self) -> Response:
        """200 when a prefill and a decode engine answer their /health, or decode alone where that will do. The body has
        the state of every engine."""
        endpoints = [*self.options.prefill, *self.options.decode]
        up = await asyncio.gather(*(self._healthy(endpoint) for endpoint in endpoints))
        states = {endpoint.url: "ok" if ok else "down" for endpoint, ok in zip(endpoints, up, strict=True)}
        count = len(self.options.prefill)
        serving = (any(up[:count]) or self.options.when_no_prefill == "recompute") and any(up[count:])
        return JSONResponse({"status": "ok" if serving else "down", "engines": states}, 200 if serving else 503)

    async def _healthy(self, endpoint: Endpoint) -> bool:
        try:
            async with leg("health", endpoint, HEALTH_TIMEOUT_S):
                return (await self.http.get(f"{endpoint.url}/health")).is_success
        except KvferryError:
            return False

    def authorize(self, request: Request) -> None:
        """Raises KvferryError (`unauthorized`) where the client has not the proxy's token."""
        if not self.options.api_token:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {self.options.api_token}".encode()):
            why, remedy = "this proxy asks for a bearer token", "send Authorization: Bearer TOKEN"
            if given[:7].lower() == b"bearer ":
                why, remedy = "the token is not this proxy's", "send the one that it was started with"
            raise Unauthorized("unauthorized", why, field="Authorization", remedy=remedy)

    def _headers(self, request: Request, request_id: str) -> httpx.Headers:
        """The client's headers for the legs, byte for byte. Its Authorization stops here when it was for the proxy."""
        ours = OURS | of_connection(request.headers.raw) | ({"authorization"} if self.options.api_token else set())
        passed = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in ours]
        return httpx.Headers([*passed, (b"content-type", b"application/json"), (b"x-request-id", request_id.encode())])


def _client_id(request: Request) -> str:
    """The client's X-Request-Id; empty where it sent none."""
    request_id = request.headers.get("x-request-id")
    if request_id is not None and not NAME.fullmatch(request_id):
        raise Malformed(
            "malformed_request_id", "X-Request-Id is not a name", field="X-Request-Id", value=request_id,
            remedy="send 1 to 256 visible ASCII characters, or leave it out",
        )  # fmt: skip
    return request_id or ""


def _handover_id(client_id: str) -> str:
    """An id for both legs that no other request has: a client may send one id with several prompts."""
    return f"{client_id[:OF_THE_CLIENTS]}-{secrets.token_hex(8)}"


class Named:
    """Gives each answer of an application an X-Request-Id: the client's, or a new one where it sent no name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope[ID] = given if NAME.fullmatch(given) else secrets.token_hex(16)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", scope[ID].encode())]
            await send(message)

        await self._app(scope, receive, named)


async def _part(parts: AsyncIterator[bytes]) -> bytes | None:
    """The next part of a body; None behind the last one."""
    try:
        async with asyncio.timeout(UNSENT_S):
            return await anext(parts, None)
    except TimeoutError:
        why = f"nothing more of the body has come within {UNSENT_S:g} s"
        raise Malformed("body_timeout", why, field="body", remedy="send it at once") from None


async def _content(request: Request, limit: int) -> bytes:
    content, parts = bytearray(), aiter(request.stream())
    while (chunk := await _part(parts)) is not None:
        content += chunk
        if len(content) > limit:
            raise Malformed(
                "body_too_large", f"the body is larger than {limit} bytes", field="body", value=f"> {limit} bytes",
                remedy="shorten it, or start the proxy with a larger --max-body-mb",
            )  # fmt: skip
    return bytes(content)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvferryError)
    log.info("request %s: refused %s: %s", request.scope[ID], request.url.path, error.code)
    return refusal(error)


def build_app(options: Options) -> ASGIApp:
    """The application; its lifespan owns the connection pool."""
    proxy = Proxy(options)

    shown = fleet.Fleet(options.prefill, options.decode, proxy.daemons.clients) if options.fleet else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with proxy.http:
            yield
            if shown is not None:
                await shown.close()
            await proxy.daemons.close()

    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    app = FastAPI(title="kvferry proxy", lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(KvferryError, _refused)
    app.add_exception_handler(ClientDisconnect, client_gone)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.add_api_route(path, proxy.relay, methods=["POST"])
    app.add_api_route("/v1/models", proxy.models)
    app.add_api_route("/health", proxy.health)
    app.add_api_route("/healthz", healthz)
    if shown is not None:
        app.include_router(fleet.routes(shown, proxy.authorize))
    return Named(app)
