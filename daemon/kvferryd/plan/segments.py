"""Segments: tokens inside one source block and one destination block that lie regularly in both.

Under context parallelism a side holds rows of `interleave` tokens, and other ranks what is between. Tokens that two
sides share come round again and again: rows of some length, each so many slots further on either side. A strand is such
a row with all its repetitions; without context parallelism all tokens are one strand. Strands are cut into segments
where either side's block ends, so that a segment has whole rows or a part of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.manifest import TokenShard
from kvferryd.plan.axes import Ints, Loop, Radix, coalesce, divided, offsets

ROUND = 4096
"""Rounds of more tokens than this are looked at row by row; shorter ones are kept."""


class Steps(NamedTuple):
    """How tokens follow one another: `row` of them in consecutive slots, and such rows again and again, so many slots
    further on either side."""

    row: int
    source: int
    destination: int

    def loops(self, tokens: int, source_stride: int, destination_stride: int) -> tuple[Loop, ...]:
        """The loops of a segment of so many tokens, for slots of these bytes."""
        row = min(tokens, self.row)
        rows = Loop(tokens // row, self.source * source_stride, self.destination * destination_stride)
        return tuple(loop for loop in (rows, Loop(row, source_stride, destination_stride)) if loop.extent > 1)


EVERY = Steps(1, 1, 1)
"""All tokens, on both sides."""


ByLength: TypeAlias = tuple[tuple[int, Any], ...]
"""(length, an index of the segments that have it), ascending."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments: the bytes at which each begins, and their tokens."""

    steps: Steps
    source_offsets: Ints
    destination_offsets: Ints
    lengths: ByLength

    def __len__(self) -> int:
        return len(self.source_offsets)

    @property
    def tokens(self) -> int:
        """The tokens of all of them."""
        return sum(length * times for length, times in self.counted)

    @property
    def counted(self) -> list[tuple[int, int]]:
        """(length, how many segments have it), ascending."""
        every = range(len(self))
        return [
            (length, len(every[chosen] if isinstance(chosen, slice) else chosen)) for length, chosen in self.lengths
        ]


class Side(NamedTuple):
    """Strands on one side: the local token at which each begins, and what their steps are here."""

    at: Ints
    row: int
    step: int

    def local(self, tokens: Ints) -> Ints:
        """The local token that is this token of each strand."""
        if self.step == 1:
            return self.at + tokens
        return self.at + offsets(tokens, ((0, self.step), (self.row, 1)) if self.row > 1 else ((0, self.step),))

    def before(self, local: Ints | int) -> Ints:
        """How many tokens of each strand lie before this local token."""
        distance = np.maximum(local - self.at, 0)
        if self.step == 1:
            return distance
        rows, rest = divided(distance, self.step)
        return rows * self.row + np.minimum(rest, self.row)

    def of(self, which: npt.NDArray[Any]) -> Side:
        return Side(self.at[which], self.row, self.step)

    def counted_from(self, first_token: int) -> Side:
        """The same in slots of a table that begins at this local token."""
        return self if first_token == 0 else Side(self.at - first_token, self.row, self.step)


Pairs: TypeAlias = tuple[tuple[Side, Side], ...]
"""Strands by their steps, as the source and as our side see them."""


