"""HTTP: completions, models and health."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from kvferry.asgi import disconnected, openai_error
from kvferry.errors import KvferryError, Malformed
from kvferry.reference.completions import Choice, Completion, CompletionBody, Usage, requests_of
from kvferry.reference.daemons import LoadFailed
from kvferry.reference.engine import Engine
from kvferry.reference.scheduler import Output, Request
from kvferry.reference.tokenizer import TextStream, Tokenizer

T = TypeVar("T")
CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; no client sees it."""
STATUS = {
    **dict.fromkeys(("malformed_request", "malformed_kv_transfer_params", "other_prompt"), 400),
    **dict.fromkeys(("unsupported_parameter", "prompt_too_long", "no_daemon"), 400),
    **dict.fromkeys(("worker_failed", "daemon_gone", "stopping"), 503),
    "request_exists": 409, "full": 429, "deadline": 504,
}  # fmt: skip
"""HTTP status by error code. All others are 502, and so is a failed load, unless another prompt's KV was asked for."""


def status_of(error: KvferryError) -> int:
    if isinstance(error, LoadFailed) and error.code != "other_prompt":
        return 502
    return STATUS.get(error.code, 502)


def error_answer(error: KvferryError) -> JSONResponse:
    status = status_of(error)
    return JSONResponse(openai_error(error, status), status, {"Retry-After": "1"} if status == 429 else None)


def build_app(engine: Engine, tokenizer: Tokenizer) -> FastAPI:
    app = FastAPI(title="kvferry reference engine", docs_url=None, redoc_url=None)

    @app.exception_handler(KvferryError)
    async def refused(_: HttpRequest, error: KvferryError) -> JSONResponse:
        return error_answer(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:2] if isinstance(part, str)) or "body"
        return error_answer(Malformed("malformed_request", f"{field}: {first['msg']}", field=field))

    @app.get("/health")
    async def health() -> Response:
        if engine.failed.done():
            return error_answer(engine.failed.result())
        names = {"status": "ok", "engine_id": engine.config.engine_id, "epoch": engine.epoch}
        return JSONResponse(names | engine.scheduler.occupancy())

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        name, length = engine.source.name, engine.source.config.max_positions
        return {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": length}]}

    @app.post("/v1/completions", response_model=None)
    async def completions(
        body: CompletionBody,
        http: HttpRequest,
        x_request_id: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
    ) -> Response:
        body.check()
        request_id = x_request_id or uuid.uuid4().hex
        prompts = body.token_lists(tokenizer, engine.source.config.vocab_size)
        requests = requests_of(body, prompts, request_id, engine.source.config.eos_token_ids)
        answer = Answer(engine, tokenizer, body, request_id, requests)
        if not body.stream:
            whole = await _unless_disconnected(http, answer.whole())
            return _json(whole) if whole is not None else Response(status_code=CLIENT_GONE)
        events = answer.events()
        first = await _unless_disconnected(http, _next(events))  # so that an early failure still has a status
        if first is None:
            return Response(status_code=CLIENT_GONE)
        return StreamingResponse(_sse(first, events), media_type="text/event-stream")

    return app


class Answer:
    """The requests of one HTTP request, merged into events or into one completion."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, body: CompletionBody, request_id: str, requests: list[Request]
    ) -> None:
        self._engine = engine
        self._body = body
        self._requests = requests
        self._texts = [TextStream(tokenizer, body.stops) for _ in requests]
        self._head = Completion(id=f"cmpl-{request_id}", created=int(time.time()), model=engine.source.name, choices=[])
        if body.stops:
            for request, text in zip(requests, self._texts, strict=True):
                request.stops = text.stops

    async def whole(self) -> Completion:
        choices = [Choice(index=i, text="") for i in range(len(self._requests))]
        handoff = None
        async with aclosing(self._engine.generate(self._requests)) as outputs:
            async for output in outputs:
                piece = self._piece(output)
                choices[piece.index].text += piece.text
                choices[piece.index].finish_reason = piece.finish_reason
                handoff = handoff or output.handoff
        if self._body.return_token_ids:
            for choice, request in zip(choices, self._requests, strict=True):
                choice.token_ids, choice.prompt_token_ids = request.generated, request.prompt
        usage = Usage.of(self._requests)
        return self._head.model_copy(update={"choices": choices, "usage": usage, "kv_transfer_params": handoff})

    async def events(self) -> AsyncGenerator[Completion, None]:
        """One per output; the last of a request carries its finish_reason and kv_transfer_params."""
        fresh = set(self._requests)
        async with aclosing(self._engine.generate(self._requests)) as outputs:
            async for output in outputs:
                choice = self._piece(output)
                if self._body.return_token_ids:
                    choice.token_ids = list(output.tokens)
                    choice.prompt_token_ids = output.request.prompt if output.request in fresh else None
                    fresh.discard(output.request)
                yield self._head.model_copy(update={"choices": [choice], "kv_transfer_params": output.handoff})
        if self._body.stream_options and self._body.stream_options.include_usage:
            yield self._head.model_copy(update={"usage": Usage.of(self._requests)})

    def _piece(self, output: Output) -> Choice:
        i = self._requests.index(output.request)
        text = self._texts[i].feed(output.tokens, last=output.finish_reason is not None)
        return Choice(index=i, text=text, finish_reason=output.finish_reason)


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def _next(events: AsyncGenerator[Completion, None]) -> Completion:
    return await anext(events)


async def _unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T | None:
    """The result; None, and the work cancelled, when the client goes away first."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(http.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _sse(first: Completion, events: AsyncGenerator[Completion, None]) -> AsyncIterator[str]:
    try:
        yield f"data: {first.model_dump_json()}\n\n"
        async with aclosing(events):
            async for event in events:
                yield f"data: {event.model_dump_json()}\n\n"
    except KvferryError as error:
        yield f"data: {bytes(error_answer(error).body).decode()}\n\n"
    yield "data: [DONE]\n\n"
