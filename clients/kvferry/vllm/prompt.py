"""What the KV of a vLLM request depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvferry.digest import prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request


def digest_of(request: Request, num_tokens: int) -> bytes:
    """The digest of the request's first `num_tokens` tokens. docs/engines.md lists what it covers."""
    return prompt_digest(request._all_token_ids[:num_tokens], _extras(request, num_tokens))


def _extras(request: Request, num_tokens: int) -> Iterator[str]:
    """What vLLM adds to the hashes of its blocks, without `cache_salt`, which changes no KV."""
    if request.lora_request is not None:
        yield f"lora={request.lora_request.lora_name}"
    for feature in request.mm_features:  # in the order of the prompt
        position = feature.mm_position
        if position.offset < num_tokens:
            yield f"feature={position.offset}+{position.length}={feature.identifier}"
    if request.prompt_embeds is not None:
        from vllm.v1.utils import tensor_data

        embeds = hashlib.sha256(tensor_data(request.prompt_embeds[:num_tokens]))
        yield f"embeds={embeds.hexdigest()}"
