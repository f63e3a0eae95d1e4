"""Where a layer's keys and values lie: found by writing some, with the attention backend's own operation.

vLLM's cache of a layer is a tensor [block, head, slot, content], and what is in `content` is the backend's affair: one
has a token's keys and values in a row, another all keys of a block transposed, then all values. So no layout is
assumed. Every key and value of the null block, which no request ever gets, is given a number, the numbers are written
bit by bit (0 or 1: exact in any dtype), and where they land is fitted to strides; what does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvferry.errors import KvferryError


class Part(NamedTuple):
    """One component of a layer: a view of its memory and the names of the view's axes."""

    name: str
    view: torch.Tensor
    axes: tuple[str, ...]


def parts(layer: Any, name: str, spec: Any, cache: torch.Tensor, num_blocks: int, dtype: torch.dtype) -> list[Part]:
    """The components of one layer. `cache`: [block, head, slot, content], of blocks or of the kernel's smaller ones.

    A cache whose content is not one key and one value per head and token is one component, moved as it is.
    Raises KvferryError (`unknown_layout`).
    """
    blocks = cache.unflatten(0, (num_blocks, -1))
    plain = cache.shape[1] == spec.num_kv_heads and cache.shape[3] == spec.head_size + spec.head_size_v
    if not plain or not spec.head_size_v or layer.get_attn_backend().forward_includes_kv_cache_update:
        return [Part("kv", blocks, ("block", "slot", "head", "slot", "content"))]
    shape = (spec.block_size, spec.num_kv_heads)
    keys = torch.zeros(*shape, spec.head_size, dtype=dtype, device=cache.device)
    values = torch.zeros(*shape, spec.head_size_v, dtype=dtype, device=cache.device)
    slots = torch.arange(spec.block_size, device=cache.device)
    null_block = blocks[0]

    def written() -> torch.Tensor:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
        return null_block.view(torch.uint8) != 0 if null_block.element_size() == 1 else null_block != 0

    found = []
    for part, numbered in (("k", keys), ("v", values)):
        numbers = torch.arange(1, numbered.numel() + 1, device=cache.device).view(numbered.shape)
        seen = torch.zeros(null_block.shape, dtype=torch.int64, device=cache.device)
        for bit in range(numbered.numel().bit_length()):
            numbered.copy_((numbers >> bit) & 1)
            seen |= written().long() << bit
        numbered.zero_()
        found.append(_fit(part, name, blocks, seen.cpu(), numbered.shape))
    null_block.zero_()
    return found


def _fit(part: str, name: str, blocks: torch.Tensor, seen: torch.Tensor, shape: torch.Size) -> Part:
    """`seen`: which number landed where in block 0; `shape`: (slot, head, dim) of the numbers."""
    offsets = torch.zeros(seen.shape, dtype=torch.int64)
    for axis, (extent, stride) in enumerate(zip(seen.shape, blocks.stride()[1:], strict=True)):
        offsets += (torch.arange(extent) * stride).view([-1 if i == axis else 1 for i in range(seen.ndim)])
    hit = seen != 0
    order = torch.argsort(seen[hit])
    if not torch.equal(seen[hit][order], torch.arange(1, shape.numel() + 1)):
        raise _unknown(part, name, "not every element has one place of its own")
    places = offsets[hit][order].view(shape)
    origin, fitted, names = places[0, 0, 0].clone(), torch.zeros_like(places), ["block"]
    sizes, strides = [blocks.shape[0]], [blocks.stride(0)]
    for axis, along in enumerate((places[:, 0, 0], places[0, :, 0], places[0, 0, :])):
        steps = along - origin
        fitted += steps.view([-1 if i == axis else 1 for i in range(3)])
        for extent, stride in _digits(steps.tolist()):
            names.append(("slot", "head", "dim")[axis])
            sizes.append(extent)
            strides.append(stride)
    if not torch.equal(places, fitted + origin) or min(strides) < 0:
        raise _unknown(part, name, "its elements do not lie at regular distances")
    view = blocks.as_strided(sizes, strides, blocks.storage_offset() + int(origin))
    return Part(part, view, tuple(names))


def _digits(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Places along one axis as (extent, stride), outermost first: [0, 1, 8, 9] is [(2, 8), (2, 1)].

    What is not regular gives strides that the caller finds not to fit.
    """
    digits: list[tuple[int, int]] = []
    while len(steps) > 1:
        stride, extent = steps[1], 2
        while extent < len(steps) and steps[extent] == extent * stride:
            extent += 1
        if len(steps) % extent or any(
            steps[i] != steps[i - i % extent] + i % extent * stride for i in range(len(steps))
        ):
            return [(len(steps), -1)]
        digits.insert(0, (extent, stride))
        steps = steps[::extent]
    return digits or [(1, 0)]


def _unknown(part: str, name: str, why: str) -> KvferryError:
    return KvferryError(
        "unknown_layout",
        f"layer {name}: where the attention backend keeps {part} cannot be told: {why}",
        field="kv_cache",
        value=name,
        remedy="choose another attention backend (VLLM_ATTENTION_BACKEND) or cache dtype",
    )
