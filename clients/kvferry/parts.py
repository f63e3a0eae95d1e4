"""The components of one layer, found in an engine's own tensors: what every plug-in has to name and to shard alike.

The look of a cache's tensor does not always tell where keys and values lie: one attention backend has those of a token
in a row, another all keys of a block transposed and then all values. So no layout is assumed, and `locate` finds it by
doing: every element is given a number, the numbers are written bit by bit by an operation of the engine's own (0 or 1:
exact in any dtype), and where they land is fitted to strides. Needs torch, not vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvferry.errors import KvferryError, Malformed
from kvferry.manifest import ManifestBuilder, Shard

Write: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Part:
    """A component of a layer: a view of its memory and the names of the view's axes.

    `sharded` is the axis of which each rank has one of `shards` equal parts; ranks beyond that have copies. `encoding`:
    what the bytes mean, where the view's dtype does not say it.
    """

    name: str
    view: torch.Tensor
    axes: tuple[str, ...]
    sharded: str
    shards: int
    encoding: str | None = None

    def shard(self, rank: int, ranks: int) -> Shard:
        """The shard of rank `rank` of `ranks`."""
        own = math.prod(n for n, axis in zip(self.view.shape, self.axes, strict=True) if axis == self.sharded)
        return Shard(axis=self.sharded, start=rank * self.shards // ranks * own, total=self.shards * own)


class Describing:
    """Adds the parts of layers to a manifest. A layer's parts have a name each: no order tells them apart."""

    def __init__(self, builder: ManifestBuilder, rank: int, ranks: int) -> None:
        self._builder, self._rank, self._ranks = builder, rank, ranks
        self._added: dict[tuple[int, str], str] = {}

    def add(self, group: str, layer: int, parts: Sequence[Part], what: str) -> None:
        """`what` names, in errors, the layer that has the parts. Raises KvferryError (`unsupported_cache`)."""
        for part in parts:
            if other := self._added.get((layer, part.name)):
                message = f"{other} and {what} both hold {part.name} of layer {layer}, and nothing tells which is which"
                remedy = "report the model: its caches need names of their own"
                raise Malformed("unsupported_cache", message, field="layer", value=what, remedy=remedy)
            self._added[layer, part.name] = what
            shard = part.shard(self._rank, self._ranks)
            self._builder.component(
                group, layer=layer, name=part.name, array=part.view, axes=part.axes, shard=shard, encoding=part.encoding
            )


def attention_parts(
    write: Write, blocks: torch.Tensor, shape: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, what: str,
    shards: int,
) -> list[Part]:  # fmt: skip
    """Keys and values of a layer, found by writing to block 0.

    write: the engine's own way to put keys and values, [token, head, dim], into slots of the cache. blocks: the cache,
    [block, ...], whose block 0 is nobody's. shape: tokens in a block and heads; sizes: of a key and of a value. Raises
    KvferryError (`unknown_layout`).
    """
    keys, values = (torch.zeros(*shape, size, dtype=dtype, device=blocks.device) for size in sizes)
    slots = torch.arange(shape[0], device=blocks.device)
    found = []
    for name, elements in (("k", keys), ("v", values)):
        axes = ("slot", "head", "dim")
        at = locate(lambda: write(keys, values, slots), elements, axes, blocks[0], f"the {name} of layer {what}")
        view = blocks.as_strided((len(blocks), *at.extents), (blocks.stride(0), *at.strides), at.origin)
        found.append(Part(name, view, ("block", *at.names), "head", shards))
    return found


def prove(write: Callable[[torch.Tensor], None], parts: Sequence[Part], memory: torch.Tensor, what: str) -> None:
    """Does each head of each token have the bytes in `memory` that these parts say, and no others?

    write: puts a vector for each token and head, [slot, head]: one where the flag is set, another where it is not;
    bytes that are alike in both tell nothing. parts: all that changes with the vector, of as many slots and heads.
    memory: block 0, put back as it was. what: names them in errors. Raises KvferryError (`unknown_layout`).
    """
    cells = [_cells(part) for part in parts]
    slots, heads, _ = cells[0].shape
    numbers = torch.arange(1, slots * heads + 1).view(slots, heads)
    kept, offsets = memory.clone(), _bytes(memory).flatten()
    origin, stop = int(offsets.min()), int(offsets.max()) + 1
    if any(int(at.min()) < origin or int(at.max()) >= stop for at in cells):
        raise _unknown(what, "not all of them lie in their block")
    told, seen = torch.zeros(stop - origin, dtype=torch.int64), torch.zeros(stop - origin, dtype=torch.int64)
    for at in cells:
        told[at - origin] = numbers[:, :, None]

    def written(flags: torch.Tensor) -> torch.Tensor:
        write(flags.to(memory.device))
        return memory.contiguous().view(torch.uint8).flatten().cpu().clone()

    before = written(torch.zeros_like(numbers, dtype=torch.bool))
    for bit in range((slots * heads).bit_length()):
        seen[offsets - origin] |= (written((numbers >> bit) & 1 != 0) != before).long() << bit
    memory.copy_(kept)
    if not torch.equal(seen, torch.where(seen != 0, told, seen)):
        raise _unknown(what, "bytes change with another token or head than theirs")
    if any(bool((seen[at - origin] == 0).all(-1).any()) for at in cells):
        raise _unknown(what, "some are never written")


