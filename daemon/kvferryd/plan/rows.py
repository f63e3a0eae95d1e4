"""The static half of binding: the runs inside one segment.

For a segment of L tokens the runs do not depend on which blocks it lies in: they are a list of offsets from the
segment's first byte. It is computed once per plan and length; a request then only adds its segments' offsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvferryd.plan.axes import Box, Ints, Loop, coalesce


class Boxes(NamedTuple):
    """A box of items of so many bytes, repeated from each of these offsets on: [side, offset]."""

    box: Box
    item: int
    origins: Ints


@dataclass(frozen=True, eq=False)
class Pattern:
    """Runs of equal length `nbytes` at these offsets from a segment's first byte, ascending by source."""

    source_offsets: Ints
    destination_offsets: Ints
    nbytes: int

    @cached_property
    def key(self) -> bytes:
        """Equal for patterns that begin at the same offsets, so that segments of different lengths can join."""
        return self.source_offsets.tobytes() + self.destination_offsets.tobytes()


def patterns(boxes: Sequence[Boxes], tokens: Sequence[Loop]) -> list[Pattern]:
    """Maximal runs of a segment, grouped by length.

    The segment lies inside the innermost digit of both slot axes, so that its tokens are loops like any other.
    """
    found = []
    for box, item, origins in boxes:
        loops, nbytes = _contiguous([*box.loops, *tokens], item)
        at = origins + np.array([[box.source_offset], [box.destination_offset]])
        for loop in loops:
            steps = np.outer((loop.source_stride, loop.destination_stride), np.arange(loop.extent))
            at = (at[:, :, None] + steps[:, None, :]).reshape(2, -1)
        found.append((*at, np.full(at.shape[1], nbytes, dtype=np.int64)))
    source, destination, lengths = coalesce(*(np.concatenate(column) for column in zip(*found, strict=True)))
    chosen = ((int(length), lengths == length) for length in np.unique(lengths))
    return [Pattern(source[of_length], destination[of_length], length) for length, of_length in chosen]


def most_runs(boxes: Sequence[Boxes], tokens: Sequence[Loop]) -> int:
    """How many runs `patterns` has, before any are joined; none is made."""
    return sum(
        origins.shape[1] * math.prod(loop.extent for loop in _contiguous([*box.loops, *tokens], item)[0])
        for box, item, origins in boxes
    )


def _contiguous(loops: list[Loop], nbytes: int) -> tuple[list[Loop], int]:
    """Take into the run every loop whose steps follow one another without a gap on both sides."""
    loops = [loop for loop in loops if loop.extent > 1]
    while inner := next((loop for loop in loops if loop.source_stride == nbytes == loop.destination_stride), None):
        loops.remove(inner)
        nbytes *= inner.extent
    return loops, nbytes
