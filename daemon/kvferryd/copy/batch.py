"""A copy's work: rows times segments, with an address for every run on either side."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferryd.plan.axes import Ints

WIDEST = 16
"""Bytes of the widest access."""
PAGE_NBYTES = 64 << 10
"""The page of zeros is so long: zeros are copied from it, like anything else."""


@dataclass(frozen=True, eq=False)
class Table:
    """Static offsets of a segment's runs. Tables are known by identity: a GPU keeps the ones it has seen."""

    offsets: Ints

    @functools.cached_property
    def bits(self) -> int:
        """All offsets together, bit by bit: their lowest bit set says to what they are aligned."""
        return _bits(self.offsets)


@functools.lru_cache(maxsize=64)
def packed(rows: int, nbytes: int) -> Table:
    """Runs that follow one another without a gap."""
    return Table(np.arange(rows, dtype=np.int64) * nbytes)


@functools.lru_cache(maxsize=64)
def standing(rows: int) -> Table:
    """Runs that all begin at one place."""
    return Table(np.zeros(rows, dtype=np.int64))


@functools.lru_cache(maxsize=128)
def shorter(table: Table, nbytes: int, limit: int) -> tuple[Table, Table]:
    """Rows of runs of `limit` bytes, and of the rest of each run. Kept: a GPU knows tables by identity."""
    starts, whole = np.arange(0, nbytes, limit), nbytes // limit
    rows = (table.offsets[:, None] + starts).reshape(len(table.offsets), -1)
    return Table(rows[:, :whole].ravel()), Table(rows[:, whole:].ravel())


class Side(NamedTuple):
    """Run (s, r) begins at segments[s] + table.offsets[first_row + r]."""

    segments: Ints
    table: Table
    first_row: int = 0

    def at(self, address: int) -> Side:
        return Side(address + self.segments, self.table, self.first_row)

    def part(self, first: int, segments: int, first_row: int = 0) -> Side:
        """So many segments from the `first` on, and the rows of each from `first_row` on."""
        return Side(self.segments[first : first + segments], self.table, self.first_row + first_row)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Copy `rows` runs of `nbytes` bytes each in every segment, from `source` to `destination`.

    Either side's segments are addresses when it is run; until then offsets from the start of a region or a slot.
    """

    nbytes: int
    rows: int
    source: Side
    destination: Side

    def __post_init__(self) -> None:
        source, destination = self.source, self.destination
        assert len(source.segments) == len(destination.segments)
        assert source.first_row + self.rows <= len(source.table.offsets)
        assert destination.first_row + self.rows <= len(destination.table.offsets)

    def __len__(self) -> int:
        """Runs."""
        return self.rows * len(self.source.segments)

    def at(self, source: int, destination: int) -> Batch:
        """The same rows, with the sides' regions or slots at these addresses."""
        return Batch(self.nbytes, self.rows, self.source.at(source), self.destination.at(destination))

    @property
    def total_nbytes(self) -> int:
        return len(self) * self.nbytes

    @property
    def word(self) -> int:
        """The widest access in bytes, a power of two, at multiples of which every run begins and ends."""
        bits = self.nbytes | WIDEST
        for side in (self.source, self.destination):
            bits |= side.table.bits | _bits(side.segments)
        return bits & -bits


def _bits(offsets: Ints) -> int:
    return int(np.bitwise_or.reduce(offsets)) if len(offsets) else 0
