"""Mixed-radix axes: where a component's positions lie in memory, and how two sides' positions pair up.

A logical axis is a list of digits (extent, stride in bytes), outer first; an ordinary axis has one. This one notion
carries kernel blocks inside logical blocks, split head dims, and everything else that is "an axis in two parts".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.manifest import BLOCK, SLOT, Component

Ints: TypeAlias = npt.NDArray[np.int64]
Radix: TypeAlias = tuple[tuple[int, int], ...]
"""The digits (extent, stride) of a logical axis."""
Axes: TypeAlias = tuple[tuple[str, int, int], ...]
"""(name, extent, stride in bytes), outer first."""


class Span(NamedTuple):
    """Half-open range [start, stop) on a global axis, for example KV heads."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A component as the planner sees it: everything but where it starts. Components with equal axes, shard, dtype
    and encoding share one, so that it can be compared by identity.

    meaning: its encoding; named: the manifest says so, not the dtype. inner: the digits of every axis but block and
    slot. spans: what is held of each; totals: how long each is globally; both also for "", which stands for no axis.
    undivided: axes that both sides must hold alike.
    """

    dtype: str
    itemsize: int
    meaning: str
    named: bool
    block: Radix
    slot: Radix
    inner: dict[str, Radix]
    spans: dict[str, Span]
    totals: dict[str, int]
    shard_axis: str
    undivided: frozenset[str]

    def digits(self, axis: str) -> Radix:
        return self.slot if axis == SLOT else self.inner[axis]

    def held(self, axis: str) -> str:
        """How it holds an axis, for people."""
        steps = " of ".join(f"{extent} x {stride} bytes" for extent, stride in self.digits(axis)) or "1"
        return f"{axis} {self.spans[axis]} of {self.totals[axis]}: {steps}"


def layouts() -> Callable[[Component], Layout]:
    """The layouts of one plan, each made once."""
    made: dict[tuple[object, ...], Layout] = {}

    def layout_of(component: Component) -> Layout:
        shard, axes = component.shard, tuple((axis.name, axis.extent, axis.stride) for axis in component.axes)
        share = (shard.axis, shard.start, shard.total) if shard else None
        key = (component.dtype, component.encoding, component.whole, axes, share)
        layout = made.get(key)  # hashed once: there are thousands of components
        if layout is None:
            layout = made[key] = _layout(component, axes)
        return layout

    return layout_of


def _layout(component: Component, axes: Axes) -> Layout:
    extents = {name: component.extent(name) for name, _, _ in axes if name != BLOCK}
    spans = {"": Span(0, 1)} | {name: Span(0, extent) for name, extent in extents.items()}
    totals, shard_axis = {"": 1} | extents, ""
    if shard := component.shard:
        shard_axis = shard.axis
        spans[shard_axis] = Span(shard.start, shard.start + extents[shard_axis])
        totals[shard_axis] = shard.total
    return Layout(
        component.dtype, component.itemsize, component.meaning, component.encoding is not None,
        _radix(axes, BLOCK), _radix(axes, SLOT), {name: _radix(axes, name) for name in extents if name != SLOT},
        spans, totals, shard_axis, component.undivided,
    )  # fmt: skip


def _radix(axes: Axes, name: str) -> Radix:
    """The digits of a logical axis, with those merged that lie regularly inside one another."""
    digits: list[tuple[int, int]] = []
    for axis, extent, stride in axes:
        if axis != name or extent == 1:
            continue
        if digits and digits[-1][1] == extent * stride:
            digits[-1] = (digits[-1][0] * extent, stride)
        else:
            digits.append((extent, stride))
    return tuple(digits)


class Loop(NamedTuple):
    """`extent` copies, each further by a stride in bytes on either side."""

    extent: int
    source_stride: int
    destination_stride: int


@dataclass(frozen=True, slots=True)
class Box:
    """A regular part of a copy: two start offsets in bytes and nested loops, outer first."""

    source_offset: int
    destination_offset: int
    loops: tuple[Loop, ...] = ()

    def __add__(self, inner: Box) -> Box:
        """This box with `inner` repeated inside every step."""
        source = self.source_offset + inner.source_offset
        destination = self.destination_offset + inner.destination_offset
        return Box(source, destination, self.loops + inner.loops)


def offsets(positions: Ints, digits: Radix) -> Ints:
    """Byte offsets of positions along an axis. Positions must be in range: they are checked by `bind`."""
    if len(digits) < 2:
        return positions * step(digits)
    inner = np.zeros_like(positions)
    for extent, stride in reversed(digits[1:]):
        inner += positions % extent * stride
        positions = positions // extent
    return positions * digits[0][1] + inner


def divided(positions: Ints, size: int) -> tuple[Ints, Ints]:
    """(quotient, remainder), in half the time of `np.divmod`, which divides one by one."""
    quotient = positions // size
    return quotient, positions - quotient * size


def step(digits: Radix) -> int:
    """Bytes between neighbouring positions of the innermost digit."""
    return digits[-1][1] if digits else 0


def coalesce(source: Ints, destination: Ints, nbytes: Ints) -> tuple[Ints, Ints, Ints]:
    """Sort runs by source offset and join those that touch on both sides."""
    if len(source) < 2:
        return source, destination, nbytes
    order = source.argsort(kind="stable")
    source, destination, nbytes = source[order], destination[order], nbytes[order]
    ends = (source[:-1] + nbytes[:-1] != source[1:]) | (destination[:-1] + nbytes[:-1] != destination[1:])
    if ends.all():
        return source, destination, nbytes
    first = np.concatenate(([0], ends.nonzero()[0] + 1))
    return source[first], destination[first], np.add.reduceat(nbytes, first)


def pair(source: Radix, source_start: int, destination: Radix, destination_start: int, count: int) -> list[Box]:
    """Pair `count` positions of two axes, beginning at either start, as few boxes with loops.

    Both sides are cut wherever either's innermost digit wraps; between cuts both step regularly. Equal pieces at
    regular distances then fold into a loop, and such loops into loops.
    """
    cuts = {0, count}
    for digits, start in ((source, source_start), (destination, destination_start)):
        if len(digits) > 1:
            inner = digits[-1][0]
            cuts.update(range(-start % inner, count, inner))
    edges = np.array(sorted(cuts), dtype=np.int64)
    at, lengths = edges[:-1], np.diff(edges)
    source_at, destination_at = offsets(source_start + at, source), offsets(destination_start + at, destination)
    boxes = [
        Box(s, d, (Loop(n, step(source), step(destination)),) if n > 1 else ())
        for s, d, n in zip(source_at.tolist(), destination_at.tolist(), lengths.tolist(), strict=True)
    ]
    folded = _fold(boxes)
    while len(folded) < len(boxes):
        boxes, folded = folded, _fold(folded)
    return boxes


def _fold(boxes: list[Box]) -> list[Box]:
    """Replace every longest row of equal boxes at equal distances by one box with one more loop."""
    folded, i = [], 0
    while i < len(boxes):
        first, following, n = boxes[i], boxes[min(i + 1, len(boxes) - 1)], 1
        source_stride = following.source_offset - first.source_offset
        destination_stride = following.destination_offset - first.destination_offset
        while i + n < len(boxes) and boxes[i + n] == first + Box(n * source_stride, n * destination_stride):
            n += 1
        loops = (Loop(n, source_stride, destination_stride), *first.loops) if n > 1 else first.loops
        folded.append(Box(first.source_offset, first.destination_offset, loops))
        i += n
    return folded
