"""Mixed-radix axes: where positions lie in memory, and how two sides' positions pair up.

A logical axis is a list of digits (extent, stride in bytes), outer first; an ordinary axis has one. This one notion
carries kernel blocks inside logical blocks, split head dims, and everything else that is "an axis in two parts".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.manifest import Axis

Ints: TypeAlias = npt.NDArray[np.int64]
Radix: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Loop:
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
        return Box(
            self.source_offset + inner.source_offset,
            self.destination_offset + inner.destination_offset,
            self.loops + inner.loops,
        )


def radix(axes: Iterable[Axis], name: str) -> Radix:
    """The digits of a logical axis, with those merged that lie regularly inside one another."""
    digits: list[tuple[int, int]] = []
    for axis in axes:
        if axis.name != name or axis.extent == 1:
            continue
        if digits and digits[-1][1] == axis.extent * axis.stride:
            digits[-1] = (digits[-1][0] * axis.extent, axis.stride)
        else:
            digits.append((axis.extent, axis.stride))
    return tuple(digits)


def offsets(positions: Ints, digits: Radix) -> Ints:
    """Byte offsets of positions along an axis. Positions must be in range: they are checked by `bind`."""
    if not digits:
        return np.zeros_like(positions)
    if len(digits) == 1:
        return positions * digits[0][1]
    total = np.zeros_like(positions)
    for extent, stride in reversed(digits[1:]):
        total += positions % extent * stride
        positions = positions // extent
    return total + positions * digits[0][1]


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
    source_step, destination_step = (digits[-1][1] if digits else 0 for digits in (source, destination))
    boxes = [
        Box(int(s), int(d), (Loop(int(n), source_step, destination_step),) if n > 1 else ())
        for s, d, n in zip(source_at, destination_at, lengths, strict=True)
    ]
    folded = _fold(boxes)
    while len(folded) < len(boxes):
        boxes, folded = folded, _fold(folded)
    return boxes


def _fold(boxes: list[Box]) -> list[Box]:
    """Replace every longest row of equal boxes at equal distances by one box with one more loop."""
    folded, i = [], 0
    while i < len(boxes):
        first, n = boxes[i], 1
        if i + 1 < len(boxes):
            source_stride = boxes[i + 1].source_offset - first.source_offset
            destination_stride = boxes[i + 1].destination_offset - first.destination_offset
            while (
                i + n < len(boxes)
                and boxes[i + n].loops == first.loops
                and boxes[i + n].source_offset == first.source_offset + n * source_stride
                and boxes[i + n].destination_offset == first.destination_offset + n * destination_stride
            ):
                n += 1
        if n > 1:
            first = Box(
                first.source_offset,
                first.destination_offset,
                (Loop(n, source_stride, destination_stride), *first.loops),
            )
        folded.append(first)
        i += n
    return folded
