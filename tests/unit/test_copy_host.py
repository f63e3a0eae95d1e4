"""The strided copy on host memory: against the element oracle, against the plan's runs, and through staging slots."""

from __future__ import annotations

import ctypes.util
from dataclasses import replace

import numpy as np
import pytest
from caches import HND, array, attention, cache, table
from hypothesis import given
from hypothesis import strategies as st
from oracle import SENTINEL, blank, content, elements, filled, needs
from strategies import Case, cases, tried

from kvferry.manifest import Manifest
from kvferry.memory import cuda
from kvferry.tables import BlockTable, Tables
from kvferry.v1 import layout_pb2, peer_pb2
from kvferry.wire import manifest_from_proto, manifest_to_proto, tables_from_proto, tables_to_proto
from kvferryd.copy import Batch, Chunk, Move, cut, host, mapped, moves, zeros
from kvferryd.copy.batch import PAGE_NBYTES, Side, Table, packed
from kvferryd.copy.chunks import ALIGN
from kvferryd.copy.cuda import piece_words
from kvferryd.plan import Bound, bind, left, plan
from kvferryd.staging.share import packs, share_of, wanting
from support import refused


class Memory:
    """Regions that begin at any address, with guards on both sides."""

    def __init__(self, regions: dict[int, bytearray], shift: int = 0) -> None:
        self.arrays = {}
        for region, held in regions.items():
            around = np.full(len(held) + 64, 0xEE, dtype=np.uint8)
            at = -around.ctypes.data % 16 + shift
            around[at : at + len(held)] = np.frombuffer(held, dtype=np.uint8)
            self.arrays[region] = around[at : at + len(held)]

    def addresses(self) -> dict[int, int]:
        return {region: held.ctypes.data for region, held in self.arrays.items()}

    def bytes(self) -> dict[int, bytes]:
        return {region: held.base.tobytes() for region, held in self.arrays.items()}


def bound_of(case: Case) -> Bound:
    return bind(plan(case.sources, case.destination), case.source_tables, case.destination_tables, case.tokens)


def sources_of(case: Case, shift: int = 0) -> dict[int, Memory]:
    return {m.rank: Memory(filled(m, case.source_tables.get(m.rank, {})), shift) for m in case.sources}


def copied_directly(bound: Bound, sources: dict[int, Memory], destination: Memory) -> None:
    addresses = {(rank, region): at for rank, m in sources.items() for region, at in m.addresses().items()}
    host.copy(mapped(moves(bound), addresses, destination.addresses()))


def copied_through_slots(wanted: list[Move], sources: dict[int, Memory], destination: Memory, nbytes: int) -> None:
    for chunk in cut(wanted, nbytes):
        assert 0 < chunk.nbytes <= nbytes
        slot = Memory({0: bytearray(chunk.nbytes)})
        before = slot.arrays[0].base.copy()
        host.copy(chunk.gather(sources[chunk.source_rank].addresses(), slot.addresses()[0]))
        assert (slot.arrays[0].base[-16:] == before[-16:]).all(), "a gather left its slot"
        host.copy(chunk.scatter(slot.addresses()[0], destination.addresses()))


@tried(50)
@given(cases(), st.integers(0, 15), st.integers(0, 15), st.integers(ALIGN, 3 * ALIGN))
def test_every_wanted_element_arrives_once_and_nothing_else_is_touched(
    case: Case, here: int, there: int, slot: int
) -> None:
    """Directly, and through slots of any size."""
    bound, sources = bound_of(case), sources_of(case, here)
    assert sum(move.batch.total_nbytes for move in moves(bound)) == bound.nbytes
    expected = blank(case.destination, SENTINEL)
    for need in needs(case.sources, case.source_tables, case.destination, case.destination_tables, case.tokens):
        to = need.destination
        expected[to.region][to.offset : to.offset + to.nbytes] = content(need.coordinate, to.nbytes)
    direct, staged = (Memory(blank(case.destination, SENTINEL), there) for _ in range(2))
    copied_directly(bound, sources, direct)
    copied_through_slots(moves(bound), sources, staged, slot)
    assert direct.bytes() == staged.bytes() == Memory(expected, there).bytes()


@tried(50)
@given(cases(), st.integers(0, 15), st.integers(0, 15))
def test_beside_zeros_every_byte_of_the_blocks_is_the_sources_or_zero(case: Case, here: int, there: int) -> None:
    """From the first token on; tokens before it are the engine's own. Zeros and runs may come in any order."""
    bound, sources = bound_of(case), sources_of(case, here)
    chosen = plan(case.sources, case.destination)
    rest = left(chosen, case.source_tables, case.destination_tables, case.tokens, case.tokens[1])
    expected = blank(case.destination, SENTINEL)
    for (_, _, token, _), to in elements(case.destination, case.destination_tables):
        if token is not None and token >= case.tokens[0]:
            expected[to.region][to.offset : to.offset + to.nbytes] = bytes(to.nbytes)
    for need in needs(case.sources, case.source_tables, case.destination, case.destination_tables, case.tokens):
        to = need.destination
        expected[to.region][to.offset : to.offset + to.nbytes] = content(need.coordinate, to.nbytes)
    for zeros_first in (True, False):
        destination = Memory(blank(case.destination, SENTINEL), there)
        erased = zeros(rest, host.ZEROS, destination.addresses())
        assert sum(batch.total_nbytes for batch in erased) == rest.nbytes
        if zeros_first:
            host.copy(erased)
        copied_directly(bound, sources, destination)
        if not zeros_first:
            host.copy(erased)
        assert destination.bytes() == Memory(expected, there).bytes()