class Strands(NamedTuple):
    """Strands of equal steps, and of each the tokens [first, stop)."""

    source: Side
    own: Side
    first: Ints
    stop: Ints

    @property
    def steps(self) -> Steps:
        return Steps(self.source.row, self.source.step, self.own.step)

    @property
    def source_span(self) -> tuple[int, int]:
        """The source's first local token, and the one after its last."""
        first, last = self.source.local(self.first), self.source.local(self.stop - 1)
        return min(first.tolist()), max(last.tolist()) + 1  # numpy takes longer for a few

    @property
    def own_tokens(self) -> Ints:
        """Every token of them, as a local token of our side."""
        count = self.stop - self.first
        strand = np.repeat(np.arange(len(count)), count)
        nth = np.arange(len(strand)) - (count.cumsum() - count)[strand]
        return self.own.of(strand).local(self.first[strand] + nth)

    def cut(self, first_tokens: tuple[int, int], grains: tuple[int, int]) -> tuple[Ints, Ints, ByLength]:
        """The segments: the local token of either side where each begins, counted from its table's first; their tokens.

        grains: a side's tokens that lie regularly, from its table's first token on.
        """
        sides = self.source.counted_from(first_tokens[0]), self.own.counted_from(first_tokens[1])
        if len(self.first) == 1 and (regular := self._regular(sides, grains)) is not None:
            tokens, lengths = regular
            return sides[0].local(tokens), sides[1].local(tokens), lengths
        ends = (self.stop - self.first).cumsum()
        shift = ends - self.stop  # from a strand's tokens to a count over those of all strands
        edges = (self._edges(side, grain, shift) for side, grain in zip(sides, grains, strict=True))
        starts = distinct(np.concatenate([self.first + shift, *edges]))
        strand = np.searchsorted(ends, starts, side="right")
        if sides[0].row > 1 and len(inside := self._inside(starts, _lengths(starts, ends), shift[strand])):
            starts = distinct(np.concatenate([starts, inside]))
            strand = np.searchsorted(ends, starts, side="right")
        tokens = starts - shift[strand]
        lengths = _by_length(_lengths(starts, ends))
        return sides[0].of(strand).local(tokens), sides[1].of(strand).local(tokens), lengths

    def _regular(self, sides: tuple[Side, Side], grains: tuple[int, int]) -> tuple[Ints, ByLength] | None:
        """The first token of each segment of a single strand, and their tokens, if one side's edges are among the
        other's, which lie regularly; else None."""
        (source, own), (grain, own_grain) = sides, grains
        if source.row > 1 or grain % source.step or own_grain % own.step:
            return None
        first, stop = int(self.first[0]), int(self.stop[0])
        edge = first - (int(source.at[0]) + first * source.step) % grain // source.step
        own_edge = first - (int(own.at[0]) + first * own.step) % own_grain // own.step
        (length, edge), (longer, other) = sorted(((grain // source.step, edge), (own_grain // own.step, own_edge)))
        if longer % length or (other - edge) % length:
            return None
        starts = np.arange(edge, stop, length)
        starts[0], last = first, edge + (len(starts) - 1) * length
        return starts, _evenly(len(starts), length, min(edge + length, stop) - first, stop - max(last, first))

    def _edges(self, side: Side, grain: int, shift: Ints) -> Ints:
        """The first tokens of strands that lie in another grain than those before them."""
        first, last = side.local(self.first) // grain, side.local(self.stop - 1) // grain
        number = last - first
        strand = np.repeat(np.arange(len(number)), number)
        nth = np.arange(len(strand)) - (number.cumsum() - number)[strand]
        return side.of(strand).before((first[strand] + 1 + nth) * grain) + shift[strand]

    def _inside(self, starts: Ints, lengths: Ints, shift: Ints) -> Ints:
        """The places at which segments are cut once more, so that they have whole rows or a part of one."""
        row, first = self.source.row, starts - shift
        stop = first + lengths
        whole, part = -(-first // row) * row, stop // row * row
        found = [(at + shift)[(first < at) & (at < stop)] for at in (whole, part)]
        return np.concatenate(found)


def shared(
    strands: Pairs, own: TokenShard, tokens: tuple[int, int], own_first: int, source_first: int = 0
) -> list[Strands]:
    """The global tokens [start, stop) that both sides hold, from these local tokens of either side on. strands: those
    in which the two sides meet, see `strands_of`."""
    begin, end = max(local_tokens(own, tokens[0]), own_first), local_tokens(own, tokens[1])
    found = []
    for theirs, ours in strands:
        first, stop = ours.before(begin), ours.before(end)
        if source_first:
            first = np.maximum(first, theirs.before(source_first))
        some = first < stop
        if all(has := some.tolist()):
            found.append(Strands(theirs, ours, first, stop))
        elif any(has):
            found.append(Strands(theirs.of(some), ours.of(some), first[some], stop[some]))
    return found


@dataclass(frozen=True, eq=False)
class Meeting:
    """How blocks of the two sides meet: all that decides where tokens are cut into segments but the two tables. Copies
    in which it is the same share one, so that `bind` cuts once for all of them."""

    source_shard: TokenShard
    own_shard: TokenShard
    source_block: int
    own_block: int
    source_slot: Radix
    own_slot: Radix
    window: int | None

    @cached_property
    def grains(self) -> tuple[int, int]:
        """Slots that lie regularly in memory, on either side: the innermost digit's extent."""
        source, own = (slot[-1][0] if slot else 1 for slot in (self.source_slot, self.own_slot))
        return source, own

    @cached_property
    def _strands(self) -> Pairs | None:
        return strands_of(self.source_shard, self.own_shard)

    def strands(self, tokens: tuple[int, int]) -> Pairs:
        """The strands in which tokens that both sides hold are found; where a round of them is long, of these alone."""
        known = self._strands
        return strands_between(self.source_shard, self.own_shard, tokens) if known is None else known

    def dropped(self, tokens: tuple[int, int], theirs: int) -> int:
        """How many of the source's first local tokens it has dropped from its sliding window, though the destination
        may have room for them. theirs: the first local token of its table."""
        if self.window is None:
            return 0
        needed = local_tokens(self.source_shard, max(tokens[0], tokens[1] - self.window + 1))
        return theirs if theirs <= needed else 0


def strands_of(source: TokenShard, own: TokenShard) -> Pairs | None:
    """The strands of all tokens; None where their round is too long to be spelled out."""
    period = math.lcm(_ring(source), _ring(own))
    if period > ROUND:
        return None
    return tuple(_of_equal_rows(_intervals(source, own, (0, period)), period // source.size, period // own.size))


def strands_between(source: TokenShard, own: TokenShard, tokens: tuple[int, int]) -> Pairs:
    """The strands of these tokens, in which no row comes again."""
    length = tokens[1] - tokens[0]
    return tuple(_of_equal_rows(_intervals(source, own, tokens), length, length))


def _of_equal_rows(intervals: tuple[Ints, Ints, Ints], source_step: int, own_step: int) -> Iterator[tuple[Side, Side]]:
    source_at, own_at, count = intervals
    for row in distinct(count).tolist():
        steps = EVERY if row == source_step == own_step else Steps(row, source_step, own_step)
        of_row = np.flatnonzero(count == row)
        yield Side(source_at[of_row], steps.row, steps.source), Side(own_at[of_row], steps.row, steps.destination)


def _intervals(source: TokenShard, own: TokenShard, tokens: tuple[int, int]) -> tuple[Ints, Ints, Ints]:
    """The longest intervals of local tokens that are the same tokens of [start, stop) on both sides: (source, own,
    count)."""
    start, stop = tokens
    edges = [np.array([start, stop], dtype=np.int64)]
    for shard in (source, own):
        if shard.size > 1:
            edges.append(np.arange(start - start % shard.interleave, stop, shard.interleave)[1:])
    cuts = distinct(np.concatenate(edges))
    first, count = cuts[:-1], np.diff(cuts)
    held = np.ones(len(first), dtype=bool)
    local = []
    for shard in (source, own):
        held &= first // shard.interleave % shard.size == shard.rank
        local.append(first // _ring(shard) * shard.interleave + first % shard.interleave if shard.size > 1 else first)
    # Equal rings on both sides: global neighbours may be far apart, local ones are not.
    return coalesce(local[0][held], local[1][held], count[held])


def _ring(shard: TokenShard) -> int:
    """Tokens after which its turn comes again."""
    return shard.size * shard.interleave if shard.size > 1 else 1


def local_tokens(shard: TokenShard, token: int) -> int:
    """How many of the global tokens before `token` lie on this shard."""
    ring = shard.interleave * shard.size
    inside = token % ring - shard.rank * shard.interleave
    return token // ring * shard.interleave + min(max(inside, 0), shard.interleave)


def global_token(shard: TokenShard, local: int) -> int:
    """The global token that is local token `local` of this shard."""
    ring = shard.interleave * shard.size
    return local // shard.interleave * ring + shard.rank * shard.interleave + local % shard.interleave


def _lengths(starts: Ints, ends: Ints) -> Ints:
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1] = ends[-1] - starts[-1]
    return lengths


def _evenly(count: int, length: int, head: int, tail: int) -> ByLength:
    """So many segments of this length, but for the first one and the last."""
    every, found = range(count), {length: slice(int(head < length), count - int(tail < length))}
    if head == tail < length:
        found[head] = slice(0, count, max(count - 1, 1))
    else:
        found |= {each: at for each, at in ((head, slice(0, 1)), (tail, slice(count - 1, count))) if each < length}
    return tuple(sorted((each, at) for each, at in found.items() if every[at]))


def _by_length(tokens: Ints) -> ByLength:
    """Segments of so many tokens, grouped."""
    return tuple((length, (tokens == length).nonzero()[0]) for length in distinct(tokens).tolist())


def distinct(values: Ints) -> Ints:
    """Sorted, each once. Runs of ascending values make a stable sort a merge: a tenth of the time of np.unique."""
    values = values.copy()
    values.sort(kind="stable")
    fresh = np.empty(len(values), dtype=bool)
    fresh[:1] = True
    np.not_equal(values[1:], values[:-1], out=fresh[1:])
    return values[fresh]
