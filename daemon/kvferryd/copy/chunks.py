"""The packed stream of a transfer, cut into chunks that fit a staging slot.

Source and destination cut alike: where a run lies in a chunk follows from the moves' rows, lengths and numbers of
segments alone. Inside a chunk the pieces of moves follow one another; inside a piece its segments; inside a segment
its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferryd.copy.batch import Batch, Side, packed
from kvferryd.copy.moves import Move
from kvferryd.plan.rows import Pattern

ALIGN = 256
"""Pieces of moves begin at multiples of this, so that odd lengths in one do not narrow the next one's words."""
FIRST = 4
"""The first of several chunks is so many times smaller than the others: nothing overlaps with its gather."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows [first_row, first_row + rows) of segments [first, first + segments) of a move, packed at `offset`."""

    move: Move
    first: int
    segments: int
    first_row: int
    rows: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.segments * self.rows * self.move.pattern.nbytes

    def gather(self, address: int, slot: int) -> Batch:
        """`address`: where the move's source region begins."""
        return self._batch(self._part(self.move.source(address)), self._packed(slot))

    def scatter(self, slot: int, address: int) -> Batch:
        """`address`: where the move's destination region begins."""
        return self._batch(self._packed(slot), self._part(self.move.destination(address)))

    def _batch(self, source: Side, destination: Side) -> Batch:
        return Batch(self.move.pattern.nbytes, self.rows, source, destination)

    def _part(self, side: Side) -> Side:
        return side.part(self.first, self.segments, self.first_row)

    def _packed(self, slot: int) -> Side:
        nbytes = self.move.pattern.nbytes
        starts = np.arange(self.segments, dtype=np.int64) * (self.rows * nbytes)
        return Side(slot + self.offset + starts, packed(self.rows, nbytes))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What one slot carries: `nbytes` from its start, of one source rank."""

    source_rank: int
    pieces: tuple[Piece, ...]
    nbytes: int

    def gather(self, sources: Mapping[int, int], slot: int) -> list[Batch]:
        """From the source's regions (addresses by region) into the slot at this address."""
        return [piece.gather(sources[piece.move.source_region], slot) for piece in self.pieces]

    def scatter(self, slot: int, destinations: Mapping[int, int]) -> list[Batch]:
        """From the slot at this address into the destination's regions (addresses by region)."""
        return [piece.scatter(slot, destinations[piece.move.destination_region]) for piece in self.pieces]


def cut(wanted: Iterable[Move], chunk_nbytes: int) -> list[Chunk]:
    """Chunks of at most `chunk_nbytes` (a slot, or less), in order, each of one source rank; the first of a rank that
    fills more than two is smaller."""
    assert chunk_nbytes >= ALIGN
    by_rank: dict[int, list[Move]] = {}
    for move in wanted:
        long = move.pattern.nbytes > chunk_nbytes
        pieces = [replace(move, pattern=p) for p in _shorter(move.pattern, chunk_nbytes)] if long else [move]
        by_rank.setdefault(move.source_rank, []).extend(pieces)
    return [
        Chunk(rank, tuple(pieces), pieces[-1].offset + pieces[-1].nbytes)
        for rank, found in by_rank.items()
        for pieces in _fill(found, chunk_nbytes)
    ]


def _fill(wanted: Sequence[Move], chunk_nbytes: int) -> Iterator[list[Piece]]:
    pieces: list[Piece] = []
    at = 0
    limit = chunk_nbytes // FIRST if sum(move.nbytes for move in wanted) > 2 * chunk_nbytes else chunk_nbytes
    for move in wanted:
        nbytes, first, row = move.pattern.nbytes, 0, 0
        whole = move.rows * nbytes <= chunk_nbytes  # else a segment's rows go to several chunks
        while first < move.segments:
            at = -(-at // ALIGN) * ALIGN
            fit = (limit - at) // (nbytes * move.rows if whole else nbytes)
            if fit < 1:
                if pieces:
                    yield pieces
                pieces, at, limit = [], 0, chunk_nbytes
                continue
            segments = min(fit, move.segments - first) if whole else 1
            rows = move.rows if whole else min(fit, move.rows - row)
            pieces.append(Piece(move, first, segments, row, rows, at))
            at += pieces[-1].nbytes
            row = (row + rows) % move.rows
            first += segments if row == 0 else 0
    if pieces:
        yield pieces


@functools.lru_cache(maxsize=64)
def _shorter(pattern: Pattern, limit: int) -> list[Pattern]:
    """The same bytes in runs of at most `limit`. Kept, because a GPU knows rows that it has by identity."""
    limit -= limit % ALIGN
    steps, whole = np.arange(0, pattern.nbytes, limit, dtype=np.int64), pattern.nbytes // limit
    source, destination = pattern.source_offsets[:, None], pattern.destination_offsets[:, None]
    return [
        Pattern((source + at).ravel(), (destination + at).ravel(), nbytes)
        for at, nbytes in ((steps[:whole], limit), (steps[whole:], pattern.nbytes % limit))
        if nbytes
    ]
