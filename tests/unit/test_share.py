"""The reason why staged transfers are right: a source that knows no destination block cuts exactly as its reader
does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracle import SENTINEL, blank
from strategies import Case, cases, tried
from test_copy_host import Memory, sources_of

from kvferry.manifest import Manifest
from kvferry.tables import BlockTable, Tables
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import manifest_from_proto, manifest_to_proto, tables_from_proto, tables_to_proto
from kvferryd.copy import Chunk, cut, host, mapped, moves
from kvferryd.copy.chunks import ALIGN
from kvferryd.plan import bind, plan
from kvferryd.staging.share import packs, share_of, wanting


@tried(150)
@given(cases(), st.integers(ALIGN, 3 * ALIGN), st.booleans(), st.booleans())
def test_a_source_packs_what_its_reader_scatters(case: Case, slot: int, states: bool, later: bool) -> None:
    whole = plan(case.sources, case.destination)
    bound = bind(whole, case.source_tables, case.destination_tables, case.tokens, states=states)
    wanted = moves(bound)
    sources, staged, direct = sources_of(case), *(Memory(blank(case.destination, SENTINEL)) for _ in range(2))
    addresses = {(rank, region): at for rank, m in sources.items() for region, at in m.addresses().items()}
    host.copy(mapped(wanted, addresses, direct.addresses()))

    mine = cut(wanted, slot)
    for rank in {chunk.source_rank for chunk in mine}:
        theirs = packed_by(rank, case, slot, states, later)
        own = [chunk for chunk in mine if chunk.source_rank == rank]
        assert [chunk.nbytes for chunk in theirs] == [chunk.nbytes for chunk in own]
        for there, here in zip(theirs, own, strict=True):
            slots = Memory({0: bytearray(here.nbytes)}).arrays[0]
            host.copy(there.gather(sources[rank].addresses(), slots.ctypes.data))
            host.copy(here.scatter(slots.ctypes.data, staged.addresses()))
    assert staged.bytes() == direct.bytes()


def packed_by(rank: int, case: Case, slot: int, states: bool, later: bool) -> list[Chunk]:
    """As the source daemon does it: from what came over the wire, and from its own tables alone."""
    share = share_of([sent(source) for source in case.sources], sent(case.destination), rank)
    tables = tables_from_proto(tables_to_proto(case.source_tables[rank]))
    wanted = wanting(case.destination_tables, case.tokens, states=states, chunk_nbytes=slot)
    return packs(
        share, rank, longer(tables) if later else tables, peer_pb2.PackOpen.FromString(wanted.SerializeToString())
    )


def sent(manifest: Manifest) -> Manifest:
    return manifest_from_proto(layout_pb2.Manifest.FromString(manifest_to_proto(manifest).SerializeToString()))


def longer(tables: Tables) -> Tables:
    """As a later publish has them: with blocks added at the end."""
    return {
        name: BlockTable(np.concatenate([table.block_ids, table.block_ids[-1:]]), table.first_token)
        if len(table.block_ids) > 1
        else table
        for name, table in tables.items()
    }
