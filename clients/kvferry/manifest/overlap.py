"""Whether two components of a group lie on the same bytes: then one element would be written over another.

A component that keeps the rule of strides is a nest: copies of a smaller nest, `stride` bytes apart and not sharing a
byte, down to runs of adjacent bytes. So two footprints are compared level by level and never enumerated: K and V that
are interleaved by slot, or all layers of a block, come apart at the level at which they are interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from kvferry.manifest.model import Component

STEPS, COMPARISON = 300_000, 30
"""The work of one call, about 30 ms; what one comparison of two nests takes of it. Looking one up takes 1."""

Axes: TypeAlias = tuple[tuple[int, int], ...]
"""(stride, extent), the largest stride first, extents of more than one position only."""


@dataclass(frozen=True, slots=True)
class Nest:
    """[start, stop): from the first byte to one past the last. No axes: every byte between is used."""

    start: int
    stop: int
    axes: Axes
    index: int

    def inner(self, position: int = 0) -> Nest:
        """The copy at a position of the outermost axis."""
        stride, extent = self.axes[0]
        start = self.start + position * stride
        return Nest(start, start + self.stop - self.start - (extent - 1) * stride, self.axes[1:], self.index)


class _TooMuch(Exception):
    """The work is more than STEPS."""


def overlap(components: Sequence[Component]) -> tuple[int, int] | None:
    """Indices of two components, the earlier first, that share a byte of their region; None where none is known to.

    All must be of one region and keep the rule of strides. What it returns is always true. After STEPS what is left is
    taken to be apart: a manifest comes from a peer, and one could be made to take for ever. That suffices for 700
    components of one shape that all reach into each other; those of real caches are at most some hundred.
    """
    nests = sorted((_nest(component, index) for index, component in enumerate(components)), key=attrgetter("start"))
    try:
        return _Search().first(nests)
    except _TooMuch:
        return None


def _nest(component: Component, index: int) -> Nest:
    run, axes = component.itemsize, list[tuple[int, int]]()
    for stride, extent in sorted((axis.stride, axis.extent) for axis in component.axes if axis.extent > 1):
        if not axes and stride == run:  # no gap between the positions
            run *= extent
        elif axes and stride == axes[-1][0] * axes[-1][1]:  # two digits of one number
            axes[-1] = axes[-1][0], axes[-1][1] * extent
        else:
            axes.append((stride, extent))
    return Nest(component.offset, component.offset + component.nbytes_spanned, tuple(reversed(axes)), index)


class _Search:
    def __init__(self) -> None:
        self._left = STEPS

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooMuch

    def first(self, nests: Sequence[Nest]) -> tuple[int, int] | None:
        """nests: by start. Of pairs of the same shapes at the same distance only one is compared."""
        shapes: dict[tuple[int, Axes], int] = {}
        reaching: list[tuple[int, Nest]] = []
        apart: set[tuple[int, int, int]] = set()
        for nest in nests:
            shape = shapes.setdefault((nest.stop - nest.start, nest.axes), len(shapes))
            reaching = [(of, other) for of, other in reaching if other.stop > nest.start]
            self._spend(len(reaching))
            for of, other in reaching:
                pair = of, shape, nest.start - other.start
                if pair not in apart:
                    if self._meet(other, nest):
                        return min(other.index, nest.index), max(other.index, nest.index)
                    apart.add(pair)
            reaching.append((shape, nest))
        return None

    def _meet(self, a: Nest, b: Nest) -> bool:
        """Whether they share a byte."""
        self._spend(COMPARISON)
        if a.start >= b.stop or b.start >= a.stop:
            return False
        if not a.axes and not b.axes:
            return True
        if a.axes[:1] < b.axes[:1]:
            a, b = b, a
        stride, extent = a.axes[0]
        first, least = a.inner(), 0
        if b.axes and b.axes[0][0] == stride:  # only how far apart the positions of the two are matters
            least, b = 1 - b.axes[0][1], b.inner()
        # The positions at which it reaches into the span of the other.
        low = max(least, (b.start - first.stop) // stride + 1)
        high = min(extent, -((first.start - b.stop) // stride))
        return any(self._meet(a.inner(position), b) for position in range(low, high))
