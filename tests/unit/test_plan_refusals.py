"""What the planner refuses, with which code and both values; and what is wrong with tables."""

import pytest
from caches import array, attention, cache, move, table

from kvferry.errors import KvferryError, Refusal
from kvferry.manifest import Manifest
from kvferryd.plan import PlanRefused, bind, plan

FOUR = {"full": table(4, 5, 3, 6)}


def refused(sources: Manifest | list[Manifest], destination: Manifest) -> tuple[Refusal, ...]:
    with pytest.raises(PlanRefused) as caught:
        plan([sources] if isinstance(sources, Manifest) else sources, destination)
    assert caught.value.code == "refused"
    assert all(str(reason) in str(caught.value) for reason in caught.value.refusals)
    return caught.value.refusals


def only(sources: Manifest | list[Manifest], destination: Manifest) -> tuple[str, str, str, str]:
    (reason,) = refused(sources, destination)
    return reason.code, reason.component, reason.source, reason.destination


def test_fingerprints_that_differ() -> None:
    code, _, source, destination = only(cache(*attention(), fingerprint="v1"), cache(*attention(), fingerprint="v2"))
    assert code == "fingerprint"
    assert "v1" in source
    assert "v2" in destination


def test_dtypes_that_differ() -> None:
    wide = cache(array(block=4, slot=4, head=2, dim=2, dtype="float32"))
    narrow = cache(array(block=4, slot=4, head=2, dim=2, dtype="float8_e4m3fn"))
    assert only(wide, narrow) == ("dtype", "0.k", "float32", "float8_e4m3fn")


def test_dtypes_of_equal_size_that_differ() -> None:
    a, b = (cache(array(block=4, slot=4, head=2, dtype=d, order="block slot head")) for d in ("bfloat16", "float16"))
    assert only(a, b) == ("dtype", "0.k", "bfloat16", "float16")


def test_a_component_that_no_source_lists() -> None:
    reasons = refused(cache(*attention(layers=(0,))), cache(*attention(layers=(0, 1))))
    assert {(reason.code, reason.component) for reason in reasons} == {
        ("missing_component", "1.k"),
        ("missing_component", "1.v"),
    }


def test_inner_extents_that_differ() -> None:
    code, component, source, destination = only(
        cache(array(block=4, slot=4, head=2, dim=64)), cache(array(block=4, slot=4, head=2, dim=128))
    )
    assert (code, component) == ("inner_extent", "0.k")
    assert "64" in source
    assert "128" in destination


def test_totals_that_differ() -> None:
    code, component, source, destination = only(
        cache(array(block=4, slot=4, head=2, dim=2, shard=("head", 0, 8))),
        cache(array(block=4, slot=4, head=2, dim=2, shard=("head", 0, 6))),
    )
    assert (code, component) == ("total", "0.k")
    assert "8" in source
    assert "6" in destination


def test_axis_sets_that_differ() -> None:
    code, component, source, destination = only(
        cache(array(block=4, slot=4, head=2, dim=2)), cache(array(order="block slot head", block=4, slot=4, head=2))
    )
    assert (code, component) == ("axes", "0.k")
    assert "dim" in source
    assert "dim" not in destination


def test_a_paged_component_and_a_state_of_the_same_name() -> None:
    paged, state = (
        cache(array(block=4, slot=4, dim=2, order="block slot dim")),
        cache(array(order="block dim", block=4, dim=2)),
    )
    assert only(paged, state) == ("group_kind", "0.k", "paged", "state")


def test_source_ranks_that_disagree_about_context_parallelism() -> None:
    sources = [
        cache(*attention(), rank=0, of=2, token_shard=(0, 2, 1)),
        cache(*attention(), rank=1, of=2, token_shard=(1, 2, 16)),
    ]
    assert {reason.code for reason in refused(sources, cache(*attention()))} == {"token_shard"}


def test_heads_that_nobody_holds() -> None:
    sources = [cache(*attention(2, start=start, total=6), rank=i, of=2) for i, start in enumerate((0, 4))]
    reasons = refused(sources, cache(*attention(6)))
    assert {(reason.code, reason.component) for reason in reasons} == {("uncovered", "0.k"), ("uncovered", "0.v")}
    for reason in reasons:
        assert "[0, 2)" in reason.source
        assert "[4, 6)" in reason.source
        assert "[2, 6)" in reason.destination or "[2, 4)" in reason.destination


