"""The agreement between both sides of a staged transfer: the chunks that a source rank packs for one reader.

A source plans the very copy that its reader planned, and binds it to its own tables; of the reader's tables it knows
the shape only (first token and number of blocks of each group), and nothing of where the reader's blocks lie. The place
of a run in a chunk follows from that alone: tests/unit/test_copy_host.py.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
from cachetools import LRUCache

from kvferry.errors import Conflict, Malformed, NotFound
from kvferry.manifest import Manifest
from kvferry.tables import BlockTable, Tables
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import layout_digest
from kvferryd.copy import Chunk, cut, moves, sample
from kvferryd.plan import Plan, bind, plan
from kvferryd.staging.arena import Arena

PAIRINGS = 64
"""Plans kept, one for all readers of one shape. A reader whose plan is forgotten pairs again."""


def wanting(
    tables: Tables, tokens: tuple[int, int], *, states: bool, chunk_nbytes: int, chunks: Sequence[Chunk] = ()
) -> peer_pb2.PackOpen:
    """The part of a reader's opening by which a source cuts, and what it must find. tables: the reader's own."""
    shapes = {
        group: peer_pb2.TableShape(first_token=table.first_token, blocks=len(table.block_ids))
        for group, table in tables.items()
    }
    span = layout_pb2.TokenRange(start=tokens[0], stop=tokens[1])
    return peer_pb2.PackOpen(
        tokens=span, states=states, tables=shapes, chunk_nbytes=chunk_nbytes, chunks=len(chunks),
        nbytes=sum(chunk.nbytes for chunk in chunks),
    )  # fmt: skip


def share_of(sources: Sequence[Manifest], destination: Manifest, rank: int) -> Plan:
    """The part of the plan that one source rank serves. Raises PlanRefused."""
    whole = plan(sources, destination)
    return replace(whole, copies=tuple(copy for copy in whole.copies if copy.source_rank == rank))


def packs(share: Plan, rank: int, tables: Tables, wanted: peer_pb2.PackOpen) -> list[Chunk]:
    """Chunks to gather; their destination side is a placeholder. Raises KvferryError."""
    stand_in = {}
    for group in share.destination.groups:
        if group.name in wanted.tables:
            shape = wanted.tables[group.name]
            if shape.blocks > group.num_blocks:
                why, field = f"group {group.name} has only {group.num_blocks} blocks", f"tables.{group.name}.blocks"
                raise Malformed("malformed_tables", why, field=field, value=shape.blocks, remedy="list each block once")
            stand_in[group.name] = BlockTable(np.arange(shape.blocks, dtype=np.int64), shape.first_token)
    tokens = wanted.tokens.start, wanted.tokens.stop
    return cut(moves(bind(share, {rank: tables}, stand_in, tokens, states=wanted.states)), wanted.chunk_nbytes)


def pairing_of(request: peer_pb2.PairRequest) -> str:
    """The name of the plan that is asked for. Readers that differ by their engine's id and epoch alone share it."""
    return hashlib.sha256(b"".join(map(layout_digest, (*request.sources, request.destination)))).hexdigest()


class Pairings:
    """This rank's part of the plan of every reader, by the name that the reader was given. Each is made once."""

    def __init__(self) -> None:
        self._known: LRUCache[str, Plan] = LRUCache(PAIRINGS)
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held while the plan of this name is made; kept by those that wait for it."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    async def add(self, name: str, own: Manifest, sources: Sequence[Manifest], destination: Manifest) -> Plan:
        """Plan as the reader does, unless a plan of this name (`pairing_of`) is known by the time.

        Raises KvferryError (`protocol`) when the reader sees this rank otherwise than it is, PlanRefused.
        """
        if [source for source in sources if source.rank == own.rank] != [own]:
            why = f"the reader does not know rank {own.rank} of engine {own.engine_id} as it is"
            ranks = sorted(source.rank for source in sources)
            raise Conflict("protocol", why, field="sources", value=ranks, remedy="shake hands again")
        async with self._making.setdefault(name, asyncio.Lock()):
            if name not in self._known:
                self._known[name] = await asyncio.to_thread(share_of, sources, destination, own.rank)
            return self._known[name]

    def get(self, name: str) -> Plan:
        """Raises KvferryError (`unknown_pairing`)."""
        if name not in self._known:
            message = "the plan of this pair of engines is not known, or was forgotten"
            raise NotFound("unknown_pairing", message, field="pairing", value=name, remedy="pair again")
        return self._known[name]


async def prepare_gather(arena: Arena, share: Plan, regions: Mapping[int, int]) -> None:
    """Compile what the source's first gather needs, for its part of the plan. Addresses by region."""
    for chunk in cut(sample(share), arena.slot_nbytes):
        await arena.copies.prepare(chunk.gather(regions, arena.span.address))


async def prepare_scatter(arena: Arena, plan: Plan, regions: Mapping[int, int]) -> None:
    """The same for the reader's first scatter."""
    for chunk in cut(sample(plan), arena.slot_nbytes):
        await arena.copies.prepare(chunk.scatter(arena.span.address, regions))
