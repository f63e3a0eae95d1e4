"""How the planner spreads the reading over source ranks: TP, PP, context parallelism, replicas."""

import pytest
from caches import HND, array, attention, cache, move, table

from kvferryd.plan import plan

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
