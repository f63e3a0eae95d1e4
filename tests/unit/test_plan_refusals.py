"""Refusals of the planner, with which code and both values; and what is wrong with tables."""

import time

import pytest
from caches import HND, array, attention, cache, move, table

from kvferry.errors import KvferryError, Refusal
from kvferry.manifest import Manifest
from kvferry.wire import problem_from_proto, problem_to_proto
from kvferryd.plan import PlanRefused, bind, plan
from kvferryd.plan.refused import MEANING, reasons
from support import refused

FOUR = {"full": table(4, 5, 3, 6)}


def refusals(sources: Manifest | list[Manifest], destination: Manifest) -> tuple[Refusal, ...]:
    with refused("refused", PlanRefused) as caught:
        plan([sources] if isinstance(sources, Manifest) else sources, destination)
    assert all(str(reason) in str(caught.value) for reason in caught.value.refusals)
    return caught.value.refusals


def only(sources: Manifest | list[Manifest], destination: Manifest) -> tuple[str, str, str, str]:
    (reason,) = refusals(sources, destination)
    return reason.code, reason.component, reason.source, reason.destination


def one(**shape: object) -> Manifest:
    """A cache of one array."""
    return cache(array(**{"block": 4, "slot": 4, "head": 2, "dim": 2} | shape))


