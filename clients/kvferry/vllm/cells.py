"""Packed caches: the bytes that vLLM keeps for one token of one head, where these are more than keys and values.

vLLM's view of a layer is [block, head, slot, content]. A packed type has fields: one after another in the content of
each head and token (a cell), or each in a section of its own in the kernel's block. A field is a component of its own,
with its own encoding: heads and slots may be divided, and what one head has of one token never is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import SparseCacheRole

from kvferry.errors import Malformed
from kvferry.parts import Part, Write, prove

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

log = init_logger("vllm.kvferry.cells")
Tile = tuple[tuple[str, int], ...]
"""The order in which the slots of one head and the bytes of one slot lie, outermost first; 0: as many as there are."""
ROWS: Tile = (("slot", 0), ("dim", 0))
QUARTERS: Tile = (("slot", 0), ("dim", 4), ("dim", 0), ("slot", 4))
SHUFFLED: Tile = (("slot", 0), ("dim", 0), ("slot", 16), ("dim", 16))
INDEX_SIZE = 128


class Field(NamedTuple):
    """share: bytes for each element of a head; nbytes: those beside. dtype: of its elements."""

    name: str
    encoding: str
    dtype: torch.dtype
    share: Fraction = Fraction(0)
    nbytes: int = 0
    tile: Tile = ROWS

    def size(self, head_size: int) -> int:
        """Bytes of it, where a head has so many elements."""
        return int(self.share * head_size) + self.nbytes


def _scaled(encoding: str, dtype: torch.dtype, share: Fraction, *scales: Field) -> tuple[Field, ...]:
    """Keys, their scale, values, their scale."""
    return tuple(
        field
        for side, scale in zip(("k", "v"), scales, strict=True)
        for field in (Field(side, encoding, dtype, share), scale._replace(name=f"{side}.scale"))
    )


def _index(tile: Tile) -> tuple[Field, ...]:
    keys = Field("k", "fp8_e4m3fn_per_token_head", torch.uint8, nbytes=INDEX_SIZE, tile=tile)
    return keys, Field("k.scale", "fp32", torch.float32, nbytes=4)


_SCALE = Field("", "fp32", torch.float32, nbytes=4)
_ZERO4 = Field("", "fp32_zero4", torch.int32, nbytes=4)
_GROUPS = Field("", "fp8_e4m3fn", torch.uint8, Fraction(1, 16))
CELLS = {
    "int8_per_token_head": _scaled("int8_per_token_head", torch.int8, Fraction(1), _SCALE, _SCALE),
    "fp8_per_token_head": _scaled("fp8_e4m3fn_per_token_head", torch.uint8, Fraction(1), _SCALE, _SCALE),
    "int4_per_token_head": _scaled("uint4_per_token_head", torch.uint8, Fraction(1, 2), _ZERO4, _ZERO4),
    "fp8_ds_mla": (Field("kv", "fp8_ds_mla", torch.uint8, nbytes=656),),
    "nvfp4_ds_mla": (Field("kv", "nvfp4_ds_mla", torch.uint8, nbytes=352),),
}
"""Fields of a cell by vLLM's cache type. Per token and head: triton_attn.py of vLLM 0.32, `_ensure_scale_caches`. Rows
of latents: deepseek_v32/common/kernels.py, `_fused_norm_rope_kernel`."""
SECTIONS = {
    "nvfp4": _scaled("nvfp4", torch.uint8, Fraction(1, 2), _GROUPS, _GROUPS),
    "nvfp4 of trtllm": _scaled("nvfp4", torch.uint8, Fraction(1, 2), _GROUPS, _GROUPS._replace(tile=QUARTERS)),
    "indexer": _index(ROWS),
    "shuffled indexer": _index(SHUFFLED),
}
"""Fields of which each has a section of the block. NVFP4: flashinfer.py, `_nvfp4_kv_views`, and
nvfp4_kv_cache_kernels.cu, `swizzle_scale_offset`. Keys of a sparse indexer: deepseek_v32/common/kernels.py,
`_fp8_quant_and_cache_write`."""


def packed_parts(layer: Any, spec: AttentionSpec, blocks: torch.Tensor, shards: int) -> list[Part]:
    """The components of a layer whose cache is packed; none where nobody has described how.

    blocks: [block, kernel block, head, slot, content].
    """
    kind = _kind(layer, spec)
    in_cells, fields = kind in CELLS, CELLS.get(kind) or SECTIONS.get(kind, ())
    sizes, heads = [field.size(spec.head_size) for field in fields], spec.num_kv_heads
    _, _, rows, slots, content = blocks.shape
    content *= blocks.element_size()
    fits = heads * sum(sizes) == rows * content and spec.head_size_v in (0, spec.head_size)
    if not fits or (in_cells and rows != heads):
        return []
    raw, found, end = blocks.view(torch.uint8), list[Part](), 0
    for field, size in zip(fields, sizes, strict=True):
        start, end = end, end + size
        axes: tuple[str, ...] = ("block", "slot", "head", "slot", "dim")
        view: torch.Tensor | None = raw[..., start:end]
        if not in_cells:
            tile = _tile(field.tile, slots, size)
            axes, view = (*axes[:3], *(axis for axis, _ in tile)), _section(raw, start * heads * slots, heads, tile)
        if view is None:
            return []
        found.append(Part(field.name, view.view(field.dtype), axes, "head", shards, _encoding(field.encoding)))
    return found


def _section(raw: torch.Tensor, start: int, heads: int, tile: Tile) -> torch.Tensor | None:
    """A section from byte `start` of each kernel's block on, [block, kernel block, head, *tile]: the heads one after
    another, or, where the view has the slots first, beside one another in each slot. None where it can be neither."""
    steps = [math.prod(extent for _, extent in tile[i + 1 :]) for i in range(len(tile))]
    head_step = math.prod(extent for _, extent in tile)
    if not raw[0, 0].is_contiguous():
        if not raw[0, 0].transpose(0, 1).is_contiguous() or [axis for axis, _ in tile] != ["slot", "dim"]:
            return None
        head_step, steps[0] = steps[0], steps[0] * heads
    sizes = (*raw.shape[:2], heads, *(extent for _, extent in tile))
    return raw.as_strided(sizes, (*raw.stride()[:2], head_step, *steps), raw.storage_offset() + start)


def _kind(layer: Any, spec: Any) -> str:
    """The name of a layer's cache in CELLS or SECTIONS. DeepSeek-V4's have the same names and other contents."""
    if getattr(spec, "model_version", None) is not None:
        return ""
    if getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER:
        return "shuffled indexer" if getattr(layer, "uses_shuffled_layout", False) else "indexer"
    kind: str = getattr(layer, "kv_cache_dtype", "")
    if kind in ("nvfp4", "nvfp4_4over6"):
        return "nvfp4 of trtllm" if getattr(layer.impl, "nvfp4_trtllm", False) else "nvfp4"
    return kind


def _tile(tile: Tile, slots: int, size: int) -> Tile:
    """With every extent."""
    left = {"slot": slots, "dim": size}
    for axis, extent in tile:
        left[axis] //= extent or 1
    return tuple((axis, extent or left[axis]) for axis, extent in tile)


def _encoding(name: str) -> str:
    return name.replace("e4m3fn", "e4m3fnuz") if current_platform.is_fp8_fnuz() else name


def proven(
    layer: Any, spec: AttentionSpec, parts: Sequence[Part], memory: torch.Tensor, dtype: torch.dtype, what: str
) -> bool:
    """Does what vLLM's own operation writes to block 0 change these parts, and nothing else?

    vLLM sets the scales of every token and head to 1 when it first writes: that is now, and not after the first load.
    """
    write, sizes = _write(layer, spec)
    shape, slots = (spec.block_size, spec.num_kv_heads), torch.arange(spec.block_size, device=memory.device)
    vectors = [
        torch.randn(size, generator=torch.Generator().manual_seed(size)).to(memory.device, dtype) for size in sizes
    ]

    def filled(flags: torch.Tensor | None, side: int) -> torch.Tensor:
        """-2 times the vector where the flag is set: each sign and each scale is another."""
        factors = torch.ones(shape, device=memory.device) if flags is None else 1.0 - 3.0 * flags
        return (factors[:, :, None] * vectors[side]).to(dtype)

    for sides in dict.fromkeys(part.name.partition(".")[0] for part in parts):

        def put(flags: torch.Tensor, sides: str = sides) -> None:
            keys, values = (filled(flags if name in sides else None, side) for side, name in enumerate("kv"))
            write(keys, values, slots)

        try:
            of_sides = [part for part in parts if part.name.partition(".")[0] == sides]
            prove(put, of_sides, memory, f"the {sides} of layer {what}")
        except (
            Malformed,
            AttributeError,
            NotImplementedError,
        ) as error:  # also where the platform has no such operation
            log.warning("layer %s is moved in whole blocks only: %s", what, error)
            return False
    return True


def _write(layer: Any, spec: AttentionSpec) -> tuple[Write, tuple[int, int]]:
    """vLLM's own way to put keys and values (latents and what is rotated; keys of an indexer and nothing) into slots,
    and their sizes."""
    if getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER:

        def index(keys: torch.Tensor, _: torch.Tensor, slots: torch.Tensor) -> None:
            if getattr(layer, "uses_shuffled_layout", False):
                from vllm.v1.attention.ops.rocm_aiter_mla_sparse import indexer_k_quant_and_cache_triton as quantize
            else:
                quantize = ops.indexer_k_quant_and_cache
            quantize(keys[:, 0], layer.kv_cache, slots, INDEX_SIZE, "ue8m0")

        return index, (INDEX_SIZE, INDEX_SIZE)
    update = layer.impl.do_kv_cache_update
    if not spec.head_size_v:

        def latent(latents: torch.Tensor, rotated: torch.Tensor, slots: torch.Tensor) -> None:
            update(latents[:, 0], rotated, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

        return latent, (layer.kv_lora_rank, layer.qk_rope_head_dim)

    def plain(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        update(layer, keys, values, layer.kv_cache, slots)

    return plain, (spec.head_size, spec.head_size_v)
