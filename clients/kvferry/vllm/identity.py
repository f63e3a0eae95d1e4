"""The identity of KV: the model, by which two engines may exchange it, and the prompt, by which two requests may."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvferry.digest import prompt_digest
from kvferry.fingerprint import checkpoint_name, model_fingerprint, turned
from kvferry.vllm.options import Options
from kvferry.weights import Adapters

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request


def fingerprint(config: VllmConfig, options: Options) -> str:
    """Equal for engines whose KV can be exchanged, whatever path, version, backend or parallelism they have."""
    return options.fingerprint or _named(model_fingerprint, config)


def checkpoint(config: VllmConfig) -> str:
    """The name of the checkpoint that the configuration names now: vLLM writes another one into it that it loads."""
    return _named(checkpoint_name, config)


def _named(by: Callable[..., str], config: VllmConfig) -> str:
    model, load = config.model_config, config.load_config
    text = model.hf_text_config.to_dict()
    return by(
        text | turned(text, model.max_model_len, "long") | _options(model), str(model.dtype), model.quantization,
        name=model.model, revision=model.revision, seed=model.seed if load.load_format == "dummy" else None,
        kept_in=load.download_dir,
    )  # fmt: skip


def _options(model: ModelConfig) -> dict[str, object]:
    """The fingerprint's part of options beside the configuration on which KV depends."""
    found, media = dict[str, object](), model.multimodal_config
    if model.hf_text_config.model_type == "llama4_text":  # llama4.py decides it, in a copy of the configuration
        asked = model.try_get_generation_config() | model.override_generation_config
        fitted = model.original_max_model_len == -1  # to the memory, when the model had been made
        tunes = asked.get("attn_temperature_tuning", fitted or model.max_model_len > 32768)
        found["attn_temperature_tuning"] = bool(tunes)
    if media is not None and media.mm_processor_kwargs:  # no name of an image has them, those of a request are in it
        found["media"] = media.mm_processor_kwargs
    if media is not None and media.video_pruning_rate:
        found["pruned"] = [media.video_pruning_rate, media.video_pruning_method]
    return found


adapters = Adapters()
"""The adapters of this process's engine core, which kvferry.vllm.weights watches."""


def adapter_of(lora: LoRARequest) -> tuple[tuple[str, str], str]:
    """How vLLM tells it apart, and where it is."""
    return (lora.lora_name, lora.lora_path), lora.lora_path


def names_content(config: VllmConfig) -> bool:
    """Whether vLLM names images and the like by their content. It counts them where it has no cache that would need
    this (renderers/base.py, `_process_mm_uuids`)."""
    media = getattr(config.model_config, "multimodal_config", None)
    return media is None or media.mm_processor_cache_gb > 0 or config.cache_config.enable_prefix_caching


def digest_of(request: Request, num_tokens: int, named: bool = True) -> bytes:
    """The digest of the request's first `num_tokens` tokens. named: by `names_content`. docs/engines.md lists what it
    covers."""
    return prompt_digest(request._all_token_ids[:num_tokens], _extras(request, num_tokens, named))


def _extras(request: Request, num_tokens: int, named: bool) -> Iterator[str]:
    """The extras that vLLM adds to the hashes of its blocks, without `cache_salt`, which changes no KV."""
    if request.lora_request is not None:
        yield f"lora={adapters.digest(*adapter_of(request.lora_request))}"
    for feature in request.mm_features:  # in the order of the prompt
        position = feature.mm_position
        if position.offset < num_tokens:
            name = feature.identifier if named else _content(feature)
            yield f"feature={position.offset}+{position.length}={name}"
    if request.prompt_embeds is not None:
        from vllm.v1.utils import tensor_data

        embeds = hashlib.sha256(tensor_data(request.prompt_embeds[:num_tokens]))
        yield f"embeds={embeds.hexdigest()}"


def _content(feature: MultiModalFeatureSpec) -> str:
    """A hash of what the model is given of it; equal to no other where that is not here."""
    from vllm.multimodal.hasher import MultiModalHasher

    if feature.data is None:
        return secrets.token_hex(32)
    return str(MultiModalHasher.hash_kwargs("sha256", **feature.data.get_data()))
