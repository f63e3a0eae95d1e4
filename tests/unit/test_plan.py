"""The planner's answers, one statement a test. `move` holds every answer against the slow oracle."""

import json
from pathlib import Path

import numpy as np
import pytest
from caches import HND, NHD, array, as_tuples, attention, cache, move, table
from oracle import Run, mergeable, needs, verify
from strategies import Case

from kvferry.manifest import Manifest
from kvferry.tables import tables_from_json
from kvferryd.plan import bind, plan

FOUR, EIGHT = {"full": table(4, 5, 3, 6)}, {"full": table(7, 1)}
"""Tables of blocks of 4 and of 8 tokens for 16 tokens."""
APART = {"full": table(1, 7, 3, 0)}
"""Blocks of 4 of which no two are neighbours where two of FOUR are."""


def test_equal_layouts_move_whole_blocks() -> None:
    runs = move(cache(*attention()), FOUR, cache(*attention(), engine="decode"), APART, (0, 16))
    assert len(runs) == 8
    assert {run[5] for run in runs} == {4 * 2 * 2 * 2}


def test_blocks_in_a_row_on_both_sides_are_one_run() -> None:
    runs = move(cache(*attention()), {"full": table(2, 3, 4)}, cache(*attention()), {"full": table(5, 6, 7)}, (0, 12))
    assert [run[5] for run in runs] == [3 * 32, 3 * 32]


def test_interleaved_keys_and_values_are_one_run_per_block() -> None:
    def interleaved():
        wide = attention(offset=0)
        for i, entry in enumerate(wide):
            entry["offset"] = i * 32
            entry["axes"][0]["stride"] = 64
        return cache(*wide)

    runs = move(interleaved(), FOUR, interleaved(), APART, (0, 16))
    assert [run[5] for run in runs] == [64] * 4


