"""A stand-in for somebody else's engine: an OpenAI-compatible HTTP server that does as a test tells it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp

STREAM = (
    b'data: {"choices": [{"text": "\xc3\xa4", "token_ids": [7]}]}\n\n',
    b": a comment, and an event cut in two\n\ndata: {",
    b'"choices": [{"text": "b"}],   "odd":   "spacing"}\n\n',
    b"data: [DONE]\n\n",
)


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    raw_headers: list[tuple[bytes, bytes]]
    body: dict[str, Any]
    nbytes: int = 0


@dataclass
class ForeignEngine:
    """params: what a prefill leg is answered with. answer: its whole answer as JSON text, instead. statuses: taken one
    per request, then 200. cookie: set with every answer.

    hold: requests wait for it before their first byte. pause: streams wait for it after theirs. filling: what they send
    meanwhile. breaks: streams stop there without their end. raw_headers: with every answer. left: set when a client
    closed its connection early.
    """

    params: object = field(default_factory=lambda: {"remote_request_id": "lease-1", "remote_num_tokens": 9})
    answer: str = ""
    cookie: str = ""
    statuses: list[int] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)
    pause: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    breaks: bool = False
    filling: bytes = b": still here\n\n"
    raw_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.hold.set()
        self.pause.set()

    @property
    def host_port(self) -> str:
        return self.url.removeprefix("http://")

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response()

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            self.seen.append(Seen(request.url.path, dict(request.headers), request.headers.raw, {}))
            headers = {"x-engine": self.url, **self._cookie()}
            answer = JSONResponse({"object": "list", "data": [{"id": "m"}]}, headers=headers)
            answer.raw_headers += self.raw_headers
            return answer

        @app.post("/v1/{rest:path}")
        async def generate(request: Request) -> Response:
            answer = await self._generate(request)
            answer.headers.update(self._cookie())
            answer.raw_headers += self.raw_headers
            return answer

        return app

    def _cookie(self) -> dict[str, str]:
        return {"set-cookie": self.cookie} if self.cookie else {}

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        nbytes = len(await request.body())
        self.seen.append(Seen(request.url.path, dict(request.headers), request.headers.raw, body, nbytes))
        self.arrived.set()
        while not await asyncio.to_thread(self.hold.wait, 0.02):
            if await request.is_disconnected():
                self.left.set()
                return Response(status_code=499)
        status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            return JSONResponse({"error": {"message": f"no: {status}"}}, status, headers={"x-engine": self.url})
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            if self.answer:
                return Response(self.answer, media_type="application/json")
            return JSONResponse({"choices": [{"text": "a"}], "kv_transfer_params": self.params})
        if body.get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        return Response(b'{"choices": [{"text":   "abc"}]}', media_type="application/json")

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            yield STREAM[0]
            while not await asyncio.to_thread(self.pause.wait, 0.02):
                yield self.filling
            if self.breaks:
                raise ConnectionAbortedError("the engine died")
            for chunk in STREAM[1:]:
                yield chunk
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise


@contextmanager
def served(app: ASGIApp, host: str = "127.0.0.1", **options: Any) -> Iterator[str]:
    """Serve an application on a free port of this machine, in a thread; yields its URL. options: of uvicorn."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        ours = {"log_level": "critical", "lifespan": "on", "timeout_graceful_shutdown": 5}
        config = uvicorn.Config(app, **(ours | options))
        server = uvicorn.Server(config)
        started = threading.Event()
        startup = server.startup

        async def announce(sockets: list[socket.socket] | None = None) -> None:
            await startup(sockets)
            started.set()

        server.startup = announce  # type: ignore[method-assign]  # an event instead of polling server.started
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert started.wait(60), "the server did not start"
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


@contextmanager
def engine(**told: Any) -> Iterator[ForeignEngine]:
    foreign = ForeignEngine(**told)
    with served(foreign.app()) as url:
        foreign.url = url
        yield foreign


def leaves(url: str, when: Callable[[], bool], **asked: Any) -> None:
    """A client that closes its connection once `when` has become true, with its answer still to come. asked: for
    httpx's `post`."""

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=None) as http:
            asking = asyncio.create_task(http.post(url, **asked))
            became = await asyncio.to_thread(when)
            assert became and not asking.done()
            asking.cancel()
            await asyncio.wait([asking])

    asyncio.run(ask())


def events(content: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream."""
    lines = content.decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