DIFFER: dict[str, tuple[Manifest, Manifest, str, str, str]] = {
    "fingerprint": (cache(*attention(), fingerprint="v1"), cache(*attention(), fingerprint="v2"), "", "v1", "v2"),
    "dtype": (one(dtype="float32"), one(dtype="float8_e4m3fn"), "0.k", "float32", "float8_e4m3fn"),
    "dtype of equal size": (one(dtype="bfloat16"), one(dtype="float16"), "0.k", "bfloat16", "float16"),
    "inner_extent": (one(dim=64), one(dim=128), "0.k", "dim 64", "dim 128"),
    "total": (one(shard=("head", 0, 8)), one(shard=("head", 0, 6)), "0.k", "8", "6"),
    "axes": (one(), cache(array(order="block slot head", block=4, slot=4, head=2)), "0.k", "dim", "head"),
    "group_kind": (
        cache(array(block=4, slot=4, dim=2, order="block slot dim")), cache(array(order="block dim", block=4, dim=2)),
        "0.k", "paged", "state",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", DIFFER)
def test_what_differs_is_named_with_both_values(how: str) -> None:
    ours, theirs, component, *values = DIFFER[how]
    code, found, *said = only(ours, theirs)
    assert (code, found) == (how.partition(" ")[0], component)
    assert all(value in each for value, each in zip(values, said, strict=True))
    assert code != "axes" or "dim" not in said[1]
    assert code not in ("dtype", "group_kind") or said == values


def test_a_component_that_no_source_lists() -> None:
    reasons = refusals(cache(*attention(layers=(0,))), cache(*attention(layers=(0, 1))))
    assert {(reason.code, reason.component) for reason in reasons} == {
        ("missing_component", name) for name in ("1.k", "1.v")
    }


def test_a_layer_that_the_two_describe_by_other_parts_is_refused_by_what_each_has() -> None:
    """As an opaque cache is one component, and another one keys and values."""
    parts = cache(*attention(), array("other", 1, block=8, slot=4, head=2, dim=2))
    packed = cache(array("kv", block=8, slot=4, head=2, dim=9, dtype="uint8", encoding="opaque:e.packed"))
    assert only(parts, packed) == ("encoding", "0.kv", "k bf16, v bf16", "kv opaque:e.packed")
    assert [str(each) for each in refusals(packed, parts)] == [
        "component 0.k: encoding: source has kv opaque:e.packed, destination has k bf16",
        "component 0.v: encoding: source has kv opaque:e.packed, destination has v bf16",
        "component 1.other: missing_component: source has no rank that lists it, destination has other bf16",
    ]


def test_a_layer_of_many_parts_is_told_in_short_and_at_once() -> None:
    def named(side: str) -> Manifest:
        return cache(*(array(f"{side}{i}", block=1, slot=1, head=1, dim=1) for i in range(5_000)))

    started = time.thread_time()
    with pytest.raises(PlanRefused) as caught:
        plan([named("theirs")], named("ours"))
    assert time.thread_time() - started < 2
    assert len({len(each.source) for each in caught.value.refusals}) == 1
    assert len(caught.value.refusals[0].source) < 200


def test_source_ranks_that_disagree_about_context_parallelism() -> None:
    sources = [
        cache(*attention(), rank=0, of=2, token_shard=(0, 2, 1)),
        cache(*attention(), rank=1, of=2, token_shard=(1, 2, 16)),
    ]
    assert {reason.code for reason in refusals(sources, cache(*attention()))} == {"token_shard"}


def test_heads_that_nobody_holds() -> None:
    sources = [cache(*attention(2, start=start, total=6), rank=i, of=2) for i, start in enumerate((0, 4))]
    reasons = refusals(sources, cache(*attention(6)))
    assert {(reason.code, reason.component) for reason in reasons} == {("uncovered", "0.k"), ("uncovered", "0.v")}
    for reason in reasons:
        assert "[0, 2)" in reason.source
        assert "[4, 6)" in reason.source
        assert "[2, 6)" in reason.destination or "[2, 4)" in reason.destination


def test_tokens_that_nobody_holds() -> None:
    """Context-parallel rank 1 of 2 is not among the sources: half of the tokens are nowhere."""
    (source,) = [cache(*attention(), rank=0, of=2, token_shard=(0, 2, 1))]
    assert {reason.code for reason in refusals(source, cache(*attention()))} == {"uncovered"}


def test_all_reasons_come_at_once() -> None:
    shape = {"block": 4, "slot": 4, "head": 2}
    source = cache(array("k", dim=2, **shape), array("v", dim=2, **shape))
    other = array("k", dim=2, dtype="float32", **shape), array("v", dim=3, **shape), array("v", 1, dim=2, **shape)
    found = {(r.code, r.component) for r in refusals(source, cache(*other))}
    assert found == {("dtype", "0.k"), ("inner_extent", "0.v"), ("missing_component", "1.v")}


def test_a_source_component_that_the_destination_lacks_is_no_reason() -> None:
    extra = array("extra", block=8, slot=4, dim=3, order="block slot dim")
    plan([cache(*attention(layers=(0, 1)), extra)], cache(*attention()))


def wrong(source_tables: dict, destination_tables: dict, tokens: tuple[int, int] = (0, 16)) -> KvferryError:
    chosen = plan([cache(*attention())], cache(*attention(), engine="decode"))
    with pytest.raises(KvferryError) as caught:
        bind(chosen, {0: source_tables} if source_tables is not None else {}, destination_tables, tokens)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (FOUR, {"full": table(1, 2, 3)}, ("destination", "12", "16")),
        ({"full": table(1, 2, 3)}, FOUR, ("source rank 0",)),
        ({"full": table(1, 2, 3, first_token=4)}, FOUR, ("source rank 0",)),
    ],
    ids=["destination ends", "source ends", "source begins"],
)
def test_a_table_that_does_not_cover_the_range(theirs: dict, ours: dict, said: tuple[str, ...]) -> None:
    error = wrong(theirs, ours)
    assert (error.code, error.field) == ("tables_too_short", "tables.full")
    assert all(each in error.message for each in said)


def test_a_window_whose_last_tokens_are_gone() -> None:
    source = cache(*attention(), windows={"full": 6})
    with pytest.raises(KvferryError, match="source rank 0"):
        move(source, {"full": table(2, first_token=12)}, cache(*attention(), engine="decode"), FOUR, (0, 16))


def test_a_window_that_reaches_further_back_at_the_destination_than_at_the_source() -> None:
    source, destination = cache(*attention(), windows={"full": 5}), cache(*attention(), windows={"full": 6})
    with pytest.raises(KvferryError, match="source rank 0"):
        move(source, {"full": table(2, first_token=12)}, destination, FOUR, (0, 16))


