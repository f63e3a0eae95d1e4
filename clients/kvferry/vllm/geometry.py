"""What one layer's cache consists of."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from kvferry.errors import KvferryError
from kvferry.probing import locate


class Part(NamedTuple):
    """One component of a layer: a view of its memory and the names of the view's axes."""

    name: str
    view: torch.Tensor
    axes: tuple[str, ...]


def parts(layer: Any, name: str, spec: Any, cache: torch.Tensor, num_blocks: int, dtype: torch.dtype) -> list[Part]:
    """The components of a layer. `cache`: [block, head, slot, content], of blocks or of the kernel's smaller ones.

    What `content` is, is the backend's affair: it is found by writing to block 0, vLLM's null block, which no request
    ever gets. A cache of anything but one key and one value per head and token is one component, moved as it is.
    Raises KvferryError: `unknown_layout`; `unsupported_cache` for a state, or one of several tokens.
    """
    if not isinstance(spec, AttentionSpec) or spec.tokens_per_state != 1:
        remedy = "serve models of attention layers only"
        raise KvferryError("unsupported_cache", f"layer {name} has a {type(spec).__name__}", value=name, remedy=remedy)
    blocks = cache.view(num_blocks, -1, *cache.shape[1:])
    plain = cache.shape[1] == spec.num_kv_heads and cache.shape[3] == spec.head_size + spec.head_size_v
    if not plain or not spec.head_size_v or layer.get_attn_backend().forward_includes_kv_cache_update:
        return [Part("kv", blocks, ("block", "slot", "head", "slot", "content"))]
    shape = (spec.block_size, spec.num_kv_heads)
    keys, values = (
        torch.zeros(*shape, size, dtype=dtype, device=cache.device) for size in (spec.head_size, spec.head_size_v)
    )
    slots = torch.arange(spec.block_size, device=cache.device)

    def write() -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    found = []
    for part, elements in (("k", keys), ("v", values)):
        at = locate(write, elements, ("slot", "head", "dim"), blocks[0], f"the {part} of layer {name}")
        view = blocks.as_strided((num_blocks, *at.extents), (blocks.stride(0), *at.strides), at.origin)
        found.append(Part(part, view, ("block", *at.names)))
    return found
