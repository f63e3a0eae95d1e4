"""Rules of requests on one rank, by events: what an order says, ids, kinds of attempts, what is forgotten.

requests_world.py judges which attempts end, and by which others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from requests_world import Order

from kvferry.errors import KvferryError, PeerFailed
from kvferry.protocol import parts, requests
from kvferry.protocol import requests_events as e
from kvferry.protocol.attempts import Attempt, Limits, ReadingRank, draining
from kvferry.protocol.requests import Requests

RANK_0, RANK_1 = ReadingRank("decode", "1", 0, 1), ReadingRank("decode", "1", 1, 1)
ORDER, ELSEWHERE = Order(), Order(address="b")
"""The second is otherwise than the first, from the same source."""
TRANSFERS, HISTORY = 4, 2
SILENT, DRAINING = PeerFailed("peer_unreachable", "it is silent"), PeerFailed("draining", "a test")


def blocks(*ids: int, weights: str = "") -> e.Reservation:
    return e.Reservation(ids, {"full": np.array(ids, dtype=np.int64)}, weights)


def requests_of(*events: e.Event, transfers: int = TRANSFERS, history: int = HISTORY, **limits: bool) -> Requests:
    it = Requests("one", Limits(transfers, history, **limits))
    for event in events:
        it.on(event)
        it.check()
    return it


def ordered(name: str = "r", order: Order = ORDER, id: str = "", **said: object) -> e.Ordered:
    return e.Ordered(RANK_0, name, order, order_id=id, said=(name, order, str(said)), **said)  # type: ignore[arg-type]


def brings(*ids: int, name: str = "r", order: Order = ORDER) -> e.Ordered:
    return ordered(name, order, brought={0: ids}, reservation=blocks(*ids))


def reserved(
    number: int = 1, at: ReadingRank = RANK_0, *ids: int, name: str = "r", order: Order | None = None
) -> e.Reserved:
    return e.Reserved(at, name, Attempt(number), blocks(*(ids or (number,))), order)


def handed(number: int = 1, name: str = "r", order: Order = ORDER) -> e.Handed:
    return e.Handed(RANK_1, name, Attempt(number), order)


def elsewhere(number: int = 1, name: str = "r", at: ReadingRank = RANK_0, *, failed: bool = True) -> e.EndedElsewhere:
    return e.EndedElsewhere(at, name, Attempt(number), failed, "rank 1: full")


def end(it: Requests, part: int, why: KvferryError = SILENT) -> None:
    """On all ranks, and nothing is written any more."""
    it.on(e.Ended(part, why, over=True))
    it.on(e.Quiet(part))


def stops(effects: list[e.Effect]) -> list[tuple[int, bool, str]]:
    return [(each.part, each.failed, each.why.code) for each in effects if isinstance(each, e.Stop)]


def codes(effects: list[e.Effect]) -> list[str]:
    """The codes of refusals and stops."""
    return [each.why.code for each in effects if isinstance(each, e.Refused | e.Stop)]


def refusal(it: Requests, event: e.Event) -> KvferryError:
    """Why the event is refused, whichever way that is told."""
    try:
        refused = it.on(event)[-1]
    except KvferryError as why:
        return why
    finally:
        it.check()
    assert isinstance(refused, e.Refused)
    return refused.why


# ---- order ids ----


def test_an_order_id_means_one_order() -> None:
    for otherwise in (ordered(id="o", order=ELSEWHERE), ordered("s", id="o"), ordered(id="o", number=1)):
        it = requests_of()
        assert it.on(ordered(id="o"))[-1] == e.Taken(1, new=True)
        for _ in range(2):  # before its end and after
            assert it.on(ordered(id="o")) == [e.Taken(1, new=False)]
            why = refusal(it, otherwise)
            assert (why.code, why.field) == ("order_conflict", "order_id")
            assert "order o was given already, otherwise" in why.message
            if not it.parts[1].ended:
                end(it, 1)


def test_an_order_that_comes_again_when_its_record_is_forgotten_is_no_new_one() -> None:
    it = requests_of(reserved(), ordered(id="o"))
    end(it, 1)
    for part in range(2, 2 + HISTORY):
        it.on(reserved(part, name=f"later-{part}"))
        end(it, part)
    assert 1 not in it.parts
    why = refusal(it, ordered(id="o"))
    assert (why.code, why.field) == ("order_conflict", "order_id")
    assert "order o was given already, and its record is forgotten" in why.message


# ---- orders and reservations ----


def test_an_order_of_an_attempt_that_has_ended_is_told_of_that_one() -> None:
    it = requests_of(reserved(order=ORDER))
    end(it, 1)
    assert it.on(ordered(number=1)) == [e.Taken(1, new=False)]
    why = refusal(it, ordered(number=1, order=ELSEWHERE))
    assert why.code == "order_conflict" and "ordered already, otherwise" in why.message


def test_an_attempt_has_one_reservation() -> None:
    it = requests_of(reserved(1, RANK_0, 4))
    assert it.on(reserved(1, RANK_0, 4)) == [e.Taken(1)]
    assert refusal(it, reserved(1, RANK_0, 5)).code == "receive_conflict"


def test_rank_0_hands_on_the_tables_that_an_order_brings() -> None:
    assert e.HandOn(1, {0: (4, 5)}) in requests_of().on(brings(4, 5))


def test_a_reservation_does_not_join_an_order_that_is_about_to_end() -> None:
    it = requests_of(ordered(), e.Abort(RANK_0, "r", "enough"))
    assert it.on(reserved())[-1] == e.Taken(2)


def test_an_order_joins_no_attempt_that_is_about_to_end() -> None:
    it = requests_of(reserved(), e.AbortPart(1, "enough"))
    assert "has ended already" in refusal(it, ordered(number=1)).message
    assert it.on(ordered())[-1] == e.Taken(2), "it waits for the next"
    assert codes(it.on(reserved())) == ["aborted"]
    assert codes(it.on(e.Handed(RANK_0, "r", Attempt(1), ORDER))) == ["aborted"]


def test_orders_of_one_attempt_name_one_source_and_are_completed_by_each_other() -> None:
    it = requests_of(ordered())
    named = Order(lease=1)
    assert e.NameSource(1, named) in it.on(reserved(order=named))
    assert it.on(reserved(order=named)) == [e.Taken(1)], "it is named once"
    assert it.on(ordered(order=named)) == [e.Taken(1, new=False)]
    it = requests_of(reserved(), ordered())
    assert it.on(reserved(order=named)) == [e.Taken(1)], "the transfer goes on as it was ordered"
    assert refusal(it, reserved(order=Order("another"))).code == "order_conflict"


def test_an_order_that_rank_0_hands_on_comes_to_a_rank_that_has_its_own() -> None:
    it = requests_of(reserved(1, RANK_1, order=ORDER))
    for order in (ORDER, Order(lease=3)):
        assert it.on(handed(order=order)) == [e.Follow(1, order), e.Taken(1, new=False)]
    assert codes(it.on(replace(handed(), reservation=blocks(9)))) == 2 * ["receive_conflict"]


def test_a_lease_that_the_engine_names_on_some_ranks_may_be_another_on_rank_0() -> None:
    named = reserved(1, RANK_1, order=Order(lease=3))
    assert codes(requests_of(named).on(handed(order=Order(lease=3)))) == []
    for first, second in ((handed(), named), (named, handed())):
        why = refusal(requests_of(first), second)
        assert (why.code, why.field) == ("order_conflict", "source.lease")


def test_rank_0_alone_hands_an_order_on_and_once() -> None:
    for at, led in ((RANK_0, 1), (RANK_1, 0)):
        it = requests_of()
        said = [each for _ in range(2) for each in it.on(reserved(1, at, order=ORDER))]
        assert said.count(e.HandOn(1, {})) == led


def test_hands_are_shaken_before_the_reservation_only() -> None:
    it = requests_of()
    assert e.Meet(1) in it.on(ordered())
    it.on(reserved(name="s"))
    assert e.Meet not in map(type, it.on(ordered("s")))
    it = requests_of(reserved(1, RANK_1, name="s"))
    for name, says in (("r", [e.TakeOrder(2, ORDER, True), e.Meet(2)]), ("s", [e.TakeOrder(1, ORDER, True)])):
        said = it.on(handed(name=name))
        assert [each for each in said if isinstance(each, e.TakeOrder | e.Meet)] == says
        assert isinstance(said[-1], e.Taken)


def test_a_group_without_blocks_is_reserved() -> None:
    assert requests_of().on(e.Reserved(RANK_0, "r", Attempt(1), blocks()))[-1] == e.Taken(1)


def test_orders_that_bring_tables_need_leave() -> None:
    it = requests_of(tables=False)
    for event in (brings(1), replace(handed(), reservation=blocks(1))):
        assert refusal(it, event).code == "tables_not_allowed"
    assert it.on(reserved(2))[-1] == e.Taken(1)
    assert refusal(it, brings(3)).code == "tables_not_allowed"


def test_orders_that_bring_tables_are_counted_and_are_a_kind_of_their_own() -> None:
    it = requests_of()
    begin, *_, taken = it.on(brings(1))
    assert isinstance(begin, e.Begin)
    assert (begin.attempt, taken) == (Attempt(1, "one"), e.Taken(1))
    assert it.on(brings(1)) == [e.Taken(1, new=False)]
    for other, why in (
        (brings(2), "with other tables"), (brings(1, order=ELSEWHERE), "was ordered already, otherwise"),
        (replace(brings(1), number=1), "names attempt 1: rank 0 counts such orders"),
    ):  # fmt: skip
        refused = refusal(it, other)
        assert refused.code == "order_conflict" and why in refused.message
    assert codes(it.on(reserved())) == ["order_conflict"]
    end(it, 1)
    begin = next(each for each in it.on(brings(2)) if isinstance(each, e.Begin))
    assert begin.attempt == Attempt(2, "one")
    assert codes(it.on(reserved())) == ["order_conflict"], "it is no lower attempt"


def test_an_order_that_brings_tables_takes_no_place_of_what_its_engine_has_reserved() -> None:
    it = requests_of(reserved())
    assert refusal(it, brings(2)).code == "receive_conflict"
    assert not it.parts[1].stopped
    end(it, 1)
    assert "another kind of attempts: its engine reserves blocks for it" in refusal(it, brings(2)).message


# ---- which attempt ----


def test_a_part_is_found_by_its_attempt() -> None:
    it = requests_of(reserved(2))
    key = RANK_0.key("r")
    assert (it.find(key, Attempt(2)), it.find(key, Attempt(3)), it.find(RANK_0.key("s"), Attempt(1))) == (1, None, None)
    for attempt, code in ((Attempt(1), "stale_attempt"), (Attempt(1, "one"), "order_conflict")):
        with pytest.raises(KvferryError) as over:
            it.find(key, attempt)
        assert over.value.code == code


def test_a_higher_attempt_takes_the_place_of_lower_ones_and_of_orders_for_them() -> None:
    it = requests_of(reserved(), ordered(number=2), ordered(number=4))
    assert sorted(stops(it.on(reserved(3)))) == [(1, False, "superseded"), (2, False, "superseded")]
    assert codes(it.on(reserved(2))) == ["stale_attempt"]
    assert it.on(reserved(3))[-1] == e.Taken(4)


def test_an_order_of_rank_0_ends_orders_that_wait_for_lower_attempts_and_is_no_lower_one() -> None:
    it = requests_of(handed(2))
    assert codes(it.on(handed(3))) == ["superseded"]
    assert codes(it.on(handed(1))) == ["stale_attempt"]


def test_what_has_ended_on_another_rank_ends_here_or_does_not_begin() -> None:
    for failed, code in ((True, "rank_failed"), (False, "aborted")):
        it = requests_of(reserved(2))
        assert it.on(elsewhere(1, failed=failed)) == [], "the attempt before is over already"
        (stop,) = it.on(elsewhere(2, failed=failed))
        why = "attempt 2 of request r has ended on another rank: rank 1: full"
        assert isinstance(stop, e.Stop)
        assert (stop.part, stop.failed, stop.why.code, stop.why.message) == (1, failed, code, why)
        it.on(e.Ended(1, SILENT))
        assert it.on(elsewhere(2, failed=failed)) == []
        it = requests_of(elsewhere(2, failed=failed))
        refused = refusal(it, reserved(2))
        assert (refused.code, refused.message) == (code, why)
        assert it.on(elsewhere(2, failed=failed)) == []
        assert it.on(reserved(3))[-1] == e.Taken(1)


def test_what_is_refused_is_told_to_other_ranks_by_rank_0_and_what_comes_later_has_missed_it() -> None:
    for at in (RANK_0, RANK_1):
        unfit, it = e.Unfit(at, "r", Attempt(1), SILENT), requests_of()
        told = [each for each in it.on(unfit) if isinstance(each, e.TellRefused)]
        assert told == ([e.TellRefused(at, "r", Attempt(1), SILENT)] if at is RANK_0 else [])
        assert codes(it.on(reserved(1, at))) == [SILENT.code]
        assert it.on(unfit) == []
    assert requests_of(reserved()).on(e.Unfit(RANK_0, "r", Attempt(1), SILENT)) == [], "it has begun"


def test_a_refusal_ends_the_order_that_waits_for_its_reservation() -> None:
    it = requests_of(ordered(number=1))
    assert e.Stop(1, True, SILENT) in it.on(e.Unfit(RANK_0, "r", Attempt(1), SILENT))


def test_an_order_that_waited_and_has_ended_is_missed_by_its_reservation() -> None:
    it = requests_of(handed())
    assert it.on(e.Ended(1, SILENT, over=True)) == [e.Appeared("r"), e.TellEnded(1)]
    assert codes(it.on(reserved(1, RANK_1))) == [SILENT.code]


def test_an_attempt_that_was_under_way_and_has_ended_is_missed_by_nothing() -> None:
    assert requests_of(handed(), reserved(1, RANK_1)).on(e.Ended(1, SILENT)) == [e.TellEnded(1)]


# ---- ends ----


def test_an_abort_ends_what_is_under_way_and_what_waits_and_tells_other_ranks_of_what_has_ended() -> None:
    it = requests_of(reserved(), ordered(number=2), ordered("s"))
    assert stops(it.on(e.Abort(RANK_0, "r", "enough"))) == [(1, False, "aborted"), (2, False, "aborted")]
    assert it.on(e.Abort(RANK_0, "r", "again")) == []
    it.on(e.Ended(1, SILENT))
    assert it.on(e.AbortPart(1, "all ranks")) == [e.TellEnded(1)]
    it.on(e.Over(1))
    assert it.on(e.AbortPart(1, "all ranks")) == it.on(e.AbortPart(99, "unknown")) == []
    assert stops(it.on(e.AbortPart(3, "enough"))) == [(3, False, "aborted")]


def test_another_daemon_of_rank_0_ends_what_the_one_before_has_handed_on() -> None:
    it = requests_of(
        handed(order=Order(leader="i1")), handed(name="s", order=Order(leader="i2")),
        reserved(1, RANK_1, name="t", order=ORDER),
    )  # fmt: skip
    assert stops(it.on(e.Led(RANK_1, "i2"))) == [(1, True, "rank_failed")]


def test_other_weights_end_what_was_reserved_for_those_before() -> None:
    v1, v2 = (
        e.Reserved(RANK_0, name, Attempt(1), blocks(at, weights=name)) for at, name in enumerate(("v1", "v2"))
    )  # fmt: skip
    assert stops(requests_of(v1, v2, ordered("t")).on(e.ReplaceWeights(RANK_0, "v2"))) == [(1, True, "other_weights")]


def test_the_end_of_an_engine_ends_what_it_has_and_nothing_of_its_next_life() -> None:
    it = requests_of(reserved(), reserved(1, replace(RANK_0, epoch="2", life=2)))
    assert stops(it.on(e.Shut(RANK_0, SILENT))) == [(1, True, SILENT.code)]


def test_a_drain_hands_back_orders_that_nobody_has_reserved_for_and_rank_0_has_not_handed_on() -> None:
    assert requests_of(ordered()).on(e.HandBack(RANK_0, DRAINING)) == [e.Stop(1, True, DRAINING)]
    assert requests_of(reserved(1, RANK_1), handed(name="s")).on(e.HandBack(RANK_1, DRAINING)) == []


# ---- room, and what is kept ----


def test_a_daemon_has_room_for_so_many_parts_that_have_not_ended() -> None:
    """Orders that wait, for whichever attempt, take room as reservations do."""
    for first in (reserved(), ordered(number=(1 << 31) - 1), handed()):
        it = requests_of(first, transfers=1)
        for event in (reserved(name="s"), handed(name="t"), ordered("u")):
            why = refusal(it, event)
            assert (why.code, why.field) == ("full", "max_transfers")
        it.on(e.Ended(1, SILENT))
        assert it.on(ordered("u"))[-1] == e.Taken(2)


def test_nothing_begins_on_an_engine_that_is_closed() -> None:
    it = requests_of()
    for event in (reserved(), handed(), ordered("s")):
        assert refusal(it, replace(event, closed=DRAINING)).code == "draining"
    assert not it.parts.all()
    assert (draining(1, "").field, draining(1, "rank 1 of decode").field) == ("", "rank")


def test_a_reservation_that_rank_0_brings_is_claimed_until_nothing_can_write_to_it() -> None:
    it = requests_of(e.Handed(RANK_1, "r", Attempt(1, "one"), ORDER, blocks(1, 2)))
    assert codes(it.on(reserved(1, RANK_1, 2, name="s"))) == ["blocks_not_quiet"]
    it.on(e.Ended(1, SILENT, over=True))
    assert codes(it.on(reserved(2, RANK_1, 2, name="s"))) == ["blocks_not_quiet"]
    it.on(e.Quiet(1))
    assert it.on(reserved(3, RANK_1, 2, name="s"))[-1] == e.Taken(2)


def test_blocks_are_free_when_their_engine_is_gone_and_nothing_writes_them() -> None:
    it = requests_of(reserved(), e.Shut(RANK_0, SILENT), e.Left(RANK_0))
    assert (it.sizes()["claimed groups"], it.sizes()["lives gone"]) == (1, 1)
    end(it, 1)
    assert (it.sizes()["claimed groups"], it.sizes()["lives gone"], it.sizes()["claims"]) == (0, 0, 0)
    it = requests_of(reserved(), e.Ended(1), e.Quiet(1))
    assert it.sizes()["claimed groups"] == 1
    it.on(e.Left(replace(RANK_0, life=2)))
    assert it.sizes()["claimed groups"] == 1
    it.on(e.Left(RANK_0))
    assert it.sizes()["claimed groups"] == 0


def test_who_waits_for_fewer_transfers_hears_of_each() -> None:
    it = requests_of(reserved(), e.Ended(1))
    assert (it.on(e.Quiet(1)), it.left) == ([e.OneFewer()], 1), "another rank goes on"
    assert (it.on(e.Over(1)), it.left) == ([e.OneFewer()], 0)


def test_records_are_forgotten_when_more_have_ended_and_nothing_of_them_goes_on() -> None:
    it = requests_of(*(reserved(1, RANK_0, number, name=f"r{number}") for number in range(4)))
    for part in (1, 2, 3):
        assert it.on(e.Ended(part)) == []
    assert it.on(e.Quiet(1)) == [e.OneFewer()]
    assert it.on(e.Over(1)) == [e.OneFewer(), e.Forgotten(1)]
    it.on(e.Over(2))
    it.on(e.Quiet(2))
    assert it.on(e.Ended(4, SILENT, over=True)) == [e.TellEnded(4), e.Forgotten(2)]
    assert codes(it.on(reserved(name="r1"))) == ["order_conflict"], "it is not begun again"


def test_a_number_is_known_when_its_record_is_forgotten() -> None:
    """A late reservation must not begin what is over."""
    it = requests_of(reserved(5))
    end(it, 1)
    for part in range(2, 2 + 2 * HISTORY):
        it.on(reserved(name=f"s-{part}"))
        end(it, part)
    assert not it.parts.of_request(RANK_0.key("r"))
    assert codes(it.on(reserved(5)) + it.on(reserved(4))) == [SILENT.code, "stale_attempt"]
    stale = refusal(it, ordered(number=4))
    assert (stale.code, stale.value) == ("stale_attempt", "5")
    assert it.on(reserved(6))[-1] == e.Taken(2 + 2 * HISTORY)


def test_what_is_kept_of_attempts_that_are_over_is_bounded() -> None:
    """Any numbers and ids may be given."""
    with pytest.MonkeyPatch.context() as patch:
        for each in (parts, requests):
            patch.setattr(each, "ATTEMPTS", 3)
        it = requests_of()
        for number in range(1, 20):
            for name in (f"r-{number}", "s"):
                taken = it.on(ordered(name, id=f"{name}-{number}", number=number))[-1]
                assert isinstance(taken, e.Taken) and it.on(reserved(number, name=name))[-1] == e.Taken(taken.part)
                end(it, taken.part)
            it.on(elsewhere(number, f"q-{number}"))
            sizes = it.sizes()
            assert sizes["over"] <= 3 and sizes["order ids"] <= 3 and not sizes["waiting"] and not sizes["claims"]
            assert max(sizes["parts"], sizes["newest"]) <= HISTORY + 2
