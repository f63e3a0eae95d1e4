"""The cache of one rank: what lies where in vLLM's tensors, layer by layer, as the daemon is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_sliding_window,
)

from kvferry.errors import Malformed
from kvferry.manifest import ManifestBuilder, TokenShard
from kvferry.parts import Describing, Part, attention_parts, recurrent_parts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

CONVOLVED = {"MAMBA1": "x", "SHORT_CONV": "x", "MAMBA2": "xbc", "GDN_ATTN": "qkv"}
"""What a recurrent layer's convolution remembers, by the layer's kind."""


class Group(NamedTuple):
    """Layers with one block table: their names, on this rank."""

    name: str
    spec: KVCacheSpec
    layers: tuple[str, ...]


def describe(
    builder: ManifestBuilder, config: VllmConfig, groups: Sequence[Group], num_blocks: int,
    caches: Mapping[str, torch.Tensor], rank: int, ranks: int,
) -> None:  # fmt: skip
    """Add the groups and all that their layers hold to the manifest. rank, ranks: of tensor parallelism. Raises
    KvferryError (`unknown_layout`, `unsupported_cache`)."""
    model, parallel = config.model_config, config.parallel_config
    layers = config.compilation_config.static_forward_context
    describing = Describing(builder, rank, ranks)
    for group, spec, names in groups:
        specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(names, spec)
        recurrent = isinstance(specs[names[0]], MambaSpec)
        dcp = parallel.decode_context_parallel_size if spec.dcp_sharded else 1
        share = TokenShard(rank=rank % dcp, size=dcp, interleave=parallel.cp_kv_cache_interleave_size)
        builder.group(
            group, kind="state" if recurrent else "paged", num_blocks=num_blocks, token_shard=share,
            block_size=1 if recurrent else spec.block_size, window=get_kv_cache_spec_sliding_window(spec),
        )  # fmt: skip
        for name in names:
            found = _parts(
                layers[name], name, specs[name], caches[name], num_blocks, model.dtype, ranks,
                model.get_total_num_kv_heads(),
            )  # fmt: skip
            describing.add(group, extract_layer_index(name), found)


def _parts(
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
