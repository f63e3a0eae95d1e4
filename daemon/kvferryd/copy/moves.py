"""From a bound plan to batches. Segments are grouped by length, never joined: every length has its own static rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import structlog

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.tables import BlockTable, Tables
from kvferryd.copy.batch import PAGE_NBYTES, Batch, Side, Table, shorter, standing
from kvferryd.plan import Bound, Left, Plan, bind
from kvferryd.plan.rows import Pattern
from kvferryd.plan.segments import EVERY

log = structlog.get_logger()
SAMPLED = 4
"""Blocks of each group in a `sample`."""


class Move(NamedTuple):
    """Segments of equal length between two regions; the batch's sides are relative to them.

    The source of a staged transfer knows only its own segments: the destination's are then made up.
    """

    source_rank: int
    source_region: int
    destination_region: int
    batch: Batch


@functools.lru_cache(maxsize=256)
def tables(pattern: Pattern) -> tuple[Table, Table]:
    """The rows of the source and of the destination."""
    return Table(pattern.source_offsets), Table(pattern.destination_offsets)


def moves(bound: Bound) -> list[Move]:
    """Everything that a bound plan moves, in an order that depends on plan and segments alone."""
    found = []
    for copy, segments in bound.pairs:
        where = copy.source_rank, copy.source.region, copy.destination.region
        for length, chosen in segments.lengths:
            source, destination = segments.source_offsets[chosen], segments.destination_offsets[chosen]
            for pattern in copy.patterns(length, segments.steps):
                rows, own_rows = tables(pattern)
                batch = Batch(pattern.nbytes, len(rows.offsets), Side(source, rows), Side(destination, own_rows))
                found.append(Move(*where, batch))
    return found


def mapped(
    wanted: Iterable[Move], sources: Mapping[tuple[int, int], int], destinations: Mapping[int, int]
) -> list[Batch]:
    """A pass from regions to regions. Addresses: of sources by (rank, region), of destinations by region."""
    return [
        move.batch.at(sources[move.source_rank, move.source_region], destinations[move.destination_region])
        for move in wanted
    ]


def zeros(left: Left, page: int, destinations: Mapping[int, int]) -> list[Batch]:
    """Zeros over what is left: copied token by token from the page of zeros at this address, so that the rows are the
    same ones however much is left. Addresses of destinations by region."""
    found = []
    for copy, places in left.pairs:
        places = destinations[copy.destination.region] + places
        source = np.full(len(places), page)
        for pattern in copy.patterns(1, EVERY):
            for nbytes, rows in _paged(pattern):
                count = len(rows.offsets)
                found.append(Batch(nbytes, count, Side(source, standing(count)), Side(places, rows)))
    return found


def _paged(pattern: Pattern) -> list[tuple[int, Table]]:
    """The destination's runs, none longer than the page."""
    _, rows = tables(pattern)
    if pattern.nbytes <= PAGE_NBYTES:
        return [(pattern.nbytes, rows)]
    cut = zip((PAGE_NBYTES, pattern.nbytes % PAGE_NBYTES), shorter(rows, pattern.nbytes, PAGE_NBYTES), strict=True)
    return [(nbytes, rows) for nbytes, rows in cut if nbytes]


def sample(plan: Plan) -> list[Move]:
    """The moves of a made-up request of a few blocks: with them kernels are compiled before a transfer needs them.
    Empty where no such request is possible."""
    manifests = (plan.destination, *plan.sources.values())
    paged = [group for manifest in manifests for group in manifest.groups if group.kind == "paged"]
    tokens = min((min(SAMPLED, group.num_blocks) * group.block_size for group in paged), default=0)
    tokens -= tokens % plan.grain
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
