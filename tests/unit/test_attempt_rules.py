"""An attempt of one rank where its source is not one of ours: no world of tests/simulation has such."""

from __future__ import annotations

from dataclasses import replace

from kvferry.errors import Conflict, PeerFailed
from kvferry.protocol import reading as r
from kvferry.protocol import transfer_events as t
from kvferry.protocol.reading import Computed, Seen
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
