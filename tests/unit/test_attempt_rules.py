"""An attempt of one rank where its source is not one of ours: no world of tests/simulation has such."""

from __future__ import annotations

from dataclasses import replace

from kvferry.errors import Conflict, PeerFailed
from kvferry.protocol import reading as r
from kvferry.protocol import transfer_events as t
from kvferry.protocol.reading import Computed, Seen
from kvferry.protocol.states import TransferState
from kvferry.protocol.transfer import Progress

PART = Seen(lease=1, version=1, word=7, num_tokens=2, metadata=b"m")
"""A part of a lease that goes on."""
WHOLE = replace(PART, more=False)


def attempt(*announced: Seen | None, **wanted: object) -> Progress:
    """An attempt that has shaken hands with as many source ranks."""
    it = Progress()
    it.on(t.Match(t.Wanted("r", **wanted)), 0.0)  # type: ignore[arg-type]
    it.on(t.Met("1", dict(enumerate(announced))), 0.0)
    return it


def told(it: Progress, rank: int, seen: Seen) -> list[t.TransferEffect]:
    return it.on(t.Told(rank, r.Update(it.readings[rank].opening, seen)), 0.0)


def code(it: Progress) -> str:
    assert isinstance(it.do, t.Finish)
    assert it.do.problem is not None
    return it.do.problem.code


def test_source_ranks_that_published_different_prompts_are_not_read() -> None:
    it = attempt(None, None)
    told(it, 0, WHOLE)
    told(it, 1, replace(WHOLE, digest=b"another"))
    assert isinstance(it.do, t.Finish) and it.do.problem is not None
    assert (it.do.problem.code, it.do.problem.field, it.nbytes) == ("ranks_disagree", "digest", 0)


def test_a_source_rank_that_ends_with_fewer_tokens_is_found_when_the_others_have_ended() -> None:
    it = attempt(None, None)
    told(it, 0, WHOLE)
    told(it, 1, replace(PART, num_tokens=4))
    assert it.do == t.Move((0, 2), states=False, without=frozenset())
    it.on(t.Moved({0: 2, 1: 2}), 0.0)
    assert it.do == t.Listen()
    assert it.awaits_publish
    told(it, 1, replace(WHOLE, version=2, num_tokens=4))
    assert code(it) == "ranks_disagree"


def test_a_lease_that_was_named_and_is_another_is_not_read() -> None:
    it = attempt(None, lease=2)
    told(it, 0, WHOLE)
    assert code(it) == "lease_changed"


def test_ranks_that_tell_of_ever_newer_leases_are_asked_for_the_newest() -> None:
    it = attempt(None, None)
    told(it, 0, WHOLE)
    (_, asked) = told(it, 1, replace(WHOLE, lease=3, word=8))
    assert isinstance(asked, t.Say)
    assert isinstance(asked.effect, r.Open)
    assert (asked.rank, asked.effect.lease) == (0, 3)
    told(it, 0, replace(WHOLE, lease=3, word=9))
    assert isinstance(it.do, t.Move)
    assert it.lease == ("1", 3)


def test_the_metadata_is_that_of_a_source_rank_that_has_some() -> None:
    it = attempt(None, None)
    assert it.metadata == b""
    told(it, 0, replace(WHOLE, metadata=b""))
    told(it, 1, WHOLE)
    assert it.metadata == b"m"


STALE = Conflict("lease_changed", "another lease is here by now")


def half_packed(*, states: bool) -> Progress:
    """An attempt that goes by the announcements of two ranks: the first is packed, the second is out of date."""
    it = attempt(WHOLE if states else PART, replace(WHOLE if states else PART, word=9))
    assert it.do == t.Move((0, 2), states, without=frozenset())
    it.on(t.Told(0, r.Gathered()), 0.0)
    it.on(t.Moved({0: 2}, frozenset({0}), STALE), 0.0)
    assert it.do == t.Drain()
    it.on(t.Drained(), 0.0)
    return it


def test_what_was_packed_is_not_read_again_when_another_rank_is_asked() -> None:
    it = half_packed(states=True)
    assert it.nbytes == 2
    told(it, 1, replace(WHOLE, word=9))
    assert it.do == t.Move((0, 2), states=True, without=frozenset({0}))
    it.on(t.Moved({1: 5}), 0.0)
    assert it.do == t.Prove(frozenset({1}))
    assert it.nbytes == 7


def test_what_was_packed_in_part_is_read_again() -> None:
    it = half_packed(states=False)
    told(it, 1, replace(PART, word=9))
    assert it.do == t.Move((0, 2), states=False, without=frozenset())