@pytest.mark.parametrize("block", [-1, 8, 2**40])
def test_block_ids_that_the_cache_does_not_have(block: int) -> None:
    for error in (wrong(FOUR, {"full": table(1, block, 2, 3)}), wrong({"full": table(1, 2, 3, block)}, FOUR)):
        assert (error.code, error.value) == ("block_id_out_of_range", str(block))
        assert "8" in error.remedy


def test_groups_without_a_table() -> None:
    assert wrong(FOUR, {}).code == wrong({}, FOUR).code == "tables_mismatch"
    assert wrong(FOUR, {"fulll": FOUR["full"]}).field == "tables.full"
    no_rank = wrong(None, FOUR)
    assert no_rank.code == "tables_mismatch" and "source rank 0" in no_rank.message


@pytest.mark.parametrize("ids", [(0, 1), ()])
def test_a_state_table_with_another_number_of_ids_than_one(ids: tuple[int, ...]) -> None:
    state = cache(array("ssm", order="block dim", block=3, dim=2, group="state"))
    with refused("tables_mismatch"):
        bind(plan([state], state), {0: {"state": table(*ids)}}, {"state": table(1)}, (0, 4))


@pytest.mark.parametrize("tokens", [(-1, 4), (5, 4)])
def test_token_ranges_that_are_none(tokens: tuple[int, int]) -> None:
    assert wrong(FOUR, FOUR, tokens).field == "tokens"


@pytest.mark.parametrize("stop", [17, 2**40, 2**62])
@pytest.mark.parametrize("size", [1, 2])
def test_token_ranges_far_beyond_the_tables_are_refused_at_once(stop: int, size: int) -> None:
    sources = [cache(*attention(), rank=i, of=size, token_shard=(i, size, 1)) for i in range(size)]
    with refused("tables_too_short"):
        move(sources, FOUR, cache(*attention(), engine="decode"), FOUR, (0, stop))


def test_a_destination_block_named_twice_would_be_written_twice() -> None:
    assert "twice" in wrong(FOUR, {"full": table(1, 2, 1, 3)}).message


def test_a_group_that_is_not_wanted_needs_no_source_table() -> None:
    both = [*attention(layers=(0,), group="a"), *attention(layers=(1,), group="b")]
    wanted = {"a": table(0), "b": table()}
    assert len(move(cache(*both), {"a": table(3)}, cache(*both, engine="decode"), wanted, (0, 4))) == 2