def recurrent_parts(
    conv: torch.Tensor | None, states: Sequence[torch.Tensor], held: str, shards: int, narrow_shards: int
) -> list[Part]:
    """The parts of a recurrent layer: those of its convolution, and its state.

    conv: [block, channel, n]; None where it has none (linear attention). states: at most one, [block, head, ..., n].
    held: whose channels they are, in their order: `x` (and b, c: Mamba2), or q, k, `v` (GDN, KDA). `x` and `v` are as
    wide as the state's heads together; the others have the rest in equal parts, and `narrow_shards` of them.
    """
    found, end = [], 0
    if conv is not None:
        wide = math.prod(states[0].shape[1:-1]) if states else conv.shape[1]
        narrow = (conv.shape[1] - wide) // max(1, len(held) - 1)
        for which in held:
            start, end = end, end + (wide if which in "xv" else narrow)
            parts = shards if which in "xv" else narrow_shards
            found.append(Part(f"conv.{which}", conv[:, start:end], ("block", "channel", "n"), "channel", parts))
    axes = ("block", "head", "dim")
    return found + [Part("ssm", state, (*axes[: state.ndim - 1], "n"), "head", shards) for state in states]


@dataclass(frozen=True, slots=True)
class Places:
    """Elements at regular distances. `origin` and strides in elements of the storage; an axis of several digits (mixed
    radix, outermost first) has its name several times."""

    origin: int
    names: tuple[str, ...]
    extents: tuple[int, ...]
    strides: tuple[int, ...]


def locate(
    write: Callable[[], None], elements: torch.Tensor, axes: Sequence[str], memory: torch.Tensor, what: str
) -> Places:
    """Find where in `memory` `write` puts `elements`, whose dimensions are `axes`.

    Both hold zeros before and after. `what`: names them in errors. Raises KvferryError (`unknown_layout`).
    """
    count = elements.numel()
    numbers = torch.arange(1, count + 1, device=elements.device).view(elements.shape)
    seen = torch.zeros(memory.shape, dtype=torch.int64, device=memory.device)
    for bit in range(count.bit_length()):
        elements.copy_((numbers >> bit) & 1)
        write()
        landed = memory.view(torch.uint8) if memory.element_size() == 1 else memory
        seen |= (landed != 0).long() << bit
    elements.zero_()
    write()

    seen, offsets = seen.cpu(), _offsets(memory)
    hit = seen != 0
    order = torch.argsort(seen[hit])
    if not torch.equal(seen[hit][order], torch.arange(1, count + 1)):
        raise _unknown(what, "not every element has one place of its own")
    places = offsets[hit][order].view(elements.shape)
    origin = int(places.flatten()[0])
    fitted = torch.zeros_like(places) + origin
    digits: list[tuple[str, int, int]] = []
    for axis, name in enumerate(axes):
        along = places[tuple(slice(None) if i == axis else 0 for i in range(places.ndim))] - origin
        fitted += along.view([-1 if i == axis else 1 for i in range(places.ndim)])
        digits += [(name, extent, stride) for extent, stride in _digits(along.tolist())]
    names, extents, strides = zip(*digits, strict=True)
    if min(strides) < 0 or not torch.equal(places, fitted):
        raise _unknown(what, "its elements do not lie at regular distances")
    return Places(origin, names, extents, strides)


def _offsets(memory: torch.Tensor) -> torch.Tensor:
    """The offset in its storage of each element of a tensor."""
    offsets = torch.full(memory.shape, int(memory.storage_offset()), dtype=torch.int64)
    for axis, (extent, stride) in enumerate(zip(memory.shape, memory.stride(), strict=True)):
        offsets += (torch.arange(extent) * stride).view([-1 if i == axis else 1 for i in range(memory.ndim)])
    return offsets


def _bytes(memory: torch.Tensor) -> torch.Tensor:
    """The places in its storage of each byte of a tensor: one axis more."""
    item = memory.element_size()
    return (_offsets(memory) * item).unsqueeze(-1) + torch.arange(item)


def _cells(part: Part) -> torch.Tensor:
    """The places in the storage of the bytes of block 0: [slot, head, byte]."""
    view, axes = part.view[0], part.axes[1:]
    digits = {name: [i for i, axis in enumerate(axes) if axis == name] for name in ("slot", "head")}
    rest = [i for i in range(view.ndim + 1) if i not in digits["slot"] + digits["head"]]
    extents = (math.prod(view.shape[i] for i in digits[name]) for name in ("slot", "head"))
    return _bytes(view).permute(*digits["slot"], *digits["head"], *rest).reshape(*extents, -1)


def _digits(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Places along one axis as (extent, stride), outermost first: [0, 1, 8, 9] is [(2, 8), (2, 1)].

    (-1 for a stride where there is nothing regular.)
    """
    digits: list[tuple[int, int]] = []
    while len(steps) > 1:
        stride, extent = steps[1], 2
        while extent < len(steps) and steps[extent] == extent * stride:
            extent += 1
        if len(steps) % extent or any(
            step != steps[i - i % extent] + i % extent * stride for i, step in enumerate(steps)
        ):
            return [(len(steps), -1)]
        digits.insert(0, (extent, stride))
        steps = steps[::extent]
    return digits or [(1, 0)]


def _unknown(what: str, why: str) -> KvferryError:
    remedy = "choose another attention backend or cache dtype"
    return Malformed(
        "unknown_layout", f"where {what} lie cannot be told: {why}", field="kv_cache", value=what, remedy=remedy
    )