def test_what_was_moved_without_packing_before_is_read_again() -> None:
    it = attempt(PART, replace(PART, word=9))
    it.on(t.Moved({0: 2, 1: 2}), 0.0)
    it.on(t.Told(0, r.Due()), 0.0)
    told(it, 0, replace(WHOLE, version=2, num_tokens=4))
    told(it, 1, replace(WHOLE, version=2, word=9, num_tokens=4))
    assert it.do == t.Move((2, 4), states=True, without=frozenset())
    it.on(t.Told(0, r.Gathered()), 0.0)
    it.on(t.Moved({0: 2}, frozenset({0}), STALE), 0.0)
    it.on(t.Drained(), 0.0)
    told(it, 1, replace(WHOLE, version=2, word=9, num_tokens=4))
    assert it.do == t.Move((0, 4), states=True, without=frozenset())


def test_what_was_packed_of_an_older_lease_is_read_again() -> None:
    it = half_packed(states=True)
    told(it, 1, replace(WHOLE, lease=2, word=9))
    told(it, 0, replace(WHOLE, lease=2, word=8))
    assert it.do == t.Move((0, 2), states=True, without=frozenset())
    assert it.nbytes == 0


def test_a_source_that_has_answered_already_is_not_asked_again() -> None:
    it = attempt(WHOLE)
    (asked,) = it.on(t.Told(0, r.Due()), 0.0)
    assert isinstance(asked, t.Say)
    newer = replace(WHOLE, lease=2, word=8)
    told(it, 0, newer)
    assert isinstance(it.do, t.Move)
    it.on(t.Moved({}, frozenset(), STALE), 0.0)
    assert it.on(t.Drained(), 0.0) == []
    assert isinstance(it.do, t.Move)
    assert it.lease == ("1", 2)


def test_a_source_that_is_lost_is_not_asked_again() -> None:
    it = attempt(WHOLE)
    it.on(t.Told(0, r.Due()), 0.0)
    it.on(t.Told(0, r.Over(it.readings[0].opening, PeerFailed("peer_lost", "the stream is over"))), 0.0)
    it.on(t.Moved({}, frozenset(), STALE), 0.0)
    it.on(t.Drained(), 0.0)
    assert code(it) == "peer_lost"


def test_a_source_that_tells_of_a_prompt_that_is_not_wanted_is_asked_again() -> None:
    it = attempt(replace(WHOLE, digest=b"p"), computed=Computed(b"p"))
    it.on(t.Told(0, r.Due()), 0.0)
    told(it, 0, replace(WHOLE, digest=b"q"))
    it.on(t.Moved({}, frozenset(), STALE), 0.0)
    assert [type(each.effect) for each in it.on(t.Drained(), 0.0) if isinstance(each, t.Say)] == [r.Close, r.Open]


# the course of an attempt


def test_an_attempt_is_done_when_all_is_moved_and_proven_and_then_its_sources_are_told() -> None:
    it = Progress()
    it.on(t.Match(t.Wanted("r", tokens=(1, 4), sums=True)), 0.0)
    assert (it.do, it.state) == (t.Meet(), TransferState.CONNECTING)
    it.on(t.Met("1", {0: None}, others=(1, 2)), 0.0)
    assert it.on(t.Told(9, r.Due()), 0.0) == []
    told(it, 0, replace(WHOLE, num_tokens=6))
    assert (it.do, it.state, it.lease) == (t.Move((1, 4), True, frozenset()), TransferState.READING, ("1", 1))
    it.on(t.Moved({0: 3}), 0.0)
    assert (it.do, it.state) == (t.Prove(frozenset({0})), TransferState.VERIFYING)
    it.on(t.Proven(), 0.0)
    assert it.do == t.Compare((1, 4))
    it.on(t.Compared(), 0.0)
    assert it.do == t.Finish(TransferState.DONE, ("1", 1), (1, 4))
    assert it.past == t.Past(("1", 1), 3, (1, 4), False)
    assert it.on(t.Stop(STALE), 0.0) == []
    assert it.on(t.Quiet(), 0.0) == [
        t.Say(0, r.Close(1, 1, True, 3)), t.Say(1, r.Close(0, 1, True, 0)), t.Say(2, r.Close(0, 1, True, 0))
    ]  # fmt: skip
    assert it.readings == {}


def test_an_attempt_that_is_stopped_closes_what_it_reads_unread() -> None:
    for why, aborted, state in ((STALE, True, TransferState.ABORTED), (STALE, False, TransferState.FAILED)):
        it = attempt(None, None)
        assert it.on(t.Stop(why, aborted), 0.0) == [t.Say(rank, r.Close(1, 0, False, 0)) for rank in (0, 1)]
        assert it.do == t.Finish(state, problem=why)
        assert it.on(t.Quiet(), 0.0) == []
    it = attempt(None)
    it.on(t.Stop(PeerFailed("peer_lost", "the stream is over")), 0.0)
    assert isinstance(it.do, t.Finish)


