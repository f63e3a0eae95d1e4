"""A rank's share of the model and the layout of its paged KV cache, as the daemon is told of it. No torch.

The whole cache is one array with six axes. A layout is the order in which they lie in memory, nothing more: the worker
sees every layout as views with the axes (block, slot, head, dim), and the daemon sees those views in a manifest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import Malformed
from kvferry.manifest import ITEMSIZE, Manifest, ManifestBuilder, ModelInfo, Shard
from kvferry.reference.config import LAYOUTS, EngineConfig, ModelConfig, ModelSource

if TYPE_CHECKING:
    import torch

    from kvferry.reference.model import LayerCache

AXES = ("layer", "kv", "block", "slot", "head", "dim")
VIEW_AXES = ("block", "slot", "head", "dim")


def axis_order(layout: str) -> tuple[str, ...]:
    """The axes of a layout's name or of an order spelled out. Raises KvferryError (`bad_option`)."""
    order = tuple(LAYOUTS.get(layout, layout).replace(",", " ").split())
    if sorted(order) != sorted(AXES):
        raise Malformed(
            "bad_option", "the layout is not an order of the six cache axes", field="layout", value=layout,
            remedy=f"one of {', '.join(LAYOUTS)}, or the axes {' '.join(AXES)} in the order you want",
        )  # fmt: skip
    return order


@dataclass(frozen=True, slots=True)
class RankShard:
    """The global ranges that a tensor-parallel rank holds. Nothing has to divide evenly."""

    kv_heads: range
    heads: range
    columns: range
    """Columns of the MLP's intermediate size."""

    @classmethod
    def of(cls, config: ModelConfig, rank: int, tp: int) -> RankShard:
        """6 KV heads over 4 ranks: 2, 2, 1, 1. With more ranks than KV heads, each rank holds one KV head and the
        ranks that hold the same one share out its query heads. Raises KvferryError for more ranks than query heads."""
        per_kv = config.num_heads // config.num_kv_heads
        if tp > min(config.num_heads, config.intermediate_size):
            raise Malformed(
                "bad_option", f"{tp} ranks for {config.num_heads} query heads leave a rank without work",
                field="tp", value=tp, remedy=f"use at most {config.num_heads} ranks",
            )  # fmt: skip
        columns = _share(config.intermediate_size, rank, tp)
        if tp <= config.num_kv_heads:
            kv = _share(config.num_kv_heads, rank, tp)
            return cls(kv, range(kv.start * per_kv, kv.stop * per_kv), columns)
        kv_head = rank * config.num_kv_heads // tp
        holders = [other for other in range(tp) if other * config.num_kv_heads // tp == kv_head]
        queries = _share(per_kv, rank - holders[0], len(holders), kv_head * per_kv)
        return cls(range(kv_head, kv_head + 1), queries, columns)


def _share(total: int, rank: int, size: int, first: int = 0) -> range:
    """The rank's part of `total` positions from `first` on; the first ranks take one more where it does not divide."""
    whole, extra = divmod(total, size)
    start = first + rank * whole + min(rank, extra)
    return range(start, start + whole + (rank < extra))


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of one rank's cache. extents: of the axes, outermost first."""

    extents: dict[str, int]
    dtype: str

    @classmethod
    def of(cls, model: ModelConfig, engine: EngineConfig, rank: int) -> CacheGeometry:
        heads = len(RankShard.of(model, rank, engine.tp).kv_heads)
        sizes = model.num_layers, 2, engine.num_blocks, engine.block_size, heads, model.head_dim
        extents = dict(zip(AXES, sizes, strict=True))
        return cls({axis: extents[axis] for axis in axis_order(engine.layout)}, model.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.extents.values()) * ITEMSIZE[self.dtype]


def describe(
    source: ModelSource, engine: EngineConfig, rank: int, *, epoch: str, region: torch.Tensor,
    caches: Sequence[LayerCache],
) -> Manifest:  # fmt: skip
    """The manifest of one rank, whose layers' `caches` lie in `region`."""
    model, parallel = source.config, {"tp": engine.tp}
    info = ModelInfo(name=source.name, fingerprint=engine.fingerprint or source.fingerprint())
    builder = ManifestBuilder(engine.engine_id, epoch, info, rank=rank, world_size=engine.tp, parallel=parallel)
    builder.region(0, "host", nbytes=region.nbytes, address=region.data_ptr())
    for group, window in model.groups.items():
        builder.group(group, num_blocks=engine.num_blocks, block_size=engine.block_size, window=window)
    heads = RankShard.of(model, rank, engine.tp).kv_heads
    shard = Shard(axis="head", start=heads.start, total=model.num_kv_heads)
    for layer, cache in enumerate(caches):
        for name, view in (("k", cache.k), ("v", cache.v)):
            builder.component(model.group_of(layer), layer=layer, name=name, array=view, axes=VIEW_AXES, shard=shard)
    return builder.build()
