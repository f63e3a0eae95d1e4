"""The static half of binding: the runs inside one segment.

For a segment of L tokens the runs do not depend on which blocks it lies in: they are a list of offsets from the
segment's first byte. It is computed once per plan and length; a request then only adds its segments' offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferryd.plan.axes import Box, Ints, Loop, Radix


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Runs of equal length `nbytes` at these offsets from a segment's first byte, ascending by source.

    key: equal for patterns that begin at the same offsets, so that segments of different lengths can join.
    joints: lengths of a joined run at which it would touch the next one of its own pattern.
    """

    source_offsets: Ints
    destination_offsets: Ints
    nbytes: int
    key: bytes
    joints: frozenset[int]


def patterns(
    boxes: Sequence[tuple[Box, int]], tokens: int, source_slot: Radix, destination_slot: Radix
) -> list[Pattern]:
    """Maximal runs of a segment of `tokens` consecutive slots, grouped by length.

    The segment lies inside the innermost digit of both slot axes, so that tokens are one more regular loop.
    """
    source_step, destination_step = (digits[-1][1] if digits else 0 for digits in (source_slot, destination_slot))
    token_loop = (Loop(tokens, source_step, destination_step),) if tokens > 1 else ()
    sources, destinations, lengths = [], [], []
    for box, item in boxes:
        loops, nbytes = _contiguous([*box.loops, *token_loop], item)
        source = _expand(box.source_offset, [(loop.extent, loop.source_stride) for loop in loops])
        sources.append(source)
        destinations.append(_expand(box.destination_offset, [(loop.extent, loop.destination_stride) for loop in loops]))
        lengths.append(np.full(len(source), nbytes, dtype=np.int64))
    source, destination, nbytes_of = coalesce(
        np.concatenate(sources), np.concatenate(destinations), np.concatenate(lengths)
    )
    found = []
    for length in np.unique(nbytes_of):
        chosen = nbytes_of == length
        s, d = source[chosen], destination[chosen]
        gaps_s, gaps_d = np.diff(s), np.diff(d)
        joints = frozenset(gaps_s[gaps_s == gaps_d].tolist())
        found.append(Pattern(s, d, int(length), s.tobytes() + d.tobytes(), joints))
    return found


def coalesce(source: Ints, destination: Ints, nbytes: Ints) -> tuple[Ints, Ints, Ints]:
    """Sort runs by source offset and join those that touch on both sides."""
    if len(source) < 2:
        return source, destination, nbytes
    order = np.argsort(source, kind="stable")
    source, destination, nbytes = source[order], destination[order], nbytes[order]
    ends = (source[:-1] + nbytes[:-1] != source[1:]) | (destination[:-1] + nbytes[:-1] != destination[1:])
    first = np.concatenate(([0], np.flatnonzero(ends) + 1))
    return source[first], destination[first], np.add.reduceat(nbytes, first)


def _contiguous(loops: list[Loop], nbytes: int) -> tuple[list[Loop], int]:
    """Take into the run every loop whose steps follow one another without a gap on both sides."""
    loops = [loop for loop in loops if loop.extent > 1]
    while True:
        inner = next((loop for loop in loops if loop.source_stride == nbytes == loop.destination_stride), None)
        if inner is None:
            return loops, nbytes
        loops.remove(inner)
        nbytes *= inner.extent


def _expand(offset: int, loops: Sequence[tuple[int, int]]) -> Ints:
    """Every offset of nested loops of (extent, stride)."""
    out = np.array([offset], dtype=np.int64)
    for extent, stride in loops:
        out = (out[:, None] + np.arange(extent, dtype=np.int64) * stride).ravel()
    return out