def test_zeros_that_lie_together_longer_than_the_page_are_cut() -> None:
    nbytes = PAGE_NBYTES + 6
    long = cache(array("kv", order="block slot dim", block=4, slot=4, dim=nbytes // 2))
    tables = {"full": table(2)}
    rest = left(plan([long], long), {0: tables}, tables, (0, 1), 1)
    destination = Memory(blank(long, SENTINEL))
    erased = zeros(rest, host.ZEROS, destination.addresses())
    assert [(batch.nbytes, len(batch)) for batch in erased] == [(PAGE_NBYTES, 3), (6, 3)]
    host.copy(erased)
    found = destination.arrays[0].reshape(4, 4, nbytes)
    assert not found[2, 1:].any()
    assert (found[2, 0] == SENTINEL).all() and (found[[0, 1, 3]] == SENTINEL).all()


def test_a_source_that_knows_only_its_own_segments_cuts_alike() -> None:
    bound = bind_one(cache(*attention()), cache(*attention(order=HND), engine="decode"))
    whole = moves(bound)
    half = [m._replace(batch=replace(m.batch, destination=m.batch.source)) for m in whole]
    for there, here in zip(cut(half, ALIGN), cut(whole, ALIGN), strict=True):
        assert [vars_of(piece) for piece in there.pieces] == [vars_of(piece) for piece in here.pieces]
        assert there.nbytes == here.nbytes


def test_segments_of_equal_length_are_one_move_whatever_their_order() -> None:
    assert len(moves(bind_one(cache(*attention()), cache(*attention(), engine="decode"), (0, 12)))) == 1
    lengths = [move.batch.nbytes for move in moves(bind_one(cache(*attention()), cache(*attention()), (2, 14)))]
    assert lengths == [16, 32], "two partial blocks are one move, whole ones another"


def test_a_segment_that_no_slot_holds_is_cut_along_its_rows_and_a_run_within() -> None:
    rows = cache(*attention(layers=range(40), slot=8))
    chunks = cut(moves(bind_one(rows, rows)), 1024)
    assert [chunk.nbytes for chunk in chunks[:-1]] == [256] + [1024] * (len(chunks) - 2)
    long = cache(array("kv", order="block slot dim", block=4, slot=4, dim=1000))
    pieces = [piece for chunk in cut(moves(bind_one(long, long)), 1024) for piece in chunk.pieces]
    assert max(piece.move.batch.nbytes for piece in pieces) == 1024
    assert sum(piece.segments * piece.rows * piece.move.batch.nbytes for piece in pieces) == 16 * 1000 * 2


def test_the_first_of_more_than_two_chunks_is_smaller_where_something_fits_into_it() -> None:
    layers = cache(*attention(layers=range(40)))
    wanted = moves(bind_one(layers, layers))
    assert sum(move.batch.total_nbytes for move in wanted) == 4 * 2560, "four segments"
    for nbytes, expected in (
        (10240, [10240]),
        (5120, [5120, 5120]),
        (4096, [2560, 2560, 2560, 2560]),
        (2048, [512, 2048, 2048, 2048, 2048, 1536]),
    ):
        assert [chunk.nbytes for chunk in cut(wanted, nbytes)] == expected


def test_runs_longer_than_numpy_is_good_for_are_moved_one_by_one() -> None:
    nbytes = host.LONG + 3
    source = np.random.default_rng(0).integers(0, 255, 2 * nbytes, dtype=np.uint8)
    destination = np.zeros_like(source)
    swapped = Table(np.array([nbytes, 0]))
    begin, end = (np.array([held.ctypes.data]) for held in (source, destination))
    host.copy([Batch(nbytes, 2, Side(begin, packed(2, nbytes)), Side(end, swapped))])
    assert (destination == np.roll(source, nbytes)).all()


@pytest.mark.parametrize(
    ("nbytes", "segment", "row", "word"),
    [(64, 32, 16, 16), (64, 32, 8, 8), (64, 4, 16, 4), (6, 16, 16, 2), (576, 0, 0, 16), (5, 16, 16, 1), (64, 1, 16, 1)],
)
def test_a_word_is_as_wide_as_lengths_and_addresses_allow(nbytes: int, segment: int, row: int, word: int) -> None:
    side = Side(np.array([4096, 4096 + segment]), Table(np.array([0, row])))
    assert Batch(nbytes, 2, side, side).word == word


def test_pieces_are_long_and_waste_little() -> None:
    assert [piece_words(words) for words in (1, 3, 16, 72, 160, 512, 4096)] == [1, 1, 16, 16, 32, 512, 512]
    for words in range(1, 3000):
        piece = piece_words(words)
        assert -(-words // piece) * piece <= 1.125 * words or piece == 1


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="this machine has a CUDA driver")
def test_without_a_gpu_everything_imports_and_asking_says_what_is_missing() -> None:
    from kvferryd.memory.cuda import CudaProvider

    for ask in (lambda: CudaProvider("cuda:0"), lambda: cuda.device("GPU-1")):
        with refused("cuda_missing", match="libcuda") as caught:
            ask()
        assert caught.value.remedy


def bind_one(source, destination, tokens: tuple[int, int] = (0, 16)) -> Bound:
    tables = {"full": table(2, 0, 3, 1)} if source.groups[0].block_size == 4 else {"full": table(2, 0)}
    return bind(plan([source], destination), {0: tables}, tables, tokens)


def vars_of(piece) -> tuple[int, ...]:
    return piece.first, piece.segments, piece.first_row, piece.rows, piece.offset


# ---- why staged transfers are right: a source that knows no destination block cuts exactly as its reader does ----


@tried(50)
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