def test_tables_that_begin_far_away_cost_no_more_than_others() -> None:
    far = 2**40
    sources = [cache(*attention(), rank=i, of=2, token_shard=(i, 2, 1)) for i in range(2)]
    held = {i: {"full": table(1, 2, first_token=far // 2 - 4)} for i in range(2)}
    chosen = plan(sources, cache(*attention(), engine="decode"))
    assert bind(chosen, held, {"full": table(1, 2, first_token=far - 8)}, (0, far)).nbytes == 8 * 2 * 8


def packed(heads: tuple[int, int] = (0, 2), *, slot: int = 4, **more: object) -> dict:
    """Raw bytes of heads [start, stop) of 2 that mean nothing to anybody, unless `more` says so."""
    start, stop = heads
    shape: dict = {"dtype": "uint8", "block": 16 // slot, "slot": slot, "head": stop - start, "dim": 2}
    return array(shard=("head", start, 2), **{**shape, **more})


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ({"encoding": "fp8_e4m3fn"}, {"encoding": "fp8_e5m2"}, ("encoding", "fp8_e4m3fn", "fp8_e5m2")),
        ({"encoding": "fp8_e4m3fn"}, {}, ("encoding", "fp8_e4m3fn", "opaque:uint8")),
        ({"encoding": "fp8_e4m3fn"}, {"dtype": "float8_e5m2"}, ("encoding", "fp8_e4m3fn", "fp8_e5m2")),
        ({"encoding": "opaque:a"}, {"encoding": "opaque:b"}, ("encoding", "opaque:a", "opaque:b")),
        ({}, {"dtype": "int8"}, ("dtype", "uint8", "int8")),
        ({"dtype": "float8_e5m2"}, {"dtype": "float8_e4m3fn"}, ("dtype", "float8_e5m2", "float8_e4m3fn")),
        ({"encoding": "opaque:a", "dtype": "int16"}, {"encoding": "opaque:a"}, ("dtype", "int16", "uint8")),
    ],
)  # fmt: skip
def test_encodings_that_differ(theirs: dict, ours: dict, reason: tuple[str, str, str]) -> None:
    code, _, source, destination = only(cache(packed(**theirs)), cache(packed(**ours)))
    assert (code, source, destination) == reason


def test_one_meaning_under_two_dtypes_is_paired() -> None:
    raw, typed = packed(encoding="fp8_e4m3fn"), packed(dtype="float8_e4m3fn", order=HND, slot=8)
    move(cache(raw), {"full": table(0, 2, 1, 3)}, cache(typed, engine="decode"), {"full": table(1, 0)}, (1, 15))


@pytest.mark.parametrize(
    ("theirs", "ours", "source", "destination"),
    [
        ({"heads": (0, 1)}, {}, "head [0, 1) of 2", "head [0, 2) of 2"),
        ({"slot": 8}, {}, "slot: blocks of 8 tokens", "slot: blocks of 4 tokens"),
        ({"order": HND}, {}, "2 x 8 bytes", "2 x 2 bytes"),
        ({"pad": 1}, {}, "", ""),
    ],
)
def test_what_is_opaque_is_moved_between_equal_shares_and_layouts_only(
    theirs: dict, ours: dict, source: str, destination: str
) -> None:
    reasons = refusals(cache(packed(**theirs)), cache(packed(**ours)))
    assert {reason.code for reason in reasons} == {"divided"}
    assert source in reasons[0].source
    assert destination in reasons[0].destination


def test_ranks_with_equal_shares_of_what_is_opaque_are_paired() -> None:
    """TP2 to TP2, blocks elsewhere, and more of them: what lies outside of a block is free."""
    sources = [cache(packed((rank, rank + 1)), rank=rank, of=2) for rank in (0, 1)]
    larger = packed((1, 2), block=32)
    destination = cache(larger, engine="decode", rank=1, of=2)
    runs = move(sources, {"full": table(0, 2)}, destination, {"full": table(31, 5)}, (0, 8))
    assert {run[0] for run in runs} == {1}
    assert sorted(run[5] for run in runs) == [8, 8]


def test_an_axis_that_is_whole_leaves_the_others_free() -> None:
    """Rows of packed values: heads and tokens are divided, rows are not."""
    rows = [packed((rank, rank + 1), encoding="nvfp4", whole=("dim",)) for rank in (0, 1)]
    sources = [cache(row, rank=rank, of=2) for rank, row in enumerate(rows)]
    destination = cache(packed(encoding="nvfp4", slot=8, order=HND), engine="decode")
    move(sources, {"full": table(0, 2, 1, 3)}, destination, {"full": table(1, 0)}, (1, 15))
    code, _, theirs, ours = only(
        cache(packed(encoding="nvfp4")), cache(packed(encoding="nvfp4", order="block dim slot head", whole=("dim",)))
    )
    assert (code, theirs, ours) == ("divided", "dim [0, 2) of 2: 2 x 1 bytes", "dim [0, 2) of 2: 2 x 8 bytes")


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ((2, 1), (2, 1), True), ((2, 4), (2, 8), True), ((2, 4), (1, 1), True), ((1, 1), (3, 8), True),
        ((2, 1), (1, 1), False), ((2, 4), (2, 1), False), ((2, 2), (3, 4), False), ((2, 6), (1, 1), False),
    ],
)  # fmt: skip
def test_context_parallelism_deals_out_whole_blocks_of_what_is_opaque(
    theirs: tuple[int, int], ours: tuple[int, int], fits: bool
) -> None:
    sources = [cache(packed(), rank=i, of=theirs[0], token_shard=(i, *theirs)) for i in range(theirs[0])]
    destination = cache(packed(), engine="decode", of=ours[0], token_shard=(0, *ours))
    if fits:
        assert plan(sources, destination).grain % 4 == 0
        move(sources, {"full": table(0, 2, 1, 3)}, destination, {"full": table(1, 2, 0, 3)}, (0, 16))
        return
    code, _, source, destination_said = only(sources, destination)
    assert code == "divided"
    assert f"{theirs[1]} at a time" in source
    assert destination_said.startswith("slot: blocks of 4 tokens")


