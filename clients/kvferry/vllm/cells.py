"""Packed caches: the bytes that vLLM keeps for one token of one head, where these are more than keys and values.

vLLM's view of a layer is [block, head, slot, content]. The content of a packed type is a cell: fields one after
another. A field is a component of its own, with its own encoding: heads and slots may be divided, and a cell never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.platforms import current_platform

from kvferry.parts import Part, Write, prove

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

AXES = ("block", "slot", "head", "slot", "dim")


class Field(NamedTuple):
    """A part of a cell. share: bytes for each element of a head; nbytes: those beside. dtype: of its elements."""

    name: str
    encoding: str
    dtype: torch.dtype
    share: Fraction = Fraction(0)
    nbytes: int = 0

    def size(self, head_size: int) -> int:
        """Bytes of it, where a head has so many elements."""
        return int(self.share * head_size) + self.nbytes


def _scaled(encoding: str, dtype: torch.dtype, share: Fraction, scale: Field) -> tuple[Field, ...]:
    """Keys, their scale, values, their scale."""
    return tuple(
        field
        for side in ("k", "v")
        for field in (Field(side, encoding, dtype, share), scale._replace(name=f"{side}.scale"))
    )


_SCALE = Field("scale", "fp32", torch.float32, nbytes=4)
CELLS = {
    "int8_per_token_head": _scaled("int8_per_token_head", torch.int8, Fraction(1), _SCALE),
    "fp8_per_token_head": _scaled("fp8_e4m3fn_per_token_head", torch.uint8, Fraction(1), _SCALE),
    "int4_per_token_head": _scaled(
        "uint4_per_token_head", torch.uint8, Fraction(1, 2), Field("scale", "fp32_zero4", torch.int32, nbytes=4)
    ),
}
"""Cells by vLLM's cache type. Per token and head: triton_attn.py of vLLM 0.32, `_ensure_scale_caches`."""


def cell_parts(layer: Any, spec: AttentionSpec, blocks: torch.Tensor, shards: int) -> list[Part]:
    """The components of a layer whose content is the cell of its cache type; none where it is not.

    blocks: [block, kernel block, head, slot, content].
    """
    fields = CELLS.get(getattr(layer, "kv_cache_dtype", ""), ())
    sizes = [field.size(spec.head_size) for field in fields]
    content = blocks.shape[-1] * blocks.element_size()
    if content != sum(sizes) or blocks.shape[2] != spec.num_kv_heads or spec.head_size != spec.head_size_v:
        return []
    found, end = [], 0
    for field, size in zip(fields, sizes, strict=True):
        start, end = end, end + size
        encoding = field.encoding.replace("e4m3fn", "e4m3fnuz") if current_platform.is_fp8_fnuz() else field.encoding
        view = blocks.view(torch.uint8)[..., start:end].view(field.dtype)
        found.append(Part(field.name, view, AXES, "head", shards, encoding))
    return found


def prove_cells(
    write: Write, parts: Sequence[Part], memory: torch.Tensor, shape: tuple[int, int], sizes: tuple[int, int],
    dtype: torch.dtype, what: str,
) -> None:  # fmt: skip
    """Do keys and values that the engine writes to block 0 change these parts, and nothing else?

    Arguments as those of `attention_parts`. vLLM sets all scales of a layer to 1 when it first writes: that is now, and
    not after the first load. Raises KvferryError (`unknown_layout`).
    """
    slots = torch.arange(shape[0], device=memory.device)
    vectors = [
        torch.randn(size, generator=torch.Generator().manual_seed(size)).to(memory.device, dtype) for size in sizes
    ]

    def filled(flags: torch.Tensor | None, side: int) -> torch.Tensor:
        """-2 times the vector where the flag is set: each sign and each scale is another."""
        factors = torch.ones(shape, device=memory.device) if flags is None else 1.0 - 3.0 * flags
        return (factors[:, :, None] * vectors[side]).to(dtype)

    for side, name in enumerate("kv"):

        def put(flags: torch.Tensor, side: int = side) -> None:
            keys, values = (filled(flags if side == which else None, which) for which in (0, 1))
            write(keys, values, slots)

        of_side = [part for part in parts if part.name.startswith(name)]
        prove(put, of_side, memory, f"the {name} of layer {what}")
