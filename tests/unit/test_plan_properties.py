"""The planner's invariant against the slow oracle, over engines drawn at random."""

import pytest
from caches import as_tuples
from hypothesis import given
from hypothesis import strategies as st
from oracle import NotHeld, can_stay_whole, cuts, meant, mergeable, needs, torn, undivided, verify
from strategies import Case, cases, tried, whole_cases

from kvferry.errors import KvferryError
from kvferry.manifest import SLOT
from kvferry.tables import BlockTable
from kvferryd.plan import PlanRefused, bind, plan


def answer(case: Case) -> tuple[object, ...]:
    """The case as `verify` and `needs` take it."""
    return case.sources, case.source_tables, case.destination, case.destination_tables, case.tokens


@tried(50)
@given(cases())
def test_every_wanted_element_is_written_once_from_the_right_place_and_nothing_else_is(case: Case) -> None:
    """In runs as long as can be, and the same ones whenever it is asked."""
    chosen, again = (plan(case.sources, case.destination) for _ in range(2))
    bound = bind(chosen, case.source_tables, case.destination_tables, case.tokens)
    runs = as_tuples(bound)
    verify(*answer(case), runs)
    assert bound.nbytes == sum(run[5] for run in runs)
    assert mergeable(runs) == []
    assert chosen.reads_from == again.reads_from
    assert runs == as_tuples(bind(again, case.source_tables, case.destination_tables, case.tokens))
    assert {run[0] for run in runs} <= set(chosen.reads_from) <= {source.rank for source in case.sources}


def refused_as_not_held(case: Case) -> bool:
    """Whether a wanted element is in no table; then it is refused."""
    try:
        needs(*answer(case))
    except NotHeld:
        with pytest.raises(KvferryError):
            bound_of(case)
        return True
    return False


@tried(50)
@given(cases(), st.data())
def test_tables_that_lack_blocks_are_refused_or_answered_rightly(case: Case, data: st.DataObject) -> None:
    tables = [*case.source_tables.values(), case.destination_tables]
    cut = data.draw(st.sampled_from(tables))
    name = data.draw(st.sampled_from(sorted(cut)))
    ids = cut[name].block_ids[: data.draw(st.integers(0, len(cut[name].block_ids)))]
    cut[name] = BlockTable.of(ids, cut[name].first_token + data.draw(st.integers(0, 3)))
    if refused_as_not_held(case):
        return
    try:
        runs = as_tuples(bound_of(case))
    except KvferryError:
        return  # a replica that was not chosen would have held it
    verify(*answer(case), runs)


@tried(50)
@given(cases(), st.data())
def test_a_range_moved_in_two_parts_writes_what_it_writes_in_one(case: Case, data: st.DataObject) -> None:
    first, last = case.tokens
    chosen, middle = plan(case.sources, case.destination), data.draw(st.integers(first, last))

    def written(tokens: tuple[int, int], states: bool = True) -> dict[tuple[int, int], tuple[int, int, int]]:
        bound = bind(chosen, case.source_tables, case.destination_tables, tokens, states=states)
        return {
            (to, destination + byte): (rank, region, source + byte)
            for rank, region, source, to, destination, nbytes in as_tuples(bound)
            for byte in range(nbytes)
        }

    whole = written((first, last))
    try:
        head = written((first, middle), states=False)
    except KvferryError:
        return  # the window's tokens of an earlier end are gone by now
    tail = written((middle, last))
    assert not set(head) & set(tail)
    assert head | tail == whole


@tried(170)
@given(whole_cases())
def test_what_may_not_be_divided_is_moved_whole_or_refused_by_name(case: Case) -> None:
    sources, destination = case.sources, case.destination
    (wanted,), held = destination.components, [component for source in sources for component in source.components]
    reason = None
    if any(meant(component) != meant(wanted) for component in held):
        reason = "encoding"
    elif not can_stay_whole(sources, destination, wanted):
        reason = "divided"
    if reason:
        with pytest.raises(PlanRefused) as refused:
            plan(sources, destination)
        assert {each.code for each in refused.value.refusals} == {reason}
        return
    plan(sources, destination)
    if refused_as_not_held(case):
        return
    own, tables = destination.groups[0], [*case.source_tables.values(), case.destination_tables]
    whole = SLOT in undivided([wanted, *held])
    apart = whole and any(each["full"].first_token % own.block_size for each in tables)
    cut = whole and cuts(case.tokens, own, case.destination_tables["full"])
    try:
        runs = as_tuples(bound_of(case))
    except KvferryError as error:
        refused_as = error.code
    else:
        assert not cut
        verify(*answer(case), runs)
        assert torn(sources, case.source_tables, destination, case.destination_tables, runs) == []
        return
    assert refused_as == "divided" if cut else refused_as == "tables_too_short" or apart


def bound_of(case: Case):
    return bind(plan(case.sources, case.destination), case.source_tables, case.destination_tables, case.tokens)
