"""The Triton form of the copy against the numpy form, byte for byte, guards included."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import GPUS

from kvferry.manifest import Manifest
from kvferry.tables import BlockTable
from kvferryd.copy import Batch, Chunk, cut, host, mapped, moves, zeros
from kvferryd.copy.batch import Side, Table, packed
from kvferryd.copy.cuda import Copier, NotPrepared, erase
from kvferryd.plan import Bound, bind, left, plan

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from caches import HND, NHD, array, attention, cache
from strategies import Case, cases

GPU = GPUS[-1]
pytestmark = pytest.mark.gpu
GUARD = 64


@pytest.fixture(scope="module")
def copier() -> Iterator[Copier]:
    copier = Copier(GPU)
    yield copier
    copier.close()


@dataclass
class Twin:
    """The same bytes on the host and on the GPU, `shift` bytes off alignment, guards on both sides."""

    host: npt.NDArray[np.uint8]
    shift: int
    address: int = 0

    @staticmethod
    def of(nbytes: int, shift: int = 0, seed: int | None = None) -> Twin:
        held = np.full(nbytes + 2 * GUARD + 16, 0xEE, dtype=np.uint8)
        shift += -held.ctypes.data % 16 + GUARD
        if seed is not None:
            held[shift : shift + nbytes] = np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)
        twin = Twin(held, shift, GPU.alloc(held.nbytes + 16))
        # Both begin at the same distance from a multiple of 16.
        twin.address += held.ctypes.data % 16
        twin._copy(twin.address, held.ctypes.data)
        return twin

    @property
    def here(self) -> int:
        return self.host.ctypes.data + self.shift

    @property
    def there(self) -> int:
        return self.address + self.shift

    def _copy(self, destination: int, source: int) -> None:
        stream = GPU.stream()
        stream.copy(destination, source, self.host.nbytes)
        stream.synchronize()
        stream.close()

    def assert_alike(self) -> None:
        back = np.empty_like(self.host)
        self._copy(back.ctypes.data, self.address)
        wrong = np.flatnonzero(back != self.host)
        assert len(wrong) == 0, f"{len(wrong)} bytes differ, the first at {wrong[0] - self.shift}"

    def free(self) -> None:
        GPU.free(self.address - self.host.ctypes.data % 16)


HERE, THERE = attrgetter("here"), attrgetter("there")


class Ground:
    """The regions that a bound plan reads and writes, as twins."""

    def __init__(self, bound: Bound, shift: int, own_shift: int) -> None:
        self.moves = moves(bound)
        ends: dict[tuple[int, int], int] = defaultdict(int)
        own_ends: dict[int, int] = defaultdict(int)
        for move in self.moves:
            key, own, batch = (move.source_rank, move.source_region), move.destination_region, move.batch
            ends[key] = max(ends[key], end_of(batch.source, batch.nbytes))
            own_ends[own] = max(own_ends[own], end_of(batch.destination, batch.nbytes))
        self.sources = {key: Twin.of(end, shift, seed=i) for i, (key, end) in enumerate(ends.items())}
        self.destinations = {region: Twin.of(end, own_shift) for region, end in own_ends.items()}

    def mapped(self, side: Callable[[Twin], int]) -> list[Batch]:
        sources = {key: side(twin) for key, twin in self.sources.items()}
        return mapped(self.moves, sources, {region: side(twin) for region, twin in self.destinations.items()})

    def gather(self, chunk: Chunk, slot: Twin, side: Callable[[Twin], int]) -> list[Batch]:
        of_rank = {region: side(twin) for (rank, region), twin in self.sources.items() if rank == chunk.source_rank}
        return chunk.gather(of_rank, side(slot))

    def scatter(self, chunk: Chunk, slot: Twin, side: Callable[[Twin], int]) -> list[Batch]:
        return chunk.scatter(side(slot), {region: side(twin) for region, twin in self.destinations.items()})

    def assert_alike(self) -> None:
        for twin in (*self.sources.values(), *self.destinations.values()):
            twin.assert_alike()

    def free(self) -> None:
        for twin in (*self.sources.values(), *self.destinations.values()):
            twin.free()


def end_of(side: Side, nbytes: int) -> int:
    return int(side.segments.max() + side.table.offsets.max()) + nbytes


def on_both(copier: Copier, here: list[Batch], there: list[Batch], programs: int = 5) -> None:
    """Few programs copy, so that each goes round often."""
    host.copy(here)
    stream = GPU.stream()
    copier.prepare(there)
    copier.copy(there, stream, programs)
    stream.synchronize()
    stream.close()


def compare(copier: Copier, bound: Bound, shift: int = 0, own_shift: int = 0, slot_nbytes: int = 1 << 16) -> None:
    """Mapped, then through slots, from regions `shift` bytes off alignment to regions `own_shift` bytes off."""
    ground = Ground(bound, shift, own_shift)
    on_both(copier, ground.mapped(HERE), ground.mapped(THERE))
    ground.assert_alike()
    ground.free()
    ground = Ground(bound, shift, own_shift)
    for chunk in cut(ground.moves, slot_nbytes):
        slot = Twin.of(chunk.nbytes)
        on_both(copier, ground.gather(chunk, slot, HERE), ground.gather(chunk, slot, THERE))
        on_both(copier, ground.scatter(chunk, slot, HERE), ground.scatter(chunk, slot, THERE))
        slot.assert_alike()
        slot.free()
    ground.assert_alike()
    ground.free()


def bound_of(source: Manifest, destination: Manifest, tokens: tuple[int, int], seed: int = 0) -> Bound:
    """Every block of either side at a permuted place."""
    return bound_of_ranks([source], destination, tokens, seed)


def bound_of_ranks(sources: list[Manifest], destination: Manifest, tokens: tuple[int, int], seed: int = 0) -> Bound:
    rng = np.random.default_rng(seed)
    *tables, own = (
        {group.name: BlockTable.of(rng.permutation(group.num_blocks)) for group in manifest.groups}
        for manifest in (*sources, destination)
    )
    return bind(plan(sources, destination), dict(enumerate(tables)), own, tokens)


def pair(**destination: object) -> tuple[Manifest, Manifest]:
    """Six layers of keys and values: blocks of 16 tokens, two heads of 128, 24 blocks; the other side changed."""
    shape: dict[str, object] = {"slot": 16, "dim": 128, "block": 24}
    layers = range(6)
    source = cache(*attention(2, layers=layers, **shape))
    return source, cache(*attention(2, layers=layers, **{**shape, **destination}), engine="decode")


def latents(slot: int) -> Manifest:
    return cache(*[array("kv", i, order="block slot dim", block=384 // slot, slot=slot, dim=576) for i in range(5)])


def whole_layer(order: str, dtype: str, **more: object) -> Manifest:
    return cache(array(order=order, dtype=dtype, block=12, slot=16, head=3, dim=40, **more))


def shares(theirs: tuple[int, int], ours: tuple[int, int], tokens: tuple[int, int], order: str = NHD) -> Bound:
    """Context parallelism, as (ranks, tokens of each at once), on either side; the destination is the last rank."""

    def rank(engine: str, at: int, ring: tuple[int, int], order: str = NHD) -> Manifest:
        layers = attention(2, layers=range(6), slot=16, dim=128, block=24, order=order)
        return cache(*layers, engine=engine, rank=at, of=ring[0], token_shard=(at, *ring))

    sources = [rank("prefill", at, theirs) for at in range(theirs[0])]
    return bound_of_ranks(sources, rank("decode", ours[0] - 1, ours, order), tokens)


DIM_FIRST, FP8 = "block dim head slot", "float8_e5m2"
CASES = {
    "equal layouts, 8 KiB runs": bound_of(*pair(), (0, 384)),
    "NHD to HND, 256-byte runs": bound_of(*pair(order=HND), (0, 384)),
    "blocks of 16 to 64": bound_of(*pair(slot=64, block=6), (0, 384)),
    "blocks of 16 to 64, NHD to HND": bound_of(*pair(slot=64, block=6, order=HND), (0, 384)),
    "blocks of 16 to 5, from the middle of a block": bound_of(*pair(slot=5, block=77), (3, 380)),
    "MLA, 1,152-byte tokens, blocks of 16 to 64": bound_of(latents(16), latents(64), (0, 384)),
    "MLA, partial blocks": bound_of(latents(16), latents(8), (5, 377)),
    "runs of one two-byte element": bound_of(
        whole_layer(NHD, "bfloat16"), whole_layer(DIM_FIRST, "bfloat16"), (1, 190)
    ),
    "runs of one byte": bound_of(whole_layer(NHD, FP8), whole_layer(DIM_FIRST, FP8), (0, 192)),
    "context parallelism 2 to 1, token by token": shares((2, 1), (1, 1), (0, 384)),
    "context parallelism 1 to 2, token by token": shares((1, 1), (2, 1), (0, 384)),
    "context parallelism 2 to 1, token by token, NHD to HND": shares((2, 1), (1, 1), (3, 380), HND),
    "context parallelism 2 to 1, four tokens at once": shares((2, 4), (1, 1), (5, 377)),
    "context parallelism 2 to 3, one token to four at once": shares((2, 1), (3, 4), (1, 383)),
    "gaps between elements": bound_of(whole_layer(NHD, FP8, pad=3), whole_layer(NHD, FP8, pad=1), (0, 192)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_kernel_copies_is_what_numpy_copies(copier: Copier, name: str) -> None:
    compare(copier, CASES[name])


@pytest.mark.parametrize(("shift", "own_shift"), [(8, 8), (4, 12), (2, 0), (1, 0), (0, 15)])
def test_at_any_alignment(copier: Copier, shift: int, own_shift: int) -> None:
    compare(copier, CASES["equal layouts, 8 KiB runs"], shift, own_shift)
    compare(copier, CASES["blocks of 16 to 5, from the middle of a block"], shift, own_shift)


@pytest.mark.parametrize("slot_nbytes", [256, 4096, 100_000, 1 << 22])
def test_through_slots_of_any_size(copier: Copier, slot_nbytes: int) -> None:
    small = bound_of(*pair(slot=5, block=77, order=HND), (3, 40))
    compare(copier, small, slot_nbytes=slot_nbytes)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(cases(), st.integers(0, 15), st.integers(0, 15))
def test_between_engines_drawn_at_random(copier: Copier, case: Case, shift: int, own_shift: int) -> None:
    chosen = plan(case.sources, case.destination)
    bound = bind(chosen, case.source_tables, case.destination_tables, case.tokens)
    compare(copier, bound, shift, own_shift, slot_nbytes=300)


@pytest.mark.parametrize("programs", [1, 7, 132, 1000])
def test_with_any_number_of_programs(copier: Copier, programs: int) -> None:
    ground = Ground(CASES["NHD to HND, 256-byte runs"], 0, 0)
    on_both(copier, ground.mapped(HERE), ground.mapped(THERE), programs)
    ground.assert_alike()
    ground.free()


@pytest.mark.parametrize("nbytes", [1, 3, 16, 17, 592, 4096, 1152, 8192 + 16, 100_000, 1 << 20])
def test_runs_of_any_length(copier: Copier, nbytes: int) -> None:
    rows, segments = 7, max(1, min(300, (1 << 22) // nbytes // 7))
    source = Twin.of(rows * segments * nbytes, seed=1)
    destination = Twin.of(rows * segments * nbytes)
    rng = np.random.default_rng(nbytes)
    mixed = Table(rng.permutation(rows) * segments * nbytes)
    starts, ends = np.arange(segments) * rows * nbytes, rng.permutation(segments) * nbytes

    def batches(side: Callable[[Twin], int]) -> list[Batch]:
        from_side = Side(side(source) + starts, packed(rows, nbytes))
        return [Batch(nbytes, rows, from_side, Side(side(destination) + ends, mixed))]

    on_both(copier, batches(HERE), batches(THERE))
    destination.assert_alike()
    source.free()
    destination.free()


def test_copies_under_way_on_several_streams_do_not_share_their_segments(copier: Copier) -> None:
    streams = [GPU.stream() for _ in range(3)]
    grounds = [Ground(bound_of(*pair(order=HND), (0, 384), seed=seed), 0, 0) for seed in range(12)]
    for i, ground in enumerate(grounds):
        batches = ground.mapped(THERE)
        copier.prepare(batches)
        copier.copy(batches, streams[i % 3])
    for ground in grounds:
        host.copy(ground.mapped(HERE))
    for stream in streams:
        stream.synchronize()
        stream.close()
    for ground in grounds:
        ground.assert_alike()
        ground.free()


def test_a_prepared_copy_is_one_launch_and_a_copy_of_nothing_none(copier: Copier) -> None:
    ground = Ground(CASES["equal layouts, 8 KiB runs"], 0, 0)
    batches = ground.mapped(THERE)
    stream = GPU.stream()
    fresh = Copier(GPU)
    with pytest.raises(NotPrepared):
        fresh.copy(batches, stream)
    fresh.close()
    copier.prepare(batches)
    assert copier.copy(batches, stream) == 1
    assert copier.copy([], stream) == 0
    stream.synchronize()
    stream.close()
    ground.free()


def test_rows_of_old_plans_leave_the_gpu_and_a_closed_copier_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Copier(GPU)
    compare(first, CASES["MLA, partial blocks"])
    first.close()
    before = GPU.memory()[0]
    monkeypatch.setattr("kvferryd.copy.cuda.KEPT_NBYTES", 4096)
    copier = Copier(GPU)
    for name in list(CASES)[:6]:
        compare(copier, CASES[name])
    assert (
        sum(table.offsets.nbytes for table in copier._tables)
        <= 4096 + max(table.offsets.nbytes for table in copier._tables) * 4
    )
    copier.close()
    assert abs(GPU.memory()[0] - before) <= 8 << 20


@pytest.mark.parametrize("order", [NHD, HND])
def test_zeros_over_what_is_left_go_in_the_launch_that_copies(copier: Copier, order: str) -> None:
    """Poisoned before; half of the last block's slots, and the blocks behind it."""
    source, destination = pair(order=order)
    tables = {"full": BlockTable.of(np.random.default_rng(2).permutation(24))}
    chosen, tokens = plan([source], destination), (0, 200)
    bound, rest = bind(chosen, {0: tables}, tables, tokens), left(chosen, {0: tables}, tables, tokens, tokens[1])
    twins = [Twin.of(manifest.regions[0].nbytes, seed=seed) for seed, manifest in enumerate((source, destination))]

    def batches(side: Callable[[Twin], int], page: int) -> list[Batch]:
        theirs, ours = map(side, twins)
        return mapped(moves(bound), {(0, 0): theirs}, {0: ours}) + zeros(rest, page, {0: ours})

    host.copy(batches(HERE, host.ZEROS))
    there = batches(THERE, copier.zeros)
    copier.prepare(there)
    stream = GPU.stream()
    assert copier.copy(there, stream) == 1
    stream.synchronize()
    stream.close()
    for twin in twins:
        twin.assert_alike()
        twin.free()
    assert not (twins[1].host == 0).all() and rest.nbytes == (384 - 200) * 6 * 2 * 2 * 128 * 2


def test_without_a_kernel_zeros_are_fills() -> None:
    cache_of_ours = pair()[1]
    tables = {"full": BlockTable.of(np.arange(24))}
    rest = left(plan([cache_of_ours], cache_of_ours), {0: tables}, tables, (0, 100), 100)
    twin = Twin.of(cache_of_ours.regions[0].nbytes, seed=3)
    host.copy(zeros(rest, host.ZEROS, {0: twin.here}))
    erase(GPU, zeros(rest, host.ZEROS, {0: twin.there}))
    twin.assert_alike()
    twin.free()
