"""What both sides of a staged transfer must agree on: which chunks a source rank packs for one reader.

A source plans the very copy that its reader planned, and binds it to its own tables; of the reader's tables it knows
the shape only (first token and number of blocks of each group), and nothing of where the reader's blocks lie. Where a
run lies in a chunk follows from that alone: tests/unit/test_share.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import Malformed
from kvferry.manifest import Manifest
from kvferry.tables import BlockTable, Tables
from kvferryd.copy import Chunk, cut, moves
from kvferryd.plan import Plan, bind, plan


@dataclass(frozen=True, slots=True)
class Shape:
    """A block table without its ids."""

    first_token: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader wants of one lease now. `shapes`: of its tables, by group."""

    tokens: tuple[int, int]
    states: bool
    shapes: Mapping[str, Shape]


def shapes(tables: Tables) -> dict[str, Shape]:
    return {group: Shape(table.first_token, len(table.block_ids)) for group, table in tables.items()}


def share_of(sources: Sequence[Manifest], destination: Manifest, rank: int) -> Plan:
    """The part of the plan that one source rank serves. Raises PlanRefused."""
    whole = plan(sources, destination)
    return replace(whole, copies=tuple(copy for copy in whole.copies if copy.source_rank == rank))


def packs(share: Plan, rank: int, tables: Tables, wanted: Wanted, chunk_nbytes: int) -> list[Chunk]:
    """The source's chunks; only their gathering side means anything. Raises KvferryError."""
    stand_in = {
        group.name: _stand_in(wanted.shapes[group.name], group.num_blocks, group.name)
        for group in share.destination.groups
        if group.name in wanted.shapes
    }
    bound = bind(share, {rank: tables}, stand_in, wanted.tokens, states=wanted.states)
    return cut(moves(bound), chunk_nbytes)


def _stand_in(shape: Shape, num_blocks: int, group: str) -> BlockTable:
    if not 0 <= shape.blocks <= num_blocks:
        raise Malformed(
            "malformed_tables",
            f"the table of group {group} is said to list {shape.blocks} blocks",
            field=f"tables.{group}.blocks",
            value=shape.blocks,
            remedy=f"at most {num_blocks}, each once",
        )
    return BlockTable(np.arange(shape.blocks, dtype=np.int64), shape.first_token)
