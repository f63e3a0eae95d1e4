"""The bodies of POST /v1/completions: OpenAI's, with vLLM's return_token_ids and kv_transfer_params."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvferry.digest import prompt_digest
from kvferry.errors import KvferryError, Malformed
from kvferry.handoff import Handoff
from kvferry.reference.request import Request
from kvferry.reference.tokenizer import Tokenizer

Token = Annotated[int, Field(ge=0, strict=True)]
Prompt = list[Token] | list[list[Token]] | str | list[str]
MAX_PROMPTS = 64


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionBody(BaseModel):
    """What changes the result and is not served is refused by name; what greedy decoding has no use for is ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    temperature: float | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises KvferryError (`unsupported_parameter`) for what is not served."""
        served: dict[str, tuple[object, ...]] = {
            "temperature": (None, 0.0), "n": (None, 1), "best_of": (None, 1), "echo": (None, False),
            "suffix": (None, ""), "logprobs": (None,), "presence_penalty": (None, 0.0),
            "frequency_penalty": (None, 0.0),
        }  # fmt: skip
        for name, values in served.items():
            if (value := getattr(self, name)) not in values:
                raise Malformed(
                    "unsupported_parameter", f"{name} = {value} is not supported: the engine decodes greedily",
                    field=name, value=value, remedy=f"leave {name} out or send {values[-1]}",
                )  # fmt: skip

    @property
    def stops(self) -> tuple[str, ...]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    def token_lists(self, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
        """One list of token ids per prompt. Raises KvferryError (`malformed_request`)."""
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        flat = [token for token in texts if isinstance(token, int)]
        nested = [
            tokenizer.encode(text) if isinstance(text, str) else text for text in texts if not isinstance(text, int)
        ]
        lists = [flat] if flat else nested
        if not 1 <= len(lists) <= MAX_PROMPTS or not all(lists):
            raise _malformed("prompt", len(lists), f"one to {MAX_PROMPTS} prompts, none of them empty")
        for tokens in lists:
            if (highest := max(tokens)) >= vocab_size:
                raise _malformed("prompt", highest, f"token ids below the vocabulary's size, {vocab_size}")
        return lists


def requests_of(body: CompletionBody, prompts: list[list[int]], request_id: str, eos: tuple[int, ...]) -> list[Request]:
    """One engine request per prompt. Raises KvferryError for kv_transfer_params that are malformed."""
    handoff = Handoff.parse(body.kv_transfer_params) if body.kv_transfer_params is not None else Handoff()
    if len(prompts) > 1 and (handoff.do_remote_prefill or handoff.do_remote_decode):
        raise _malformed("prompt", len(prompts), "a single prompt with kv_transfer_params")
    return [
        Request(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
            prompt=prompt,
            max_tokens=body.max_tokens or body.max_completion_tokens or 16,
            min_tokens=body.min_tokens,
            stop_token_ids=frozenset() if body.ignore_eos else frozenset(eos),
            origin=handoff.origin(request_id, len(prompt), partial(_digest_of, prompt)),
            hold=handoff.do_remote_decode,
            second_turn=handoff.do_remote_decode and handoff.do_remote_prefill,
        )
        for i, prompt in enumerate(prompts)
    ]


def _digest_of(prompt: list[int], num_tokens: int) -> bytes:
    return prompt_digest(prompt[:num_tokens])


class Choice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class PromptTokens(BaseModel):
    """cached_tokens: held by the prefix cache. received_tokens: read from another engine."""

    cached_tokens: int = 0
    received_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens

    @classmethod
    def of(cls, requests: list[Request]) -> Usage:
        prompt = sum(len(request.prompt) for request in requests)
        completion = sum(len(request.generated) for request in requests)
        details = PromptTokens(
            cached_tokens=sum(request.cached for request in requests),
            received_tokens=sum(request.received for request in requests),
        )
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details=details,
        )  # fmt: skip


class Completion(BaseModel):
    """An answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    kv_transfer_params: Handoff | None = None


def _malformed(field: str, value: object, wanted: str) -> KvferryError:
    return Malformed("malformed_request", f"{field}: expected {wanted}", field=field, value=value)
