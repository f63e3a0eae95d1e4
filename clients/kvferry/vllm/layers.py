"""The cache of one rank: what lies where in vLLM's tensors, layer by layer, as the daemon is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from kvferry.errors import Malformed
from kvferry.manifest import OPAQUE, ManifestBuilder, TokenShard, encoding_of
from kvferry.manifest.encoding import is_opaque
from kvferry.parts import Describing, Part, attention_parts, recurrent_parts
from kvferry.vllm import heads
from kvferry.vllm.cells import packed_parts, proven

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

CONVOLVED = {"MAMBA1": "x", "SHORT_CONV": "x", "MAMBA2": "xbc", "GDN_ATTN": "qkv", "LINEAR": ""}
"""The channels that a recurrent layer's convolution remembers, by the layer's kind; linear attention has none.

Layers of Kimi's delta attention (Kimi-Linear, Kimi-K3, Bailing-MoE-V3, GLM-5-Next) are GDN_ATTN to vLLM, too."""
PLAIN = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's cache types (--kv-cache-dtype) whose plain elements vLLM keeps in uint8; a layer's scale lies elsewhere.

Tensors of auto, float16, bfloat16 and fp8_inc have the dtype of their elements. Types of cells.py have components of
their own. All others are opaque: nobody has described the insides of the four turboquants, ultraquant_4bit, and
DeepSeek-V4's caches, nor those of types that nobody knows yet."""

