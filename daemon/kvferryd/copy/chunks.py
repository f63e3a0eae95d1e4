"""The packed stream of a transfer, cut into chunks that fit a staging slot.

Source and destination cut alike: where a run lies in a chunk follows from the moves' rows, lengths and numbers of
segments alone. Inside a chunk the pieces of moves follow one another; inside a piece its segments; inside a segment
its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferryd.copy.batch import Batch, Side, packed, shorter
from kvferryd.copy.moves import Move

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

    def source(self, regions: Mapping[int, int]) -> Side:
        return self._part(self.move.batch.source, regions[self.move.source_region])

    def destination(self, regions: Mapping[int, int]) -> Side:
        return self._part(self.move.batch.destination, regions[self.move.destination_region])

    def packed(self, slot: int) -> Side:
        nbytes = self.move.batch.nbytes
        starts = np.arange(self.segments, dtype=np.int64) * (self.rows * nbytes)
        return Side(slot + self.offset + starts, packed(self.rows, nbytes))

    def batch(self, source: Side, destination: Side) -> Batch:
        return Batch(self.move.batch.nbytes, self.rows, source, destination)

    def _part(self, side: Side, region: int) -> Side:
        return side.part(self.first, self.segments, self.first_row).at(region)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A slot's content: `nbytes` from its start, of one source rank."""

    source_rank: int
    pieces: tuple[Piece, ...]
    nbytes: int

    def gather(self, sources: Mapping[int, int], slot: int) -> list[Batch]:
        """From the source's regions (addresses by region) into the slot at this address."""
        return [piece.batch(piece.source(sources), piece.packed(slot)) for piece in self.pieces]

    def scatter(self, slot: int, destinations: Mapping[int, int]) -> list[Batch]:
        """From the slot at this address into the destination's regions (addresses by region)."""
        return [piece.batch(piece.packed(slot), piece.destination(destinations)) for piece in self.pieces]

    def collect(self, destinations: Mapping[int, int], slot: int) -> list[Batch]:
        """From the destination's regions into a slot: what `gather` has packed, if all has arrived."""
        return [piece.batch(piece.destination(destinations), piece.packed(slot)) for piece in self.pieces]


def cut(wanted: Iterable[Move], chunk_nbytes: int) -> list[Chunk]:
    """The chunks of all source ranks, as of `cut_by_rank`."""
    return [chunk for chunks in cut_by_rank(wanted, chunk_nbytes).values() for chunk in chunks]


def cut_by_rank(wanted: Iterable[Move], chunk_nbytes: int) -> dict[int, list[Chunk]]:
    """Chunks of at most `chunk_nbytes` (a slot, or less), in order; the first of a source rank that fills more than two
    is smaller."""
    assert chunk_nbytes >= ALIGN
    by_rank: dict[int, list[Move]] = {}
    for move in wanted:
        moves = [move] if move.batch.nbytes <= chunk_nbytes else _shorter(move, chunk_nbytes - chunk_nbytes % ALIGN)
        by_rank.setdefault(move.source_rank, []).extend(moves)
    return {rank: list(_fill(rank, found, chunk_nbytes)) for rank, found in by_rank.items()}


def _fill(rank: int, wanted: Sequence[Move], chunk_nbytes: int) -> Iterator[Chunk]:
    pieces: list[Piece] = []
    end = 0
    limit = chunk_nbytes // FIRST if sum(m.batch.total_nbytes for m in wanted) > 2 * chunk_nbytes else chunk_nbytes
    for move in wanted:
        batch, first, row = move.batch, 0, 0
        whole = batch.rows * batch.nbytes <= chunk_nbytes  # else a segment's rows go to several chunks
        while (left := len(batch.source.segments) - first) > 0:
            at = -(-end // ALIGN) * ALIGN
            fit = (limit - at) // (batch.nbytes * batch.rows if whole else batch.nbytes)
            if fit < 1:
                if pieces:
                    yield Chunk(rank, tuple(pieces), end)
                pieces, end, limit = [], 0, chunk_nbytes
                continue
            segments = min(fit, left) if whole else 1
            rows = batch.rows if whole else min(fit, batch.rows - row)
            pieces.append(Piece(move, first, segments, row, rows, at))
            end = at + segments * rows * batch.nbytes
            row = (row + rows) % batch.rows
            first += segments if row == 0 else 0
    if pieces:
        yield Chunk(rank, tuple(pieces), end)


def _shorter(move: Move, limit: int) -> Iterator[Move]:
    """The same bytes in runs of at most `limit`."""
    batch = move.batch
    tables = (shorter(side.table, batch.nbytes, limit) for side in (batch.source, batch.destination))
    for nbytes, source, destination in zip((limit, batch.nbytes % limit), *tables, strict=True):
        sides = Side(batch.source.segments, source), Side(batch.destination.segments, destination)
        if nbytes:
            yield move._replace(batch=Batch(nbytes, len(source.offsets), *sides))
