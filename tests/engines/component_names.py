"""Layers of one number whose caches are alike: how does kvferry's plug-in name them, in either order of vLLM's groups?

.venv-engines/bin/python tests/engines/component_names.py

vLLM makes the layers and their caches. Prints a line of JSON: for each set of layers and each order the name of every
component with the layer of vLLM's that has its memory, or the error. And why a worker does not start: its ranks have
no names (prefill context parallelism), or its cache is not always the daemon's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from descriptions import NAME, Shape, config_of
from models import as_one_of
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.errors import KvferryError
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.vllm.layers import Group, describe
from kvferry.vllm.options import Options
from kvferry.vllm.worker import WorkerSide

HEADS, NOPE, ROPE, RANK = 8, 32, 64, 512


def latent(name: str, config: VllmConfig) -> None:
    up = ColumnParallelLinear(RANK, HEADS * 2 * NOPE, bias=False, prefix=f"{name}.kv_b_proj")
    MLAAttention(HEADS, 1.0, NOPE, ROPE, NOPE, None, RANK, up, cache_config=config.cache_config, prefix=name)


def indexer(name: str, config: VllmConfig) -> None:
    DeepseekV32IndexerCache(128, torch.bfloat16, name, config.cache_config)


class Ring(DeepseekV32IndexerCache):  # type: ignore[misc]
    """A block of the newest keys for each request, as vLLM's models have that compress the keys of several tokens."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=self.head_dim, dtype=self.dtype)


def ring(name: str, config: VllmConfig) -> None:
    Ring(128, torch.bfloat16, name, config.cache_config)


Make = Callable[[str, VllmConfig], None]
LAYERS: dict[str, dict[str, Make]] = {
    "a sparse indexer": {
        "model.layers.1.self_attn.attn": latent, "model.layers.1.self_attn.indexer.k_cache": indexer,
    },
    "two attentions in a layer": {"model.layers.1.self_attn.0.attn": latent, "model.layers.1.self_attn.1.attn": latent},
    "a draft model": {"model.layers.1.self_attn.attn": latent, "draft_model.layers.1.self_attn.attn": latent},
    "nobody knows": {"model.layers.1.self_attn.attn": latent, "model.layers.1.other_attn.attn": latent},
    "a ring": {"model.layers.1.self_attn.ring": ring},
}  # fmt: skip


def named(makers: dict[str, Make], order: Sequence[str]) -> dict[str, str]:
    """The vLLM layer of each component."""
    config = config_of(Shape(1), {})
    with set_current_vllm_config(config), as_one_of(1, 1, 0, 1), set_default_torch_dtype(torch.bfloat16):
        for name in order:
            makers[name](name, config)
        layers: dict[str, Any] = config.compilation_config.static_forward_context
        groups = get_kv_cache_groups(config, {name: layers[name].get_kv_cache_spec(config) for name in order})
        pages = get_kv_cache_config_from_groups(config, groups, 2**24)
    caches = allocate_kv_cache(pages, torch.device("cpu"), KVCacheLayout.LBNHC)
    builder = ManifestBuilder("e", "1", ModelInfo(name="m", fingerprint="f"))
    places = {cache.data_ptr(): name for name, cache in caches.items()}
    memories = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches.values()}
    for number, (address, nbytes) in enumerate(memories.items()):
        builder.region(number, "host", nbytes=nbytes, address=address)
    for name, cache in caches.items():
        layers[name].bind_kv_cache(cache)
    found = [
        Group(str(at), each.kv_cache_spec, tuple(each.layer_names)) for at, each in enumerate(pages.kv_cache_groups)
    ]
    describe(builder, config, found, pages.num_blocks, caches, 0, 1)
    starts = [*memories]
    return {
        each.label: places[max(at for at in places if at <= starts[each.region] + each.offset)]
        for each in builder.build().components
    }


def outcome(makers: dict[str, Make], order: Sequence[str]) -> dict[str, str] | str:
    try:
        return named(makers, order)
    except KvferryError as error:
        return f"{error.code}: {error}"


def started(ranks: int, asked: Callable[[VllmConfig], None] = lambda config: None) -> str:
    config = config_of(Shape(1), {"prefill_context_parallel_size": ranks})
    with set_current_vllm_config(config), as_one_of(1, 1, 0, 1), set_default_torch_dtype(torch.bfloat16):
        latent(NAME, config)
        layers: dict[str, Any] = config.compilation_config.static_forward_context
        groups = get_kv_cache_groups(config, {NAME: layers[NAME].get_kv_cache_spec(config)})
        pages = get_kv_cache_config_from_groups(config, groups, 2**24)
    asked(config)
    try:
        WorkerSide(config, pages, Options())
    except KvferryError as error:
        return f"{error.code}: {error}"
    return "starts"


def main() -> None:
    told: dict[str, Any] = {
        what: [outcome(makers, order) for order in ([*makers], [*makers][::-1])] for what, makers in LAYERS.items()
    }
    told["ranks"] = started(ranks=2)
    told["sleeps"] = started(1, lambda config: setattr(config.model_config, "enable_sleep_mode", True))
    told["keeps it in the host"] = started(1, lambda config: setattr(config.attention_config, "hisparse_config", True))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
