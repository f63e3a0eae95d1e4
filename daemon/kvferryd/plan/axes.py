"""Mixed-radix axes: where positions lie in memory, and how two sides' positions pair up.

A logical axis is a list of digits (extent, stride in bytes), outer first; an ordinary axis has one. This one notion
carries kernel blocks inside logical blocks, split head dims, and everything else that is "an axis in two parts".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Radix: TypeAlias = tuple[tuple[int, int], ...]


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
        source, destination = (
            self.source_offset + inner.source_offset,
            self.destination_offset + inner.destination_offset,
        )
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


def step(digits: Radix) -> int:
    """Bytes between neighbouring positions of the innermost digit."""
    return digits[-1][1] if digits else 0


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
