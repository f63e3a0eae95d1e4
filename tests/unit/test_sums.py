"""Checksums are what copy/sums.py says, equal on both sides whatever the layouts, unless a byte has changed."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from alone import first_of
from hypothesis import given
from hypothesis import strategies as st
from oracle import SENTINEL, blank
from strategies import Case, cases, tried
from test_copy_host import Memory, packed_by, sources_of

from kvferry.errors import KvferryError
from kvferry.protocol.session_events import Step
from kvferryd.copy import Batch, Chunk, Move, cut, host, mapped, moves, sums
from kvferryd.copy.batch import Side, Table
from kvferryd.copy.chunks import ALIGN
from kvferryd.copy.sums import MOST_NBYTES, SLICE_NBYTES, HostSums, Sums
from kvferryd.plan import bind, plan


@tried(30)
@given(cases(), st.integers(ALIGN, 3 * ALIGN), st.data())
def test_both_sides_sum_alike_until_a_byte_changes(case: Case, chunk_nbytes: int, data: st.DataObject) -> None:
    bound = bind(plan(case.sources, case.destination), case.source_tables, case.destination_tables, case.tokens)
    wanted = moves(bound)
    sources, own = sources_of(case), Memory(blank(case.destination, SENTINEL))
    addresses = {(rank, region): at for rank, m in sources.items() for region, at in m.addresses().items()}
    host.copy(mapped(wanted, addresses, own.addresses()))
    mine = cut(wanted, chunk_nbytes)

    def theirs(rank: int) -> list[int]:
        """The sums by what the source knows."""
        chunks = packed_by(rank, case, chunk_nbytes, True, False)
        return HostSums()(chunks, lambda chunk, at: chunk.gather(sources[rank].addresses(), at))

    def ours(rank: int) -> list[int]:
        chunks: list[Chunk] = [chunk for chunk in mine if chunk.source_rank == rank]
        return HostSums()(chunks, lambda chunk, at: chunk.collect(own.addresses(), at))

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


def key(place: int) -> int:
    """The key by its definition, without numpy: SplitMix64 of the word's number, made odd."""
    whole = (1 << 64) - 1
    mixed = (place + 1) * 0x9E3779B97F4A7C15 & whole
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & whole
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & whole
    return mixed ^ mixed >> 31 | 1


def sum_of(held: bytes) -> int:
    """The sum of one chunk's bytes: by the byte, so that no width of access is assumed."""
    return sum(byte * 256 ** (at % 4) * key(at // 4) for at, byte in enumerate(held)) % 2**64


def runs_of(memory: np.ndarray, nbytes: int, order: list[int]) -> list[Chunk]:
    """Runs of so many bytes, in this order of their places in memory, as chunks."""
    side = Side(np.zeros(1, np.int64), Table(np.array(order, np.int64) * nbytes))
    return cut([Move(0, 0, 0, Batch(nbytes, len(order), side, side))], len(memory) // 2 // ALIGN * ALIGN)


@tried(30)
@given(st.integers(1, 40), st.integers(40, 60), st.randoms(use_true_random=False))
def test_the_sum_is_that_of_its_definition(nbytes: int, runs: int, random: Random) -> None:
    memory = np.frombuffer(random.randbytes(nbytes * runs + 2 * ALIGN), np.uint8)
    order = random.sample(range(runs), runs)
    chunks = runs_of(memory, nbytes, order)
    packed = b"".join(memory[nbytes * run : nbytes * (run + 1)].tobytes() for run in order)
    expected = []
    for chunk in chunks:
        expected.append(sum_of(packed[: chunk.nbytes]))
        packed = packed[chunk.nbytes :]
    assert HostSums()(chunks, lambda chunk, at: chunk.gather({0: memory.ctypes.data}, at)) == expected


def test_a_gpus_chunk_is_summed_alike_on_the_host() -> None:
    """It is summed in slices: each place has its key, wherever a slice begins."""
    memory = np.random.default_rng(6).integers(0, 256, SLICE_NBYTES + 1000, np.uint8)
    side = Side(np.zeros(1, np.int64), Table(np.zeros(1, np.int64)))
    (chunk,) = cut([Move(0, 0, 0, Batch(len(memory), 1, side, side))], MOST_NBYTES)
    (found,) = HostSums()([chunk], lambda chunk, at: chunk.gather({0: memory.ctypes.data}, at))
    words = memory.view("<u4").tolist()
    assert found == sum(word * key(place) for place, word in enumerate(words)) % 2**64


def test_runs_that_have_changed_places_are_noticed() -> None:
    memory = np.random.default_rng(5).integers(0, 256, 64 * 512, np.uint8)
    blocks = [[0, 1, 2, 3, *range(4, 64)], [1, 0, 2, 3, *range(4, 64)], [0, 1, 3, 2, *range(4, 64)]]
    each = [
        HostSums()(runs_of(memory, 512, order), lambda chunk, at: chunk.gather({0: memory.ctypes.data}, at))
        for order in blocks
    ]
    assert len({tuple(found) for found in each}) == len(blocks)
    assert len({found[-1] for found in each}) == 1, "of the chunks that were not touched"


@pytest.mark.anyio
async def test_a_sum_that_hangs_keeps_no_session_from_retiring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays mapped: it is still read."""
    monkeypatch.setattr(sums, "CLOSE_S", 0.1)
    engine, begun, let_go = first_of(), threading.Event(), threading.Event()
    engine.session.engine = engine

    def hang() -> list[Chunk]:
        begun.set()
        assert let_go.wait(60)
        return []

    hanging, behind = (asyncio.create_task(engine.sums.of(chunks, lambda *_: [])) for chunks in (hang, list))
    await asyncio.to_thread(begun.wait, 60)
    async with asyncio.timeout(50):
        assert not await engine.session.take(Step.STOP, "it has gone", keep=False)
    assert engine.session.stuck
    let_go.set()
    assert await hanging == []
    with pytest.raises(KvferryError, match="the engine is gone"):
        await behind


@pytest.mark.anyio
async def test_a_sum_that_nobody_waits_for_any_more_is_not_made() -> None:
    """Else readers whose deadline has passed would keep those behind them waiting, until their deadline has, too."""
    own, begun, let_go, made = Sums(), threading.Event(), threading.Event(), list[str]()

    def hold() -> list[Chunk]:
        begun.set()
        assert let_go.wait(60)
        return []

    def make(name: str) -> Callable[[], list[Chunk]]:
        def make() -> list[Chunk]:
            made.append(name)
            return []

        return make

    before, given_up, behind = (
        asyncio.create_task(own.of(chunks, lambda *_: [])) for chunks in (hold, make("given up"), make("behind"))
    )
    await asyncio.to_thread(begun.wait, 60)
    given_up.cancel()
    await asyncio.wait([given_up])
    let_go.set()
    assert [await before, await behind] == [[], []]
    assert made == ["behind"]
    await own.close()


def test_sums_that_are_closed_hold_no_memory() -> None:
    """Their holder may live longer: an ended transfer holds its engine, and so the engine's sums."""
    memory = np.zeros(64 * 512, np.uint8)

    async def used() -> Sums:
        own = Sums()
        chunks = runs_of(memory, 512, list(range(64)))
        await own.of(lambda: chunks, lambda chunk, at: chunk.gather({0: memory.ctypes.data}, at))
        await own.close()
        return own

    held = [asyncio.run(used())]  # with the keys, which all have together
    tracemalloc.start()
    try:
        held += [asyncio.run(used()) for _ in range(3)]
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < SLICE_NBYTES, held