HALVES = ("HPC_ATTN", "MINIMAX_M3_SPARSE")
"""Backends that write while they compute attention, so that nobody sees where. The content of each head and token is a
key and a value, by their sources (hpc_attn.py, 443; minimax_m3/common/ops/sparse_attn.py, 54). The caches of all
other such backends are opaque."""
ROWS = (MLAAttentionSpec, SlidingWindowMLASpec)
"""Specs of caches whose content is one row for each token: latents, or the keys of an indexer."""


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
    KvferryError (`unknown_layout`, `unknown_heads`, `unsupported_cache`)."""
    model, parallel = config.model_config, config.parallel_config
    layers = config.compilation_config.static_forward_context
    describing = Describing(builder, rank, ranks)
    for group, spec, names in groups:
        specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(names, spec)
        # A stage of a pipeline may have none of a group's layers, and has the group's blocks all the same.
        recurrent = isinstance(next(iter(iter_layer_specs(spec)), spec), MambaSpec)
        dcp = parallel.decode_context_parallel_size if spec.dcp_sharded else 1
        share = TokenShard(rank=rank % dcp, size=dcp, interleave=parallel.cp_kv_cache_interleave_size)
        window = get_kv_cache_spec_sliding_window(spec)
        builder.group(
            group, kind="state" if recurrent else "paged", num_blocks=num_blocks, token_shard=share,
            block_size=1 if recurrent else spec.block_size,
            window=window and window + 1,  # a prompt's last token is computed anew, and looks back at one more
        )  # fmt: skip
        for name in names:
            number, begins = _place(name, specs[name])
            found = _parts(layers[name], name, specs[name], caches[name], num_blocks, model, ranks)
            found = [replace(part, name=".".join((*begins, part.name))) for part in found]
            describing.add(group, number, found, name)


def _place(name: str, spec: KVCacheSpec) -> tuple[int, list[str]]:
    """The number of the layer that has this cache, and how the names of its components begin there: not at all for the
    layer's only attention or state. Raises KvferryError (`unsupported_cache`).

    A draft model of its own counts its layers from 0, as the model does (those of EAGLE and MTP go on after it). A
    second number is that of one attention among several: LongCat-Flash has two in a layer.
    """
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if not 1 <= len(numbers) <= 2:
        message = f"layer {name} has {len(numbers)} numbers in its name: which layer of the model it is, is not known"
        raise Malformed("unsupported_cache", message, field="layer", value=name, remedy="report the model")
    draft = ["draft"] if name.startswith("draft_model.") else []
    indexer = ["indexer"] if getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER else []
    return int(numbers[0]), [*draft, *numbers[1:], *indexer]


def _parts(
    layer: Any, name: str, spec: Any, cache: torch.Tensor, num_blocks: int, model: ModelConfig, ranks: int
) -> list[Part]:
    """The components of a layer. `cache`: [block, head, slot, content], of blocks or of the kernel's smaller ones.

    The backend decides what `content` is: this is found by writing to block 0, vLLM's null block, which no request ever
    gets. A row of each token is one component. A cache that cannot be written so, and is not of HALVES, is opaque, and
    is moved in whole blocks. ranks: of tensor parallelism. Raises KvferryError: `unknown_layout`; `unknown_heads`;
    `unsupported_cache` for states without names, states of several tokens, and rings of the newest.
    """
    if isinstance(spec, MambaSpec):
        return _states(layer, name, spec, ranks)
    if not isinstance(spec, AttentionSpec) or spec.tokens_per_state != 1 or not spec.uses_slot_mapping:
        remedy = "serve a model whose layers docs/vllm.md names"
        raise Malformed("unsupported_cache", f"layer {name} has a {type(spec).__name__}", value=name, remedy=remedy)
    shards = min(ranks, spec.max_tp_shards or heads.shards(name, spec.num_kv_heads, ranks, model))
    blocks = cache.view(num_blocks, -1, *cache.shape[1:])
    packed = packed_parts(layer, spec, blocks, shards)
    if packed and proven(layer, spec, packed, blocks[0], model.dtype, name):
        return packed
    encoding = _encoding(layer, spec, cache)
    axes = ("block", "slot", "head", "slot")
    if (encoding is not None and is_opaque(encoding)) or isinstance(spec, ROWS):
        return [Part("kv", blocks, (*axes, "content"), "head", shards, encoding)]
    if layer.get_attn_backend().get_name() in HALVES:
        halves = {"k": blocks[..., : spec.head_size], "v": blocks[..., spec.head_size :]}
        return [Part(side, half, (*axes, "dim"), "head", shards, encoding) for side, half in halves.items()]

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    shape, sizes = (spec.block_size, spec.num_kv_heads), (spec.head_size, spec.head_size_v)
    return [
        replace(part, encoding=encoding)
        for part in attention_parts(write, blocks, shape, sizes, model.dtype, name, shards)
    ]


def _states(layer: Any, name: str, spec: MambaSpec, ranks: int) -> list[Part]:
    """The components of a recurrent layer: what its convolution remembers, and its state. Raises KvferryError
    (`unsupported_cache`)."""
    kind = spec.mamba_type.name
    held, states = CONVOLVED.get(kind), list(layer.kv_cache)
    if held is None or len(states) > 1 + bool(held):
        # ReplaySSM, RecoverSSM: rings of the newest inputs; how far they reach is in the worker's own memory.
        message = f"layer {name} keeps {len(states)} tensors of kind {kind}, which have no names here"
        remedy = "serve without --use-replayssm, and a model whose layers docs/vllm.md names"
        raise Malformed("unsupported_cache", message, value=name, remedy=remedy)
    conv = states.pop(0) if held else None
    if conv is not None and not is_conv_state_dim_first():
        conv = conv.transpose(1, 2)
    shards = 1 if spec.tp_replicated else ranks
    narrow = min(shards, layer.norm.n_groups) if kind == "MAMBA2" else shards
    return recurrent_parts(conv, states, held, shards, narrow)


def _encoding(layer: Any, spec: AttentionSpec, cache: torch.Tensor) -> str | None:
    """The encoding of a layer's cache; None where the dtype of its elements says it. The layer's own cache type counts:
    layers of one model may have different ones (kv_cache_dtype_skip_layers)."""
    kind, backend = getattr(layer, "kv_cache_dtype", type(layer).__name__), layer.get_attn_backend()
    unseen = not spec.head_size_v or backend.forward_includes_kv_cache_update
    if unseen and not isinstance(spec, ROWS) and backend.get_name() not in HALVES:
        return f"{OPAQUE}vllm.{backend.__module__}.{backend.__qualname__}.{cache.dtype}"
    content = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    if cache.shape[1] == spec.num_kv_heads and cache.shape[3] * cache.element_size() == content:
        if cache.dtype.is_floating_point:
            return None
        if kind in PLAIN:
            found = encoding_of(kind, "vllm")
            return "fp8_e4m3fnuz" if found == "fp8_e4m3fn" and current_platform.is_fp8_fnuz() else found
    return f"{OPAQUE}vllm.{kind}"
