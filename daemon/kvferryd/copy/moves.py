"""From a bound plan to batches. Segments are grouped by length, never joined: every length has its own static rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.tables import BlockTable, Tables
from kvferryd.copy.batch import Batch, Side, Table
from kvferryd.plan import Bound, Plan, bind
from kvferryd.plan.axes import Ints
from kvferryd.plan.rows import Pattern

log = structlog.get_logger()
SAMPLED = 4
"""Blocks of each group in a `sample`."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Segments of equal length of one copy, and one pattern of runs that each of them repeats.

    The segments are offsets in bytes from the start of either region. The source of a staged transfer knows only its
    own; the destination's are then made up.
    """

    source_rank: int
    source_region: int
    destination_region: int
    pattern: Pattern
    source_segments: Ints
    destination_segments: Ints

    @property
    def rows(self) -> int:
        return len(self.pattern.source_offsets)

    @property
    def segments(self) -> int:
        return len(self.source_segments)

    @property
    def nbytes(self) -> int:
        return self.rows * self.segments * self.pattern.nbytes

    def source(self, address: int) -> Side:
        """The source side, for a region that begins at `address`."""
        return Side(address + self.source_segments, tables(self.pattern)[0])

    def destination(self, address: int) -> Side:
        return Side(address + self.destination_segments, tables(self.pattern)[1])


@functools.lru_cache(maxsize=256)
def tables(pattern: Pattern) -> tuple[Table, Table]:
    """The rows of the source and of the destination."""
    return Table(pattern.source_offsets), Table(pattern.destination_offsets)


def moves(bound: Bound) -> list[Move]:
    """Everything that a bound plan moves, in an order that depends on plan and segments alone."""
    found = []
    for copy, segments in bound.pairs:
        where = copy.source_rank, copy.source.region, copy.destination.region
        for length, chosen in _by_length(segments.tokens):
            source, destination = segments.source_offsets[chosen], segments.destination_offsets[chosen]
            found += [Move(*where, pattern, source, destination) for pattern in copy.patterns(length)]
    return found


def _by_length(tokens: Ints) -> Iterable[tuple[int, Any]]:
    """(length, index of the segments that have it)."""
    if len(tokens) and (tokens == tokens[0]).all():
        return [(int(tokens[0]), slice(None))]
    return [(length, tokens == length) for length in np.unique(tokens).tolist()]


def mapped(
    wanted: Iterable[Move], sources: Mapping[tuple[int, int], int], destinations: Mapping[int, int]
) -> list[Batch]:
    """One pass from regions to regions. Addresses: of sources by (rank, region), of destinations by region."""
    return [
        Batch(
            move.pattern.nbytes,
            move.rows,
            move.source(sources[move.source_rank, move.source_region]),
            move.destination(destinations[move.destination_region]),
        )
        for move in wanted
    ]


def sample(plan: Plan) -> list[Move]:
    """The moves of a request of a few blocks: with them kernels are compiled before a transfer waits for them. None
    where no such request can be made up."""
    manifests = (plan.destination, *plan.sources.values())
    paged = [group for manifest in manifests for group in manifest.groups if group.kind == "paged"]
    tokens = min((min(SAMPLED, group.num_blocks) * group.block_size for group in paged), default=0)
    tables = {rank: _sampled(manifest) for rank, manifest in plan.sources.items()}
    try:
        return moves(bind(plan, tables, _sampled(plan.destination), (0, tokens)))
    except KvferryError as error:
        log.debug("no kernel is compiled ahead", error=str(error))
        return []


def _sampled(manifest: Manifest) -> Tables:
    return {
        group.name: BlockTable.of(np.arange(min(SAMPLED, group.num_blocks) if group.kind == "paged" else 1))
        for group in manifest.groups
    }