def test_tokens_that_nobody_holds() -> None:
    """Context-parallel rank 1 of 2 is not among the sources: half of the tokens are nowhere."""
    (source,) = [cache(*attention(), rank=0, of=2, token_shard=(0, 2, 1))]
    assert {reason.code for reason in refused(source, cache(*attention()))} == {"uncovered"}


def test_all_reasons_come_at_once() -> None:
    source = cache(array("k", block=4, slot=4, head=2, dim=2), array("v", block=4, slot=4, head=2, dim=2))
    destination = cache(
        array("k", block=4, slot=4, head=2, dim=2, dtype="float32"),
        array("v", block=4, slot=4, head=2, dim=3),
        array("v", 1, block=4, slot=4, head=2, dim=2),
    )
    assert {(r.code, r.component) for r in refused(source, destination)} == {
        ("dtype", "0.k"),
        ("inner_extent", "0.v"),
        ("missing_component", "1.v"),
    }


def test_a_source_component_that_the_destination_lacks_is_no_reason() -> None:
    plan(
        [cache(*attention(layers=(0, 1)), array("extra", block=8, slot=4, dim=3, order="block slot dim"))],
        cache(*attention()),
    )


def wrong(source_tables: dict, destination_tables: dict, tokens: tuple[int, int] = (0, 16)) -> KvferryError:
    chosen = plan([cache(*attention())], cache(*attention(), engine="decode"))
    with pytest.raises(KvferryError) as caught:
        bind(chosen, {0: source_tables} if source_tables is not None else {}, destination_tables, tokens)
    assert caught.value.remedy
    return caught.value


def test_a_destination_table_that_ends_before_the_range() -> None:
    error = wrong(FOUR, {"full": table(1, 2, 3)})
    assert (error.code, error.field) == ("tables_too_short", "tables.full")
    assert "destination" in error.message
    assert "12" in error.message
    assert "16" in error.message


def test_a_source_table_that_ends_before_the_range() -> None:
    error = wrong({"full": table(1, 2, 3)}, FOUR)
    assert error.code == "tables_too_short"
    assert "source rank 0" in error.message


def test_a_source_table_that_begins_after_the_range() -> None:
    assert wrong({"full": table(1, 2, 3, first_token=4)}, FOUR).code == "tables_too_short"


def test_a_window_whose_last_tokens_are_gone() -> None:
    source = cache(*attention(), windows={"full": 6})
    with pytest.raises(KvferryError, match="source rank 0"):
        move(source, {"full": table(2, first_token=12)}, cache(*attention(), engine="decode"), FOUR, (0, 16))


@pytest.mark.parametrize("block", [-1, 8, 2**40])
def test_block_ids_that_the_cache_does_not_have(block: int) -> None:
    for error in (wrong(FOUR, {"full": table(1, block, 2, 3)}), wrong({"full": table(1, 2, 3, block)}, FOUR)):
        assert (error.code, error.value) == ("block_id_out_of_range", str(block))
        assert "8" in error.remedy


def test_groups_without_a_table() -> None:
    assert wrong(FOUR, {}).code == "tables_mismatch"
    assert wrong({}, FOUR).code == "tables_mismatch"
    assert wrong(FOUR, {"fulll": FOUR["full"]}).field == "tables.full"


def test_a_source_rank_without_tables() -> None:
    error = wrong(None, FOUR)
    assert error.code == "tables_mismatch"
    assert "source rank 0" in error.message


@pytest.mark.parametrize("ids", [(0, 1), ()])
def test_a_state_table_with_another_number_of_ids_than_one(ids: tuple[int, ...]) -> None:
    state = cache(array("ssm", order="block dim", block=3, dim=2, group="state"))
    with pytest.raises(KvferryError) as caught:
        bind(plan([state], state), {0: {"state": table(*ids)}}, {"state": table(1)}, (0, 4))
    assert caught.value.code == "tables_mismatch"


@pytest.mark.parametrize("tokens", [(-1, 4), (5, 4)])
def test_token_ranges_that_are_none(tokens: tuple[int, int]) -> None:
    assert wrong(FOUR, FOUR, tokens).field == "tokens"


@pytest.mark.parametrize("stop", [17, 2**40, 2**62])
@pytest.mark.parametrize("size", [1, 2])
def test_token_ranges_far_beyond_the_tables_are_refused_at_once(stop: int, size: int) -> None:
    sources = [cache(*attention(), rank=i, of=size, token_shard=(i, size, 1)) for i in range(size)]
    with pytest.raises(KvferryError) as caught:
        move(sources, FOUR, cache(*attention(), engine="decode"), FOUR, (0, stop))
    assert caught.value.code == "tables_too_short"


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
