"""The bodies of POST /v1/completions: OpenAI's, with vLLM's return_token_ids and kv_transfer_params."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvferry.digest import prompt_digest
from kvferry.errors import KvferryError, Malformed
from kvferry.handoff import Handoff
from kvferry.reference.scheduler import Request
from kvferry.reference.tokenizer import Tokenizer

Token = Annotated[int, Field(ge=0, strict=True)]
Prompt = list[Token] | list[list[Token]] | str | list[str]
MAX_PROMPTS = 64
SERVED: dict[str, tuple[object, ...]] = {
    "temperature": (None, 0.0), "n": (None, 1), "best_of": (None, 1), "echo": (None, False), "suffix": (None, ""),
    "logprobs": (None,), "presence_penalty": (None, 0.0), "frequency_penalty": (None, 0.0),
}  # fmt: skip
"""Parameters of which only these values are served."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionBody(BaseModel):
    """What changes the result and is not served is refused by name; what greedy decoding has no use for is ignored."""

    model_config = ConfigDict(extra="allow")

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
        """One list of token ids per prompt. Raises KvferryError (`malformed_request`)."""
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
            origin=handoff.origin(request_id, len(prompt), lambda num_tokens: prompt_digest(prompts[0][:num_tokens])),
            hold=handoff.do_remote_decode,
            second_turn=handoff.do_remote_decode and handoff.do_remote_prefill,
        )
        for i, prompt in enumerate(prompts)
    ]


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
        cached, received = sum(each.cached for each in requests), sum(each.received for each in requests)
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokens(cached_tokens=cached, received_tokens=received),
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