@pytest.mark.parametrize("tokens", [(0, 15), (1, 16), (5, 7), (4, 14)])
def test_token_ranges_that_end_inside_a_block_of_what_is_opaque(tokens: tuple[int, int]) -> None:
    chosen = plan([cache(packed())], cache(packed(), engine="decode"))
    tables = {"full": table(0, 2, 1, 3)}
    with refused("divided", field="tokens", value=f"{tokens[0]}:{tokens[1]}") as caught:
        bind(chosen, {0: tables}, tables, tokens)
    assert "whole blocks" in caught.value.remedy
    assert bind(chosen, {0: tables}, {"full": table()}, tokens).nbytes == 0, "nothing of it is wanted"
    assert bind(chosen, {0: tables}, {"full": table(1, 2, first_token=8)}, (5, 16)).nbytes == 8 * 4


def test_tables_that_begin_inside_a_block_of_what_is_opaque() -> None:
    chosen = plan([cache(packed())], cache(packed(), engine="decode"))
    for theirs, ours in ((2, 0), (0, 2)):
        source, own = ({"full": table(0, 1, 2, 3, first_token=first)} for first in (theirs, ours))
        with refused("divided", field="tables.full.first_token"):
            bind(chosen, {0: source}, own, (4, 16) if theirs else (0, 16))


def test_a_reason_of_many_layers_is_told_once_with_their_range() -> None:
    layers = range(80)
    with pytest.raises(PlanRefused) as caught:
        plan([cache(*attention(layers=layers))], cache(*attention(layers=layers, dtype="float16")))
    assert caught.value.message == (
        "source and destination cannot be paired: layers 0-79 k: dtype: source has bfloat16, destination has float16; "
        "layers 0-79 v: dtype: source has bfloat16, destination has float16"
    )
    assert caught.value.remedy == "give both engines the same KV-cache dtype"
    assert len(caught.value.refusals) == 160


def test_layers_that_do_not_follow_one_another_and_long_values() -> None:
    found = [Refusal("total", f"{layer}.k", "head 8", "head 4") for layer in (0, 1, 2, 5, 9, 10)]
    found.append(Refusal("uncovered", "3.k", "x" * 5000, "y"))
    ranges, long = reasons([Refusal("fingerprint", "", "a", "b"), *found])[1:]
    assert ranges == "layers 0-2, 5, 9-10 k: total: source has head 8, destination has head 4"
    assert long.startswith("component 3.k: uncovered: source has xxx")
    assert len(long) < 300


def test_ten_reasons_are_told_and_the_rest_counted_each_kind_with_its_remedy() -> None:
    found = [Refusal("missing_component", f"{layer}.k{layer}", "none", "some") for layer in range(11)]
    told = PlanRefused([Refusal("encoding", "0.v", "bf16", "fp8_e5m2"), *found])
    assert "0.v: encoding: source has bf16, destination has fp8_e5m2; component 0.k0: missing" in told.message
    assert told.message.endswith("8.k8: missing_component: source has none, destination has some; and 2 more reasons")
    assert told.remedy == f"{MEANING['encoding'][1]}; {MEANING['missing_component'][1]}"
    assert problem_from_proto(problem_to_proto(told)).message == told.message
