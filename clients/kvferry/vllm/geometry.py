"""What one layer's cache consists of."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

from kvferry.errors import Malformed
from kvferry.vllm.parts import Part, attention_parts, recurrent_parts

CONVOLVED = {"MAMBA1": "x", "SHORT_CONV": "x", "MAMBA2": "xbc", "GDN_ATTN": "qkv"}
"""What a recurrent layer's convolution remembers, by the layer's kind."""


def parts(
    layer: Any, name: str, spec: Any, cache: torch.Tensor, num_blocks: int, dtype: torch.dtype, ranks: int, heads: int
) -> list[Part]:
    """The components of a layer. `cache`: [block, head, slot, content], of blocks or of the kernel's smaller ones.

    The backend decides what `content` is: this is found by writing to block 0, vLLM's null block, which no request ever
    gets. A cache of anything but one key and one value per head and token is one component, moved as it is.
    ranks: of tensor parallelism; heads: the model's. Raises KvferryError: `unknown_layout`; `unsupported_cache` for a
    state of another kind, or one of several tokens.
    """
    if isinstance(spec, MambaSpec) and spec.mamba_type.name in CONVOLVED and len(layer.kv_cache) <= 2:
        conv, *states = layer.kv_cache
        conv = conv if is_conv_state_dim_first() else conv.transpose(1, 2)
        shards = 1 if spec.tp_replicated else ranks
        narrow = min(shards, layer.norm.n_groups) if spec.mamba_type.name == "MAMBA2" else shards
        return recurrent_parts(conv, states, CONVOLVED[spec.mamba_type.name], shards, narrow)
    if not isinstance(spec, AttentionSpec) or spec.tokens_per_state != 1:
        remedy = "serve a model whose layers docs/vllm.md names"
        raise Malformed("unsupported_cache", f"layer {name} has a {type(spec).__name__}", value=name, remedy=remedy)
    shards = min(ranks, spec.max_tp_shards or heads)
    blocks = cache.view(num_blocks, -1, *cache.shape[1:])
    plain = cache.shape[1] == spec.num_kv_heads and cache.shape[3] == spec.head_size + spec.head_size_v
    if not plain or not spec.head_size_v or layer.get_attn_backend().forward_includes_kv_cache_update:
        return [Part("kv", blocks, ("block", "slot", "head", "slot", "content"), "head", shards)]

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    shape, sizes = (spec.block_size, spec.num_kv_heads), (spec.head_size, spec.head_size_v)
    return attention_parts(write, blocks, shape, sizes, dtype, name, shards)
