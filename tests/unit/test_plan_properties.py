"""The planner's invariant against the slow oracle, over engines drawn at random."""

import pytest
from caches import as_tuples
from hypothesis import given
from hypothesis import strategies as st
from oracle import NotHeld, can_stay_whole, cuts, meant, mergeable, needs, torn, undivided, verify
from strategies import Case, cases, marked_cases, tried

from kvferry.errors import KvferryError
from kvferry.manifest import SLOT
from kvferry.tables import BlockTable
from kvferryd.plan import PlanRefused, bind, plan


def answer(case: Case) -> tuple[object, ...]:
    """The case as `verify` and `needs` take it."""
    return case.sources, case.source_tables, case.destination, case.destination_tables, case.tokens


@tried(150)
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


@tried(150)
@given(cases(), st.data())
def test_tables_that_lack_blocks_are_refused_or_answered_rightly(case: Case, data: st.DataObject) -> None:
    tables = [*case.source_tables.values(), case.destination_tables]
    cut = data.draw(st.sampled_from(tables))
    name = data.draw(st.sampled_from(sorted(cut)))
    ids = cut[name].block_ids[: data.draw(st.integers(0, len(cut[name].block_ids)))]
    cut[name] = BlockTable.of(ids, cut[name].first_token + data.draw(st.integers(0, 3)))
    try:
        needs(*answer(case))
    except NotHeld:
        with pytest.raises(KvferryError):
            bound_of(case)
        return
    try:
        runs = as_tuples(bound_of(case))
    except KvferryError:
        return  # a replica that was not chosen would have held it
    verify(*answer(case), runs)


@tried(150)
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


@tried(100)
@given(marked_cases())
def test_what_may_not_be_divided_is_moved_whole_or_refused_by_name(case: Case) -> None:
    sources, destination = case.sources, case.destination
    reasons = {}
    for wanted in destination.components:
        held = [component for source in sources for component in source.components if component.label == wanted.label]
        if any(meant(component) != meant(wanted) for component in held):
            reasons[wanted.label] = "encoding"
        elif not can_stay_whole(sources, destination, wanted):
            reasons[wanted.label] = "divided"
    if reasons:
        with pytest.raises(PlanRefused) as refused:
            plan(sources, destination)
        assert {reason.component: reason.code for reason in refused.value.refusals} == reasons
        return
    plan(sources, destination)
    try:
        needs(*answer(case))
    except NotHeld:
        with pytest.raises(KvferryError):
            bound_of(case)
        return
    whole = {
        wanted.label: undivided(
            [each for side in (destination, *sources) for each in side.components if each.label == wanted.label]
        )
        for wanted in destination.components
    }
    apart = any(
        table.first_token % manifest.group(component.group).block_size
        for manifest, tables in (
            (destination, case.destination_tables),
            *((s, case.source_tables[s.rank]) for s in sources),
        )
        for component in manifest.components
        for table in [tables[component.group]]
        if SLOT in whole.get(component.label, ())
    )
    cut = cuts(case.tokens, destination, case.destination_tables, whole)
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
