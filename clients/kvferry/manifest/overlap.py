"""Whether two components of a group lie on the same bytes: then one element would be written over another.

A component that keeps the rule of strides is a nest: copies of a smaller nest, `stride` bytes apart and not sharing a
byte, down to runs of adjacent bytes. So footprints are compared level by level and never enumerated: K and V that are
interleaved by slot, or all layers of a block, come apart at the level at which they are interleaved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, groupby, pairwise
from operator import attrgetter
from typing import TypeAlias

from kvferry.manifest.model import Component

STEPS = 10_000
"""Comparisons of single pairs, in one call; about 30 ms."""

Axes: TypeAlias = tuple[tuple[int, int], ...]
"""(stride, extent), the largest stride first, extents of more than one position only."""


@dataclass(frozen=True, slots=True)
class Nest:
    """[start, stop): from the first byte to one past the last. No axes: every byte between is used."""

    start: int
    stop: int
    axes: Axes
    index: int

    @property
    def outer(self) -> Axes:
        return self.axes[:1]

    def inner(self, position: int = 0) -> Nest:
        """The copy at a position of the outermost axis."""
        stride, extent = self.axes[0]
        start = self.start + position * stride
        return Nest(start, start + self.stop - self.start - (extent - 1) * stride, self.axes[1:], self.index)


def overlap(components: Sequence[Component]) -> tuple[int, int] | None:
    """Indices of two components, the earlier first, that share a byte of their region; None where none is known to.

    All must be of one region and keep the rule of strides. A result is always true. It misses nothing where components
    that reach into each other have the same strides there, as those of real caches have; others are compared pair by
    pair, and after STEPS comparisons what is left is taken to be apart.
    """
    return _Search().among([_nest(component, index) for index, component in enumerate(components)])


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
        self._steps = STEPS

    def among(self, nests: Sequence[Nest]) -> tuple[int, int] | None:
        for cluster in _clusters(nests):
            by_outer = groupby(sorted(cluster, key=attrgetter("axes")), attrgetter("outer"))
            families = [list(family) for _, family in by_outer]
            for i, family in enumerate(families):
                found = self._alike(family)
                if not found and self._steps:
                    others = chain.from_iterable(families[i + 1 :])
                    found = self._pairs((a, b) for b in others for a in family)
                if found:
                    return found
        return None

    def _alike(self, nests: list[Nest]) -> tuple[int, int] | None:
        """As `overlap`, for nests with one outermost axis."""
        if not nests[0].axes:
            nests.sort(key=attrgetter("start"))
            return next((_both(a, b) for a, b in pairwise(nests) if b.start < a.stop), None)
        inner = [nest.inner() for nest in nests]
        if max(nest.stop for nest in inner) - min(nest.start for nest in inner) <= nests[0].axes[0][0]:
            return self.among(inner)  # no copy reaches into the next position: one position stands for all
        return self._pairs(combinations(nests, 2))

    def _pairs(self, pairs: Iterable[tuple[Nest, Nest]]) -> tuple[int, int] | None:
        for a, b in pairs:
            if self._meet(a, b):
                return _both(a, b)
            if not self._steps:
                break
        return None

    def _meet(self, a: Nest, b: Nest) -> bool:
        """Whether they share a byte, as far as STEPS allow to know."""
        if not self._steps:
            return False
        self._steps -= 1
        if a.start >= b.stop or b.start >= a.stop:
            return False
        if not a.axes and not b.axes:
            return True
        if a.outer < b.outer:
            a, b = b, a
        stride, extent = a.axes[0]
        first, least = a.inner(), 0
        if b.axes and b.axes[0][0] == stride:  # only how far apart the positions of the two are matters
            least, b = 1 - b.axes[0][1], b.inner()
        # The positions at which it reaches into the span of the other.
        low = max(least, (b.start - first.stop) // stride + 1)
        high = min(extent, -((first.start - b.stop) // stride))
        for position in range(low, high):
            if self._meet(a.inner(position), b):
                return True
            if not self._steps:
                break
        return False


def _clusters(nests: Sequence[Nest]) -> Iterator[list[Nest]]:
    """Groups whose spans overlap, directly or through others; none of a single nest."""
    cluster: list[Nest] = []
    stop = 0
    for nest in sorted(nests, key=attrgetter("start")):
        if nest.start >= stop:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(nest)
        stop = max(stop, nest.stop)
    if len(cluster) > 1:
        yield cluster


def _both(a: Nest, b: Nest) -> tuple[int, int]:
    return min(a.index, b.index), max(a.index, b.index)
