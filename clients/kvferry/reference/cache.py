"""The paged KV cache of one rank: an axis order becomes strides, and strides become tensors and a manifest.

The whole cache is one array with six axes. A layout is the order in which they lie in memory, nothing more: the worker
sees every layout as views with the axes (block, slot, head, dim), and the daemon sees it as a manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from kvferry.errors import Malformed
from kvferry.manifest import ITEMSIZE, Manifest, ManifestBuilder, ModelInfo, Shard
from kvferry.reference.config import EngineConfig, ModelConfig
from kvferry.reference.sharding import RankShard

AXES = ("layer", "kv", "block", "slot", "head", "dim")
VIEW_AXES = ("block", "slot", "head", "dim")
COMPONENTS = ("k", "v")

LAYOUTS = {
    "NHD": "layer kv block slot head dim",
    "HND": "layer kv block head slot dim",
    "interleaved": "layer block slot kv head dim",
    "cross_layer": "block layer kv head slot dim",
}
"""Outermost first. Any other order of the six axes is as good: `--layout "block head layer kv slot dim"`."""


def axis_order(layout: str) -> tuple[str, ...]:
    """The axes of a layout's name or of an order spelled out. Raises KvferryError (`bad_option`)."""
    order = tuple(LAYOUTS.get(layout, layout).replace(",", " ").split())
    if sorted(order) != sorted(AXES):
        raise Malformed(
            "bad_option", "the layout is not an order of the six cache axes", field="layout", value=layout,
            remedy=f"one of {', '.join(LAYOUTS)}, or the axes {' '.join(AXES)} in the order you want",
        )  # fmt: skip
    return order


class ArrayInterface(TypedDict):
    data: tuple[int, bool]


@dataclass(frozen=True, slots=True)
class CacheView:
    """The keys or values of one layer, with axes VIEW_AXES: what numpy would call a strided array, without the bytes.

    offset and strides in bytes from the start of the region, which lies at `address` (0 where it does not matter).
    """

    layer: int
    name: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 0

    @property
    def __array_interface__(self) -> ArrayInterface:
        """What ManifestBuilder reads of any array: where its first element lies."""
        return {"data": (self.address + self.offset, False)}


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of one rank's cache."""

    order: tuple[str, ...]
    extents: dict[str, int]
    dtype: str

    @classmethod
    def of(cls, model: ModelConfig, engine: EngineConfig, rank: int) -> CacheGeometry:
        extents = {
            "layer": model.num_layers,
            "kv": len(COMPONENTS),
            "block": engine.num_blocks,
            "slot": engine.block_size,
            "head": len(RankShard.of(model, rank, engine.tp).kv_heads),
            "dim": model.head_dim,
        }
        return cls(axis_order(engine.layout), extents, model.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.extents.values()) * ITEMSIZE[self.dtype]

    def views(self, address: int = 0) -> Iterator[CacheView]:
        """Keys and values of every layer, for a region that begins at `address`."""
        strides, stride = {}, ITEMSIZE[self.dtype]
        for axis in reversed(self.order):
            strides[axis] = stride
            stride *= self.extents[axis]
        shape = tuple(self.extents[axis] for axis in VIEW_AXES)
        steps = tuple(strides[axis] for axis in VIEW_AXES)
        for layer in range(self.extents["layer"]):
            for kv, name in enumerate(COMPONENTS):
                offset = layer * strides["layer"] + kv * strides["kv"]
                yield CacheView(layer, name, self.dtype, offset, shape, steps, address)


def describe(
    model: ModelConfig, engine: EngineConfig, rank: int, *, epoch: str, info: ModelInfo, kind: str, address: int
) -> Manifest:
    """The manifest of one rank whose cache lies in region 0, which begins at `address` in this process."""
    geometry = CacheGeometry.of(model, engine, rank)
    heads = RankShard.of(model, rank, engine.tp).kv_heads
    builder = ManifestBuilder(
        engine.engine_id, epoch, info, rank=rank, world_size=engine.tp, parallel={"tp": engine.tp}
    )  # fmt: skip
    builder.region(0, kind, nbytes=geometry.nbytes, address=address)
    for group, window in model.groups.items():
        builder.group(group, num_blocks=engine.num_blocks, block_size=engine.block_size, window=window)
    shard = Shard(axis="head", start=heads.start, total=model.num_kv_heads)
    for view in geometry.views(address):
        builder.component(
            model.group_of(view.layer), layer=view.layer, name=view.name, array=view, axes=VIEW_AXES, shard=shard
        )
    return builder.build()