def test_hands_are_shaken_again_once_where_the_peer_is_another_by_now() -> None:
    lost = PeerFailed("peer_lost", "the stream is over")
    it = attempt(None)
    assert it.on(t.Told(0, r.Over(1, lost)), 0.0) == [t.Say(0, r.Close(1, 0, False, 0)), t.Forget()]
    assert (it.do, it.readings) == (t.Meet(), {})
    it.on(t.Met("1", {0: None}), 0.0)
    assert t.Forget() in it.on(t.Told(0, r.Over(1, lost)), 0.0)
    assert code(it) == "peer_lost"


def test_hands_are_not_shaken_again_for_what_that_would_not_mend() -> None:
    stale = Conflict("stale_epoch", "it started anew")
    for wanted, seen, why in (({}, None, STALE), ({"epoch": "1"}, None, stale), ({}, PART, stale)):
        it = attempt(None, **wanted)
        if seen is not None:
            told(it, 0, seen)
            it.on(t.Moved({0: 2}), 0.0)
        it.on(t.Told(0, r.Over(1, why)), 0.0)
        assert code(it) == why.code
    it = attempt(None)
    it.on(t.Told(0, r.Over(1, stale)), 0.0)
    assert it.do == t.Meet(), "any epoch will do"
    it.on(t.Failed(stale), 0.0)
    assert code(it) == "stale_epoch"


def test_tokens_are_moved_by_the_grain_but_for_the_last() -> None:
    it = Progress()
    it.on(t.Match(t.Wanted("r")), 0.0)
    it.on(t.Met("1", {0: None}, grain=4), 0.0)
    told(it, 0, replace(PART, num_tokens=3))
    assert (it.do, it.awaits_publish) == (t.Listen(), True)
    told(it, 0, replace(PART, version=2, num_tokens=7))
    assert it.do == t.Move((0, 4), False, frozenset())
    it.on(t.Moved({0: 4}), 0.0)
    told(it, 0, replace(WHOLE, version=3, num_tokens=7))
    assert it.do == t.Move((4, 7), True, frozenset())


def test_tokens_that_were_never_published_are_not_waited_for() -> None:
    it = attempt(None, tokens=(0, 4))
    told(it, 0, PART)
    it.on(t.Moved({0: 2}), 0.0)
    told(it, 0, replace(WHOLE, version=2, num_tokens=3))
    assert code(it) == "tokens_unpublished"


def test_an_attempt_listens_for_a_lease_that_is_still_to_come() -> None:
    it = attempt(None)
    assert not it.awaits_publish
    it.on(t.Told(0, r.Unpublished(1)), 0.0)
    assert it.awaits_publish


def test_another_rank_is_done_with_what_rank_0_has_read() -> None:
    for named, first, result in (
        ({}, ("1", 1), TransferState.DONE), ({}, ("1", 2), TransferState.FAILED), ({}, ("2", 1), TransferState.FAILED),
        ({"epoch": "1", "lease": 1}, None, TransferState.DONE), ({"lease": 1}, ("1", 1), TransferState.DONE),
    ):  # fmt: skip
        it = attempt(None, rank=1, **named)
        told(it, 0, WHOLE)
        it.on(t.Moved({0: 2}), 0.0)
        it.on(t.Proven(), 0.0)
        if first is not None:
            assert (it.do, it.awaits_first) == (t.Listen(), True)
            it.on(t.Led(first), 0.0)
        assert it.state is result


def test_what_fails_while_it_goes_by_an_announcement_is_asked_for_once_nothing_is_written() -> None:
    it = attempt(WHOLE)
    assert (it.do, it.past.announced) == (t.Move((0, 2), True, frozenset()), True)
    it.on(t.Failed(STALE), 0.0)
    assert (it.do, it.state) == (t.Drain(), TransferState.CONNECTING)
    (asked,) = it.on(t.Drained(), 0.0)
    assert asked == t.Say(0, r.Open(1, 0, (0, 0)))
    assert (it.do, it.nbytes) == (t.Listen(), 0)
    told(it, 0, WHOLE)
    it.on(t.Failed(STALE), 0.0)
    assert code(it) == "lease_changed"


def test_a_rank_that_holds_the_others_up_is_listened_to() -> None:
    it = attempt(None, None)
    told(it, 0, PART)
    told(it, 1, replace(PART, num_tokens=4))
    it.on(t.Moved({0: 2, 1: 2}), 0.0)
    assert it.do == t.Listen()
    told(it, 0, replace(PART, version=2, num_tokens=4))
    assert it.do == t.Move((2, 4), False, frozenset())
