"""Checksums are equal on both sides whatever the layouts, and differ when one moved byte does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from oracle import SENTINEL, blank
from strategies import Case, cases, tried
from test_copy_host import Memory, sources_of
from test_share import packed_by

from kvferryd.copy import Chunk, cut, host, mapped, moves
from kvferryd.copy.chunks import ALIGN
from kvferryd.copy.sums import sums
from kvferryd.plan import bind, plan


@tried(100)
@given(cases(), st.integers(ALIGN, 3 * ALIGN), st.data())
def test_both_sides_sum_alike_until_a_byte_changes(case: Case, chunk_nbytes: int, data: st.DataObject) -> None:
    bound = bind(plan(case.sources, case.destination), case.source_tables, case.destination_tables, case.tokens)
    wanted = moves(bound)
    sources, own = sources_of(case), Memory(blank(case.destination, SENTINEL))
    addresses = {(rank, region): at for rank, m in sources.items() for region, at in m.addresses().items()}
    host.copy(mapped(wanted, addresses, own.addresses()))
    mine = cut(wanted, chunk_nbytes)

    def theirs(rank: int) -> list[int]:
        """By what the source knows."""
        chunks = packed_by(rank, case, chunk_nbytes, True, False)
        return sums(chunks, lambda chunk, at: chunk.gather(sources[rank].addresses(), at))

    def ours(rank: int) -> list[int]:
        chunks: list[Chunk] = [chunk for chunk in mine if chunk.source_rank == rank]
        return sums(chunks, lambda chunk, at: chunk.collect(own.addresses(), at))

    ranks = sorted({chunk.source_rank for chunk in mine})
    assert [ours(rank) for rank in ranks] == [theirs(rank) for rank in ranks]
    runs = bound.runs()
    if not runs:
        return
    some = data.draw(st.sampled_from(runs))
    at = data.draw(st.integers(0, len(some) - 1))
    inside = data.draw(st.integers(0, int(some.nbytes[at]) - 1))
    own.arrays[some.destination_region][int(some.destination_offsets[at]) + inside] ^= 1
    assert [rank for rank in ranks if ours(rank) != theirs(rank)] == [some.source_rank]
