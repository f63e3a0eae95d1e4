"""HTTP: completions as OpenAI has them, with vLLM's return_token_ids and kv_transfer_params; models and health."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvferry.asgi import client_gone, openai_error, while_connected
from kvferry.digest import prompt_digest
from kvferry.errors import KvferryError, Malformed
from kvferry.handoff import Handoff
from kvferry.reference.daemons import LoadFailed
from kvferry.reference.engine import Engine
from kvferry.reference.scheduler import Output, Request
from kvferry.reference.tokenizer import TextStream, Tokenizer

Token = Annotated[int, Field(ge=0, strict=True)]
Prompt = list[Token] | list[list[Token]] | str | list[str]
MAX_PROMPTS = 64
SERVED: dict[str, tuple[object, ...]] = {
    "temperature": (None, 0.0), "n": (None, 1), "best_of": (None, 1), "echo": (None, False), "suffix": (None, ""),
    "logprobs": (None,), "presence_penalty": (None, 0.0), "frequency_penalty": (None, 0.0),
}  # fmt: skip
"""Parameters of which only these values are served."""
STATUS = {
    **dict.fromkeys(("malformed_request", "malformed_kv_transfer_params", "other_prompt"), 400),
    **dict.fromkeys(("unsupported_parameter", "prompt_too_long", "no_daemon"), 400),
    **dict.fromkeys(("worker_failed", "daemon_gone", "stopping"), 503),
    "request_exists": 409, "full": 429, "deadline": 504,
}  # fmt: skip
"""HTTP status by error code. All others are 502, and so is a failed load, unless another prompt's KV was asked for."""


def error_answer(error: KvferryError) -> JSONResponse:
    unloaded = isinstance(error, LoadFailed) and error.code != "other_prompt"
    status = 502 if unloaded else STATUS.get(error.code, 502)
    return JSONResponse(openai_error(error, status), status, {"Retry-After": "1"} if status == 429 else None)


class CompletionBody(BaseModel):
    """Fields that change the result and are not served are refused by name; those that greedy decoding has no use for
    are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises KvferryError (`unsupported_parameter`) for what is not served."""
        for name, value in (self.model_extra or {}).items():
            if value not in (served := SERVED.get(name, (value,))):
                raise Malformed(
                    "unsupported_parameter", f"{name} = {value} is not supported: the engine decodes greedily",
                    field=name, value=value, remedy=f"leave {name} out or send {served[-1]}",
                )  # fmt: skip

    @property
    def stops(self) -> tuple[str, ...]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    def token_lists(self, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
        """A list of token ids per prompt. Raises KvferryError (`malformed_request`)."""
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts: list[Any] = [self.prompt] if one else list(self.prompt)
        lists = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        if not 1 <= len(lists) <= MAX_PROMPTS or not all(lists):
            raise _malformed("prompt", len(lists), f"one to {MAX_PROMPTS} prompts, none of them empty")
        for tokens in lists:
            if (highest := max(tokens)) >= vocab_size:
                raise _malformed("prompt", highest, f"token ids below the vocabulary's size, {vocab_size}")
        return lists


def requests_of(body: CompletionBody, prompts: list[list[int]], request_id: str, eos: tuple[int, ...]) -> list[Request]:
    """An engine request per prompt. kv_transfer_params are those of the first: the others are computed here.

    Raises KvferryError for kv_transfer_params that are malformed.
    """
    asked = Handoff.parse(body.kv_transfer_params) if body.kv_transfer_params is not None else Handoff()
    return [
        Request(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
            prompt=prompt,
            max_tokens=body.max_tokens or body.max_completion_tokens or 16,
            min_tokens=body.min_tokens,
            stop_token_ids=frozenset() if body.ignore_eos else frozenset(eos),
            origin=handoff.origin(request_id, len(prompt), lambda num_tokens: prompt_digest(prompts[0][:num_tokens])),
            hold=handoff.do_remote_decode,
            second_turn=handoff.do_remote_decode and handoff.do_remote_prefill,
        )
        for i, prompt in enumerate(prompts)
        for handoff in (asked if i == 0 else Handoff(),)
    ]


class Choice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """An answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: dict[str, Any] | None = None
    kv_transfer_params: Handoff | None = None


def usage_of(requests: list[Request]) -> dict[str, Any]:
    """cached_tokens: held by the prefix cache. received_tokens: read from another engine."""
    prompt = sum(len(request.prompt) for request in requests)
    completion = sum(len(request.generated) for request in requests)
    cached, received = sum(each.cached for each in requests), sum(each.received for each in requests)
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "received_tokens": received},
    }  # fmt: skip


def _malformed(field: str, value: object, wanted: str) -> KvferryError:
    return Malformed("malformed_request", f"{field}: expected {wanted}", field=field, value=value)


def build_app(engine: Engine, tokenizer: Tokenizer) -> FastAPI:
    app = FastAPI(title="kvferry reference engine", docs_url=None, redoc_url=None)
    app.add_exception_handler(ClientDisconnect, client_gone)

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
    ) -> Response | Completion:
        body.check()
        request_id = x_request_id or uuid.uuid4().hex
        prompts = body.token_lists(tokenizer, engine.source.config.vocab_size)
        requests = requests_of(body, prompts, request_id, engine.source.config.eos_token_ids)
        answer = Answer(engine, tokenizer, body, request_id, requests)
        if not body.stream:
            return await while_connected(http.receive, answer.whole())
        events = answer.events()
        first = await while_connected(http.receive, anext(events))  # so that an early failure still has a status
        return _Stream(first, events)

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
        usage = usage_of(self._requests)
        return self._head.model_copy(update={"choices": choices, "usage": usage, "kv_transfer_params": handoff})

    async def events(self) -> AsyncGenerator[Completion, None]:
        """An event per output; the last of a request carries its finish_reason and kv_transfer_params."""
        fresh = set(self._requests)
        async with aclosing(self._engine.generate(self._requests)) as outputs:
            async for output in outputs:
                choice = self._piece(output)
                if self._body.return_token_ids:
                    choice.token_ids = list(output.tokens)
                    choice.prompt_token_ids = output.request.prompt if output.request in fresh else None
                    fresh.discard(output.request)
                yield self._head.model_copy(update={"choices": [choice], "kv_transfer_params": output.handoff})
        if (self._body.stream_options or {}).get("include_usage"):
            yield self._head.model_copy(update={"usage": usage_of(self._requests)})

    def _piece(self, output: Output) -> Choice:
        i = self._requests.index(output.request)
        text = self._texts[i].feed(output.tokens, last=output.finish_reason is not None)
        return Choice(index=i, text=text, finish_reason=output.finish_reason)


class _Stream(StreamingResponse):
    """Closes its events whatever becomes of the client: one that is only dropped lives until it is collected."""

    def __init__(self, first: Completion, events: AsyncGenerator[Completion, None]) -> None:
        super().__init__(_lines(first, events), media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _lines(first: Completion, events: AsyncGenerator[Completion, None]) -> AsyncIterator[str]:
    try:
        yield f"data: {first.model_dump_json()}\n\n"
        async for event in events:
            yield f"data: {event.model_dump_json()}\n\n"
    except KvferryError as error:
        yield f"data: {bytes(error_answer(error).body).decode()}\n\n"
    yield "data: [DONE]\n\n"
