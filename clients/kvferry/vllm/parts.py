"""The components of one layer, found in an engine's own tensors: what every plug-in has to name and to shard alike.

Needs torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvferry.manifest import ManifestBuilder, Shard
from kvferry.vllm.probing import locate

if TYPE_CHECKING:
    import torch

Write: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]"


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a layer: a view of its memory and the names of the view's axes.

    `sharded` is the axis of which each rank has one of `shards` equal parts; ranks beyond that have copies.
    """

    name: str
    view: torch.Tensor
    axes: tuple[str, ...]
    sharded: str
    shards: int

    def shard(self, rank: int, ranks: int) -> Shard:
        """What rank `rank` of `ranks` has."""
        own = math.prod(n for n, axis in zip(self.view.shape, self.axes, strict=True) if axis == self.sharded)
        return Shard(axis=self.sharded, start=rank * self.shards // ranks * own, total=self.shards * own)


class Describing:
    """Adds the parts of layers to a manifest. Parts of one name in one layer are told apart by a number."""

    def __init__(self, builder: ManifestBuilder, rank: int, ranks: int) -> None:
        self._builder, self._rank, self._ranks = builder, rank, ranks
        self._seen: Counter[tuple[int, str]] = Counter()

    def add(self, group: str, layer: int, parts: Sequence[Part]) -> None:
        for part in parts:
            nth = self._seen[layer, part.name]
            self._seen[layer, part.name] += 1
            name = f"{part.name}.{nth}" if nth else part.name
            shard = part.shard(self._rank, self._ranks)
            self._builder.component(group, layer=layer, name=name, array=part.view, axes=part.axes, shard=shard)


def attention_parts(
    write: Write, blocks: torch.Tensor, shape: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, what: str,
    shards: int,
) -> list[Part]:  # fmt: skip
    """Keys and values of a layer, found by writing to block 0.

    write: the engine's own way to put keys and values, [token, head, dim], into slots of the cache. blocks: the cache,
    [block, ...], whose block 0 is nobody's. shape: tokens in a block and heads; sizes: of a key and of a value. Raises
    KvferryError (`unknown_layout`).
    """
    import torch

    keys, values = (torch.zeros(*shape, size, dtype=dtype, device=blocks.device) for size in sizes)
    slots = torch.arange(shape[0], device=blocks.device)
    found = []
    for name, elements in (("k", keys), ("v", values)):
        at = locate(
            lambda: write(keys, values, slots),
            elements,
            ("slot", "head", "dim"),
            blocks[0],
            f"the {name} of layer {what}",
        )
        view = blocks.as_strided((len(blocks), *at.extents), (blocks.stride(0), *at.strides), at.origin)
        found.append(Part(name, view, ("block", *at.names), "head", shards))
    return found


def recurrent_parts(
    conv: torch.Tensor, states: Sequence[torch.Tensor], held: str, shards: int, narrow_shards: int
) -> list[Part]:
    """What a recurrent layer's convolution remembers, and its state.

    conv: [block, channel, n]. states: at most one, [block, head, ..., n]. held: whose channels they are, in their
    order: `x` (and b, c: Mamba2), or q, k, `v` (GDN). `x` and `v` are as wide as the state's heads together; the others
    have the rest in equal parts, and `narrow_shards` of them.
    """
    wide = math.prod(states[0].shape[1:-1]) if states else conv.shape[1]
    narrow = (conv.shape[1] - wide) // max(1, len(held) - 1)
    found, end = [], 0
    for which in held:
        start, end = end, end + (wide if which in "xv" else narrow)
        parts = shards if which in "xv" else narrow_shards
        found.append(Part(f"conv.{which}", conv[:, start:end], ("block", "channel", "n"), "channel", parts))
    axes = ("block", "head", "dim")
    return found + [Part("ssm", state, (*axes[: state.ndim - 1], "n"), "head", shards) for state in states]
