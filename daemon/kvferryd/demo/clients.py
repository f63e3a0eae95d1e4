"""The demo's client: streamed completions over the OpenAI API, as token ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvferry.errors import Internal, KvferryError
from kvferryd.demo.prompts import Prompt

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Completed:
    """tokens: generated. held: prompt tokens that the engine's prefix cache had. received: those that were moved.

    transfer: the request id of the transfer, as the proxy tells it; empty from an engine alone.
    """

    prompt: Prompt
    transfer: str
    tokens: tuple[int, ...]
    held: int
    received: int


async def complete_all(url: str, prompts: Sequence[Prompt]) -> list[Completed]:
    """All at once, in the order of `prompts`. Raises KvferryError for the first that fails."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as http:
        asking = [asyncio.create_task(_complete(http, prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def _complete(http: httpx.AsyncClient, prompt: Prompt) -> Completed:
    body = {
        "prompt": list(prompt.tokens), "max_tokens": prompt.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            response = await http.post("/v1/completions", json=body, headers={"X-Request-Id": prompt.request_id})
    except (httpx.HTTPError, TimeoutError) as error:
        raise _failed(prompt, str(error) or type(error).__name__) from error
    if response.status_code != 200:
        raise _failed(prompt, f"{response.status_code} {response.text[:500]}")
    tokens: list[int] = []
    held = received = 0
    for event in _events(response.text):
        if "error" in event:
            raise _failed(prompt, str(event["error"]))
        tokens += (token for choice in event["choices"] for token in choice["token_ids"])
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        held, received = details.get("cached_tokens", held), details.get("received_tokens", received)
    return Completed(prompt, response.headers.get("x-kvferry-request-id", ""), tuple(tokens), held, received)


def _events(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _failed(prompt: Prompt, why: str) -> KvferryError:
    return Internal("request_failed", f"{prompt.request_id} ({len(prompt.tokens)} tokens) failed: {why}")
