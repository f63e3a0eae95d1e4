"""How the planner spreads the reading over source ranks: TP, PP, context parallelism, replicas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from caches import HND, NHD, array, as_tuples, attention, cache, move, table
from hypothesis import given
from hypothesis import strategies as st
from layouts import Draw
from oracle import verify
from strategies import tried

from kvferry.manifest import Manifest
from kvferry.tables import BlockTable
from kvferryd.plan import Bound, bind, plan, segments
from kvferryd.plan.segments import local_tokens

FOUR, EIGHT = {"full": table(4, 5, 3, 6)}, {"full": table(7, 1)}
"""Tables of blocks of 4 and of 8 tokens for 16 tokens."""


def ranks(*spans: tuple[int, int], total: int, **more: object) -> list:
    """Source ranks that hold these ranges of heads."""
    return [
        cache(*attention(stop - start, start=start, total=total, **more), rank=i, of=len(spans))
        for i, (start, stop) in enumerate(spans)
    ]


def test_two_ranks_with_tokens_outermost_to_one_with_heads_outermost() -> None:
    destination = cache(*attention(4, slot=8, order=HND), engine="decode")
    runs = move(ranks((0, 2), (2, 4), total=4), FOUR, destination, EIGHT, (0, 16))
    assert {run[0] for run in runs} == {0, 1}
    assert {run[5] for run in runs} == {2 * 2}, "one token of one head at a time"


@pytest.mark.parametrize(
    ("rank", "held", "reads"), [(0, (0, 2), {0}), (1, (2, 3), {1}), (2, (3, 5), {1, 2}), (3, (5, 6), {2})]
)
def test_six_heads_over_four_ranks_read_from_three(rank: int, held: tuple[int, int], reads: set[int]) -> None:
    start, stop = held
    destination = cache(*attention(stop - start, start=start, total=6), engine="decode", rank=rank, of=4)
    runs = move(ranks((0, 2), (2, 4), (4, 6), total=6), FOUR, destination, FOUR, (0, 16))
    assert {run[0] for run in runs} == reads


def test_two_heads_replicated_over_four_ranks_are_read_once() -> None:
    sources = ranks((0, 1), (0, 1), (1, 2), (1, 2), total=2)
    runs = move(sources, FOUR, cache(*attention(2), engine="decode"), FOUR, (0, 16))
    assert len({run[0] for run in runs}) == 2


def test_ranges_that_overlap_are_read_once() -> None:
    move(ranks((0, 4), (2, 6), (3, 6), total=6), FOUR, cache(*attention(6), engine="decode"), FOUR, (0, 16))


def latent(**more: object):
    return array("kv", order="block slot dim", block=8, slot=4, dim=3, **more)


def test_readers_of_a_full_replica_lean_on_different_holders() -> None:
    sources = [cache(latent(), rank=i, of=4) for i in range(4)]
    readers = [cache(latent(), engine="decode", rank=i, of=4) for i in range(4)]
    assert [plan(sources, reader).reads_from for reader in readers] == [(0,), (1,), (2,), (3,)]
    assert [plan(sources, reader).reads_from for reader in readers] == [(0,), (1,), (2,), (3,)]
    move(sources, FOUR, readers[2], FOUR, (0, 16))


def test_a_component_without_shard_is_a_full_replica_on_either_side() -> None:
    whole = cache(array(block=8, slot=4, head=4, dim=2))
    half = cache(array(block=8, slot=4, head=2, dim=2, shard=("head", 2, 4)), engine="decode", rank=1, of=2)
    move(whole, FOUR, half, FOUR, (0, 16))
    halves = [cache(array(block=8, slot=4, head=2, dim=2, shard=("head", 2 * i, 4)), rank=i, of=2) for i in range(2)]
    move(halves, FOUR, whole, FOUR, (0, 16))


def test_pipeline_stages_are_only_the_layers_that_a_rank_lists() -> None:
    sources = [cache(*attention(layers=layers), rank=i, of=2) for i, layers in enumerate([(0,), (1, 2, 3)])]
    destination = cache(*attention(layers=(0, 1)), engine="decode", of=2)
    runs = move(sources, FOUR, destination, FOUR, (0, 16))
    assert {run[0] for run in runs} == {0, 1}


@pytest.mark.parametrize(
    ("theirs", "ours"), [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 3), (3, 2)), ((3, 4), (2, 4)), ((2, 2), (2, 2))]
)
def test_context_parallel_ranks_hold_every_nth_token(theirs: tuple[int, int], ours: tuple[int, int]) -> None:
    (size, interleave), (own_size, own_interleave) = theirs, ours
    sources = [cache(*attention(), rank=i, of=size, token_shard=(i, size, interleave)) for i in range(size)]
    for rank in range(own_size):
        shard = (rank, own_size, own_interleave)
        destination = cache(*attention(slot=8), engine="decode", rank=rank, of=own_size, token_shard=shard)
        move(sources, FOUR, destination, {"full": table(3, 0)}, (1, 15))


def test_a_context_parallel_rank_reads_only_the_ranks_that_share_its_tokens() -> None:
    sources = [cache(*attention(), rank=i, of=4, token_shard=(i, 4, 1)) for i in range(4)]
    destination = cache(*attention(), engine="decode", rank=1, of=2, token_shard=(1, 2, 1))
    assert plan(sources, destination).reads_from == (1, 3)


def test_a_rank_is_found_by_its_number_not_by_its_place_in_the_list() -> None:
    sources = ranks((0, 2), (2, 4), total=4)[::-1]
    assert {run[0] for run in move(sources, FOUR, cache(*attention(4), engine="decode"), FOUR, (0, 16))} == {0, 1}


def test_every_rank_may_have_tables_of_its_own() -> None:
    held = {0: {"full": table(1, 2)}, 1: {"full": table(7, 0)}}
    move(ranks((0, 2), (2, 4), total=4), held, cache(*attention(4), engine="decode"), {"full": table(3, 5)}, (0, 8))


def test_layers_that_look_alike_are_planned_once_and_cut_once() -> None:
    """Their axes may be any objects: those of a manifest that was not read are not shared."""
    layers = tuple(range(6))
    halves = [cache(*attention(2, start=2 * i, total=4, layers=layers), rank=i, of=2) for i in range(2)]
    destination = cache(*attention(4, layers=layers, slot=8, order=HND), engine="decode")
    apart = [
        half.model_copy(update={"components": tuple(each.model_copy(deep=True) for each in half.components)})
        for half in halves
    ]
    for sources in (halves, apart):
        chosen = plan(sources, destination)
        assert [[len(alike.components) for alike in copy.alike] for copy in chosen.copies] == [[12], [12]]
        assert len({copy.meeting for copy in chosen.copies}) == 1
        move(sources, FOUR, destination, EIGHT, (1, 15))


def test_layers_in_regions_of_their_own_are_settled_once_all_the_same() -> None:
    source = cache(*(part for layer in range(3) for part in attention(layers=(layer,), region=layer)))
    destination = cache(*attention(layers=(0, 1, 2)), engine="decode")
    chosen = plan([source], destination)
    assert len(chosen.copies) == 3
    assert len({alike.choice for copy in chosen.copies for alike in copy.alike}) == 1
    move(source, FOUR, destination, FOUR, (0, 16))


def test_groups_of_one_kind_are_cut_once_and_those_with_a_window_apart() -> None:
    parts = [part for i, name in enumerate("abc") for part in attention(layers=(i,), group=name)]
    source, destination = (cache(*parts, engine=name, windows={"c": 4}) for name in ("prefill", "decode"))
    chosen = plan([source], destination)
    first, second, windowed = (copy.meeting for copy in chosen.copies)
    assert first is second is not windowed
    tables = {"a": table(4, 5, 3, 6), "b": table(1, 7, 3, 0)}
    move(
        source,
        tables | {"c": table(2, 5, first_token=8)},
        destination,
        tables | {"c": table(7, 1, first_token=8)},
        (0, 16),
    )


# ---- context parallelism on either side: the tokens that two ranks share, in as few segments as blocks ----


Ring = tuple[int, int]
"""Ranks of context parallelism, and the tokens that each of them takes at once."""


def holds(manifest: Manifest, first: int, stop: int, rng: np.random.Generator) -> dict[str, BlockTable]:
    """Blocks in any order, for these local tokens."""
    (group,) = manifest.groups
    blocks = -(-max(stop - first, 0) // group.block_size)
    return {group.name: BlockTable.of(rng.permutation(group.num_blocks)[:blocks], first)}


def of_ring(engine: str, ring: Ring, slot: int, blocks: int, order: str, window: int | None = None) -> list[Manifest]:
    size, interleave = ring
    windows = {"full": window} if window else None
    layer = attention(1, slot=slot, block=blocks, dim=1, order=order)
    return [
        cache(*layer, engine=engine, rank=rank, of=size, token_shard=(rank, size, interleave), windows=windows)
        for rank in range(size)
    ]


rings = st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8]))


@st.composite
def requests(
    draw: Draw,
) -> tuple[list[Manifest], dict[int, dict[str, BlockTable]], Manifest, dict[str, BlockTable], Ring]:
    """Rings, blocks and windows of any size on both sides; a range that begins and stops anywhere; tables that begin
    before, at or behind it."""
    last = draw(st.integers(0, 70))
    first = draw(st.integers(0, last))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    orders, slots = st.sampled_from([NHD, HND]), st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16])
    window = draw(st.sampled_from([None, None, 1, 5, 9]))
    sources = of_ring("prefill", draw(rings), draw(slots), 72, draw(orders), window)
    reader = draw(st.sampled_from(of_ring("decode", draw(rings), draw(slots), 72, draw(orders), window)))
    seen = first if window is None else max(first, last - window + 1)
    tables = {}
    for source in sources:
        shard = source.groups[0].token_shard
        begin = draw(st.sampled_from([0, local_tokens(shard, seen)]))
        tables[source.rank] = holds(source, begin, local_tokens(shard, last), rng)
    shard = reader.groups[0].token_shard
    begin = draw(st.sampled_from([0, local_tokens(shard, first), local_tokens(shard, (first + last) // 2)]))
    return sources, tables, reader, holds(reader, begin, local_tokens(shard, last), rng), (first, last)


@pytest.mark.parametrize("round", [segments.ROUND, 6], ids=["rounds", "rows"])
@tried(130)
@given(request=requests())
def test_any_two_rings_share_exactly_their_tokens(request, round: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "ROUND", round)
        sources, tables, reader, own, tokens = request
        bound = bind(plan(sources, reader), tables, own, tokens)
        verify(sources, tables, reader, own, tokens, as_tuples(bound))


def bound_of(theirs: Ring, ours: Ring, tokens: int, slot: tuple[int, int] = (16, 16), seed: int = 0) -> Bound:
    """All tokens, in blocks in any order."""
    rng = np.random.default_rng(seed)
    sources = of_ring("prefill", theirs, slot[0], tokens // slot[0], NHD)
    reader = of_ring("decode", ours, slot[1], tokens // slot[1], NHD)[0]

    def table(manifest: Manifest) -> dict[str, BlockTable]:
        return holds(manifest, 0, local_tokens(manifest.groups[0].token_shard, tokens), rng)

    return bind(plan(sources, reader), {source.rank: table(source) for source in sources}, table(reader), (0, tokens))


@pytest.mark.parametrize(
    ("theirs", "ours", "slot", "segments"),
    [
        ((1, 1), (1, 1), (16, 16), 512),
        ((2, 1), (1, 1), (16, 16), 2 * 512),  # each destination block has tokens of both ranks
        ((1, 1), (2, 1), (16, 16), 512),
        ((4, 1), (1, 1), (16, 64), 4 * 128),
        ((2, 1), (4, 1), (16, 16), 256),
        ((2, 2), (1, 1), (16, 16), 2 * 512),
        ((2, 16), (1, 1), (16, 16), 512),
        ((2, 16), (1, 1), (64, 64), 2 * 128),
        ((2, 1), (2, 1), (16, 16), 256),
        ((2, 16), (2, 16), (16, 16), 256),
    ],
)  # fmt: skip
def test_a_segment_ends_where_a_block_does(theirs: Ring, ours: Ring, slot: tuple[int, int], segments: int) -> None:
    """And not with a row of tokens: at 8,192 tokens a row of one would make as many segments."""
    assert bound_of(theirs, ours, 8192, slot).segment_count == segments


def test_rings_that_hardly_ever_come_round_are_no_trouble() -> None:
    theirs, ours = (3, 1009), (5, 1013)
    assert math.lcm(3 * 1009, 5 * 1013) > segments.ROUND
    bound = bound_of(theirs, ours, 8192, (16, 16))
    assert sum(each.tokens for _, each in bound.pairs) == local_tokens_of(ours, 8192)
    assert bound.segment_count < 8192 / 4


@pytest.mark.parametrize("count", range(1, 5))
def test_segments_of_one_length_but_for_their_ends_are_grouped_as_any_others(count: int) -> None:
    for length, head, tail in itertools.product(range(1, 5), repeat=3):
        if head > length or tail > length or (count == 1 and head != tail):
            continue
        tokens = np.array([head, *[length] * (count - 2), tail][:count])
        evenly, compared = segments._evenly(count, length, head, tail), segments._by_length(tokens)
        assert [each for each, _ in evenly] == [each for each, _ in compared]
        for (_, chosen), (_, index) in zip(evenly, compared, strict=True):
            assert np.arange(count)[chosen].tolist() == index.tolist()


def local_tokens_of(ring: Ring, tokens: int) -> int:
    size, interleave = ring
    return sum(token // interleave % size == 0 for token in range(tokens))
