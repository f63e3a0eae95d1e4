"""Context parallelism on either side: the tokens that two ranks share, in as few segments as there are blocks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from caches import HND, NHD, as_tuples, attention, cache
from hypothesis import given
from hypothesis import strategies as st
from layouts import Draw
from oracle import verify
from strategies import tried

from kvferry.manifest import Manifest
from kvferry.tables import BlockTable
from kvferryd.plan import Bound, bind, plan, segments
from kvferryd.plan.segments import local_tokens

Ring = tuple[int, int]
"""Ranks of context parallelism, and the tokens that each of them takes at once."""


def holds(manifest: Manifest, first: int, stop: int, rng: np.random.Generator) -> dict[str, BlockTable]:
    """Blocks in any order, for these local tokens."""
    (group,) = manifest.groups
    blocks = -(-max(stop - first, 0) // group.block_size)
    return {group.name: BlockTable.of(rng.permutation(group.num_blocks)[:blocks], first)}


def ranks(engine: str, ring: Ring, slot: int, blocks: int, order: str, window: int | None = None) -> list[Manifest]:
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
    sources = ranks("prefill", draw(rings), draw(slots), 72, draw(orders), window)
    reader = draw(st.sampled_from(ranks("decode", draw(rings), draw(slots), 72, draw(orders), window)))
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
@tried(400)
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
    sources = ranks("prefill", theirs, slot[0], tokens // slot[0], NHD)
    reader = ranks("decode", ours, slot[1], tokens // slot[1], NHD)[0]

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