def test_blocks_of_five_and_of_eight_tokens_give_segments_of_unequal_length() -> None:
    source, destination = cache(*attention(1, slot=5, dim=1)), cache(*attention(1, slot=8, dim=1), engine="decode")
    keys = [
        r
        for r in move(source, {"full": table(7, 5, 3, 1)}, destination, {"full": table(6, 4, 2)}, (0, 20))
        if r[4] < 128
    ]
    in_token_order = sorted(keys, key=lambda run: (-(run[2] // 10), run[2]))
    assert [run[5] // 2 for run in in_token_order] == [5, 3, 2, 5, 1, 4]


def test_a_logical_block_of_several_kernel_blocks_is_a_slot_axis_of_two_digits() -> None:
    kernel = attention(slot=(2, 2), order="slot block slot head dim")
    move(cache(*kernel), FOUR, cache(*attention(slot=8), engine="decode"), EIGHT, (1, 15))
    move(cache(*attention(slot=8)), EIGHT, cache(*kernel, engine="decode"), FOUR, (1, 15))


def test_keys_split_along_the_head_dim_meet_keys_that_are_not() -> None:
    split = cache(*attention(dim=(3, 2), order="block head dim slot dim"))
    plain = cache(*attention(dim=6), engine="decode")
    assert {run[5] for run in move(split, FOUR, plain, FOUR, (0, 1))} == {2 * 2}
    move(split, FOUR, plain, FOUR, (0, 16))
    move(plain, FOUR, split, FOUR, (0, 16))


def test_digits_that_do_not_divide_each_other_still_meet() -> None:
    left = cache(*attention(dim=(2, 3), order="dim block head slot dim"))
    move(left, FOUR, cache(*attention(dim=(3, 2), order="dim block slot dim head"), engine="decode"), FOUR, (3, 13))


def test_an_axis_of_three_digits_that_lie_anywhere() -> None:
    wide = cache(*attention(dim=(2, 2, 2), order="dim block head slot dim dim", pad=2), engine="decode")
    move(cache(*attention(dim=8)), FOUR, wide, FOUR, (0, 16))
    move(wide, FOUR, cache(*attention(dim=8)), FOUR, (0, 16))
    scattered = cache(*attention(dim=(2, 2, 2), order="dim block dim head slot dim"), engine="decode")
    move(cache(*attention(dim=8)), FOUR, scattered, FOUR, (0, 16))
    move(scattered, FOUR, wide, FOUR, (0, 16))


def test_a_sharded_axis_may_be_mixed_radix_and_cut_inside_a_digit() -> None:
    source = cache(*attention((3, 2), total=6, order="head block slot dim head"))
    for start, heads in ((1, 3), (0, 5), (5, 1)):
        destination = cache(*attention(heads, start=start, total=6), engine="decode", of=2)
        move(source, FOUR, destination, FOUR, (0, 16))


@pytest.mark.parametrize(
    "order",
    ["block slot head dim", "block head slot dim", "head block slot dim", "dim slot head block", "slot dim block head"],
)
def test_any_axis_order_with_padding(order: str) -> None:
    source = cache(*attention(pad=6, order=order))
    destination = cache(*attention(pad=2, order="head slot block dim"), engine="decode")
    move(source, FOUR, destination, {"full": table(0, 2, 1, 3)}, (2, 14))


def test_one_block_may_hold_all_layers() -> None:
    pages = []
    for i, entry in enumerate(attention(layers=(0, 1, 2))):
        entry["offset"], entry["axes"][0]["stride"] = i * 32, 6 * 32
        pages.append(entry)
    apart = cache(*attention(layers=(0, 1, 2), order=HND), engine="decode")
    move(cache(*pages), FOUR, apart, FOUR, (0, 16))
    assert {run[5] for run in move(cache(*pages), FOUR, cache(*pages), APART, (0, 16))} == {6 * 32}


def test_components_may_lie_in_different_regions() -> None:
    source = cache(*attention(layers=(0, 2)), *attention(layers=(1,), region=5))
    destination = cache(*attention(layers=(1, 2), region=9), *attention(layers=(0,), region=2), engine="decode")
    runs = move(source, FOUR, destination, FOUR, (0, 16))
    assert {(run[1], run[3]) for run in runs} == {(0, 2), (5, 9), (0, 9)}


def test_group_names_and_grouping_need_not_match() -> None:
    source = cache(*attention(layers=(0, 1), group="all"))
    destination = cache(*attention(layers=(0,), group="a"), *attention(layers=(1,), group="b", slot=8), engine="decode")
    move(source, {"all": table(4, 5, 3, 6)}, destination, {"a": table(1, 2, 3, 0), "b": table(6, 2)}, (0, 16))
    move(destination, {"a": table(1, 2, 3, 0), "b": table(6, 2)}, source, {"all": table(4, 5, 3, 6)}, (0, 16))


def test_groups_may_share_memory_and_take_different_blocks() -> None:
    shared = [*attention(layers=(0,), group="a", offset=0), *attention(layers=(1,), group="b", offset=0)]
    for i, entry in enumerate(shared):
        entry["offset"], entry["axes"][0]["stride"] = i % 2 * 32, 64
    tables = {"a": table(0, 2), "b": table(1, 3)}
    move(cache(*shared), tables, cache(*shared, engine="decode"), {"a": table(7, 1), "b": table(0, 6)}, (0, 8))


def test_of_a_sliding_window_only_its_last_tokens_have_to_be_there() -> None:
    source = cache(*attention(layers=(0,), group="local"), *attention(layers=(1,)), windows={"local": 6})
    destination = cache(*attention(layers=(0, 1), slot=8), engine="decode")
    held = {"local": table(2, 3, first_token=8), "full": table(4, 5, 3, 6)}
    runs = move(source, held, destination, EIGHT, (0, 16))
    assert sum(run[5] for run in runs) == (8 + 16) * 2 * 8


def test_what_both_sides_still_hold_of_a_window_is_moved() -> None:
    source = cache(*attention(group="local"), windows={"local": 3})
    destination = cache(*attention(group="local"), engine="decode", windows={"local": 3})
    held, wanted = {"local": table(2, 3, first_token=8)}, {"local": table(1, 2, 3, first_token=4)}
    assert sum(run[5] for run in move(source, held, destination, wanted, (0, 16))) == 8 * 2 * 8


def state(channels: int = 6, start: int = 0, **more: object) -> list:
    """Convolution and SSM state of a Mamba-like layer: the channels are shared out, bank b is on every rank."""
    held, common = ("chan", start, 6), {"group": "state", "block": 3, **more}
    return [
        array("conv.x", order="block chan row", chan=channels, row=3, shard=held, **common),
        array("conv.b", order="block bank row", bank=1, row=3, shard=("bank", 0, 1), **common),
        array("ssm", order="block chan state", chan=channels, state=5, dtype="float32", shard=held, **common),
    ]


def test_a_state_is_moved_whole_whatever_the_token_range() -> None:
    source, destination = cache(*state()), cache(*state(2, 3), engine="decode", rank=1, of=3)
    for tokens in ((0, 9), (5, 9), (9, 9)):
        runs = move(source, {"state": table(2)}, destination, {"state": table(1)}, tokens)
        assert sum(run[5] for run in runs) == 2 * 3 * 2 + 3 * 2 + 2 * 5 * 4


def test_every_state_component_has_its_own_shard() -> None:
    sources = [cache(*state(3, 3 * i), rank=i, of=2) for i in range(2)]
    runs = move(sources, {"state": table(2)}, cache(*state(4, 1), engine="decode"), {"state": table(0)}, (0, 9))
    assert {run[0] for run in runs} == {0, 1}


def test_states_can_be_left_to_the_last_part_of_a_progressive_read() -> None:
    source, destination = cache(*state(), *attention()), cache(*state(), *attention(), engine="decode")
    chosen, tables = plan([source], destination), {"state": table(2), **FOUR}
    bound = bind(chosen, {0: tables}, tables, (0, 8), states=False)
    assert bound.nbytes == 8 * 2 * 8


def test_scales_are_components_of_another_dtype() -> None:
    def quantised(order: str) -> list:
        scale = array("k_scale", block=8, slot=4, head=2, dtype="float32", order=order.removesuffix(" dim"))
        return [*attention(dtype="float8_e4m3fn", order=order), scale]

    destination = cache(*quantised("head block slot dim"), engine="decode")
    assert {run[5] for run in move(cache(*quantised(NHD)), FOUR, destination, FOUR, (0, 16))} == {2 * 1, 4}


def test_a_draft_model_is_more_layers() -> None:
    draft = attention(3, layers=(100,), dim=4, group="draft", slot=2)
    source, destination = cache(*attention(), *draft), cache(*draft, *attention(), engine="decode")
    both = FOUR | {"draft": table(7, 6, 5, 4, 3, 2)}
    move(source, both, destination, both, (1, 12))


def test_a_destination_without_the_draft_model_leaves_it() -> None:
    source = cache(*attention(), *attention(layers=(100,), group="draft"))
    assert len(move(source, FOUR, cache(*attention(), engine="decode"), APART, (0, 16))) == 8


@pytest.mark.parametrize("first_token", [0, 4, 8])
def test_a_prefix_hit_may_end_inside_a_block(first_token: int) -> None:
    own = {"full": table(*range(4 - first_token // 4), first_token=first_token)}
    runs = move(cache(*attention()), FOUR, cache(*attention(), engine="decode"), own, (6, 16))
    assert sum(run[5] for run in runs) == (16 - max(6, first_token)) * 2 * 8


def test_a_group_that_is_fully_cached_has_an_empty_table() -> None:
    source = cache(*attention(layers=(0,), group="a"), *attention(layers=(1,), group="b"))
    destination = cache(*attention(layers=(0,), group="a"), *attention(layers=(1,), group="b"), engine="decode")
    held = {"a": table(1, 2), "b": table(3, 4)}
    assert sum(run[5] for run in move(source, held, destination, {"a": table(), "b": table(6, 5)}, (0, 8))) == 8 * 2 * 8


def test_an_empty_range_moves_nothing() -> None:
    assert move(cache(*attention()), FOUR, cache(*attention(), engine="decode"), FOUR, (7, 7)) == []


def test_a_table_may_reach_beyond_the_range() -> None:
    assert len(move(cache(*attention()), FOUR, cache(*attention()), {"full": table(7, 6, 5, 4, 3)}, (5, 6))) == 2


def test_runs_are_arrays_of_64_bit_integers() -> None:
    bound = bind(plan([cache(*attention())], cache(*attention())), {0: FOUR}, FOUR, (0, 16))
    (runs,) = bound.runs()
    assert {a.dtype for a in (runs.source_offsets, runs.destination_offsets, runs.nbytes)} == {np.dtype(np.int64)}
    assert len(as_tuples(bound)) == len(runs)


@pytest.mark.parametrize(("blocks", "runs"), [((0, 1, 2, 3), 2), ((0, 1, 3, 2), 6), ((3, 2, 1, 0), 8)])
def test_blocks_that_follow_one_another_are_counted_as_they_are_read(blocks: tuple[int, ...], runs: int) -> None:
    """Two rows, K and V, of four blocks: it decides how they are moved."""
    held = {"full": table(*blocks)}
    bound = bind(plan([cache(*attention())], cache(*attention())), {0: {"full": table(0, 1, 2, 3)}}, held, (0, 16))
    assert [bound.run_count, len(as_tuples(bound))] == [runs, runs]


def test_offsets_beyond_four_gigabytes_do_not_wrap() -> None:
    far = array(block=8, slot=4, head=2, dim=2, offset=0)
    far["axes"][0]["stride"] = 2**33
    runs = as_tuples(bind(plan([cache(far)], cache(far)), {0: {"full": table(7)}}, {"full": table(6)}, (0, 4)))
    assert runs == [(0, 0, 7 * 2**33, 0, 6 * 2**33, 32)]


# ---- three requests with the exact answer, element by element (tests/unit/examples, from the project's design) ----


EXAMPLES = sorted(Path(__file__).parent.joinpath("examples").iterdir())


def read(folder: Path) -> tuple[Case, set[Run]]:
    def data(name: str):
        return json.loads((folder / name).read_text())

    expected = data("element_runs.json")
    case = Case(
        tuple(Manifest.from_json(path.read_text()) for path in sorted(folder.glob("source[0-9]*.json"))),
        {int(rank): tables_from_json(tables) for rank, tables in data("source_tables.json").items()},
        Manifest.from_json((folder / "destination.json").read_text()),
        tables_from_json(data("destination_tables.json")),
        tuple(expected["tokens"]),
    )
    return case, {tuple(run) for run in expected["runs"]}


def elements(runs: list[Run], itemsize: int) -> list[Run]:
    return [
        (rank, region, source + at, to, destination + at, itemsize)
        for rank, region, source, to, destination, nbytes in runs
        for at in range(0, nbytes, itemsize)
    ]


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_planner_moves_exactly_the_elements_of_the_example(folder: Path) -> None:
    case, expected = read(folder)
    bound = bind(plan(case.sources, case.destination), case.source_tables, case.destination_tables, case.tokens)
    runs = as_tuples(bound)
    moved = elements(runs, itemsize=2)
    assert len(moved) == len(expected)
    assert set(moved) == expected
    assert mergeable(runs) == []


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_oracle_agrees_with_the_example(folder: Path) -> None:
    case, expected = read(folder)
    answer = case.sources, case.source_tables, case.destination, case.destination_tables, case.tokens
    verify(*answer, expected)
    assert {
        (place.rank, place.region, place.offset, need.destination.region, need.destination.offset, place.nbytes)
        for need in needs(*answer)
        for place in need.sources
    } == expected


def test_the_examples_are_there() -> None:
    assert len(EXAMPLES) == 3
