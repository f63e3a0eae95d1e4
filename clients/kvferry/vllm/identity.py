"""The identity of KV: the model, by which two engines may exchange it, and the prompt, by which two requests may."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvferry.digest import prompt_digest
from kvferry.fingerprint import checkpoint_name, model_fingerprint
from kvferry.vllm.options import Options
from kvferry.weights import Adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


def fingerprint(config: VllmConfig, options: Options) -> str:
    """Equal for engines whose KV can be exchanged, whatever path, version, backend or parallelism they have."""
    return options.fingerprint or _named(model_fingerprint, config)


def checkpoint(config: VllmConfig) -> str:
    """The name of the checkpoint that the configuration names now: vLLM writes another one into it that it loads."""
    return _named(checkpoint_name, config)


def _named(by: Callable[..., str], config: VllmConfig) -> str:
    model, load = config.model_config, config.load_config
    return by(
        model.hf_text_config.to_dict(), str(model.dtype), model.quantization, name=model.model, revision=model.revision,
        seed=model.seed if load.load_format == "dummy" else None,
    )  # fmt: skip


adapters = Adapters()
"""The adapters of this process's engine core, which kvferry.vllm.weights watches."""


def adapter_of(lora: LoRARequest) -> tuple[tuple[str, str], str]:
    """How vLLM tells it apart, and where it is."""
    return (lora.lora_name, lora.lora_path), lora.lora_path


def digest_of(request: Request, num_tokens: int) -> bytes:
    """The digest of the request's first `num_tokens` tokens. docs/engines.md lists what it covers."""
    return prompt_digest(request._all_token_ids[:num_tokens], _extras(request, num_tokens))


def _extras(request: Request, num_tokens: int) -> Iterator[str]:
    """The extras that vLLM adds to the hashes of its blocks, without `cache_salt`, which changes no KV."""
    if request.lora_request is not None:
        yield f"lora={adapters.digest(*adapter_of(request.lora_request))}"
    for feature in request.mm_features:  # in the order of the prompt
        position = feature.mm_position
        if position.offset < num_tokens:
            yield f"feature={position.offset}+{position.length}={feature.identifier}"
    if request.prompt_embeds is not None:
        from vllm.v1.utils import tensor_data

        embeds = hashlib.sha256(tensor_data(request.prompt_embeds[:num_tokens]))
        yield f"embeds={embeds.hexdigest()}"
