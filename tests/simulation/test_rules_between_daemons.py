"""Rules of single machines that speak with other daemons, or keep one: peers, rosters, leaders, sessions, keepers."""

from __future__ import annotations

import re as regex
import signal
from pathlib import Path

import pytest

from kvferry.errors import PeerFailed
from kvferry.protocol import keeper, lease, leases, packing, peers, peers_wanted, readers, serving, source
from kvferry.protocol import keeper_events as ke
from kvferry.protocol import leader_events as le
from kvferry.protocol import peers_events as pe
from kvferry.protocol import roster_events as ro
from kvferry.protocol import session_events as se
from kvferry.protocol.attempts import Attempt, ReadingRank
from kvferry.protocol.keeper import Keeper
from kvferry.protocol.keeper import State as DaemonState
from kvferry.protocol.kept import Alarms, Latest
from kvferry.protocol.leader import Leader
from kvferry.protocol.peers import Peers
from kvferry.protocol.roster import Joinings, Rank, Rosters
from kvferry.protocol.session import State
from kvferry.protocol.sessions import Sessions

HOME = pe.Home("1", ("h",))
SILENT = PeerFailed("peer_unreachable", "it is silent")
AT = ReadingRank("decode", "1", 0, 1)
ENGINE = se.Rank("e", "1", 0, 1)


# bounds


def test_bounds_are_what_operators_are_told() -> None:
    page = (Path(__file__).parents[2] / "docs/bounds.md").read_text()
    for row, bound in (
        ("names in orders by which a peer engine is known", peers.NAMES),
        ("peers not read from", peers.IDLE_S / 3600),
        ("readers of a lease", readers.MAX_READERS),
        ("readings open", source.READINGS),
        ("chunks wanted and not yet read", packing.UNREAD),
        ("publishes that wait for fences", lease.MAX_FENCED),
        ("announcements not yet sent", serving.ANNOUNCEMENTS),
        ("ended leases remembered", leases.TOMBSTONES),
        ("time to load, once one has served", keeper.LOADS_S),
        ("slots that a reader holds and says nothing", packing.IDLE_S),
    ):
        found = regex.search(rf"^\| {regex.escape(row)} \| ([\d,]+)", page, regex.MULTILINE)
        assert found is not None
        assert float(found[1].replace(",", "")) == bound, row


def test_the_value_that_was_put_last_stays_for_longest() -> None:
    latest = Latest[str, int](2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        latest.put(key, value)
    assert (latest.items(), list(reversed(latest)), len(latest)) == ([("a", 3), ("c", 4)], [4, 3], 2)
    assert ("b" in latest, latest.get("b"), latest.pop("b"), latest.pop("a"), len(latest)) == (False, None, None, 3, 1)


def test_a_timer_that_is_set_for_later_rings_later_and_one_that_is_dropped_never() -> None:
    alarms = Alarms[str]()
    for key, at in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 2.0), ("b", 1.5)):
        alarms.set(key, at)
    alarms.drop("c")
    assert ("c" in alarms, len(alarms), alarms.due(1.0), alarms.next()) == (False, 2, [], 1.5)
    assert [alarms.due(at) for at in (1.5, 2.9, 3.0)] == [["b"], [], ["a"]]
    alarms.set("a", 4.0)
    alarms.drop("a")
    assert (alarms.next(), alarms.entries) == (None, 0)


# peers


def shake(effects: list[pe.PeersEffect]) -> int:
    (number,) = [each.number for each in effects if isinstance(each, pe.Shake)]
    return number


def met(asker: int = 1, home: pe.Home = HOME) -> Peers:
    """A peer is known, whose number is 1."""
    it = Peers("own", 10.0)
    it.on(pe.Met(shake(it.on(pe.Get(asker, "p", "h"), 0.0)), home), 0.0)
    return it


def test_who_joins_a_handshake_and_wants_another_epoch_asks_once_more() -> None:
    it = Peers("own", 10.0)
    number = shake(it.on(pe.Get(1, "p", "h"), 0.0))
    it.on(pe.Get(2, "p", "h", epoch="2"), 0.0)
    effects = it.on(pe.Met(number, HOME), 0.0)
    assert pe.Found(1, number) in effects
    effects = it.on(pe.Met(shake(effects), HOME), 0.0)
    (refused,) = [each for each in effects if isinstance(each, pe.Refused)]
    assert (refused.asker, refused.why.code) == (2, "stale_epoch")


def test_a_renewal_that_joins_a_handshake_asks_once_more() -> None:
    it = met()
    number = shake(it.on(pe.Get(2, "p", "h", epoch="2"), 0.0))
    assert it.on(pe.Renew(3, 1), 0.0) == []
    effects = it.on(pe.Met(number, HOME), 0.0)
    assert not [each for each in effects if isinstance(each, pe.Found)]
    refused = [each for each in effects if isinstance(each, pe.Refused) and each.asker == 3]
    assert [each.why.code for each in refused] == ["peer_lost"], "its peer has been replaced"


def test_an_order_begins_the_handshake_of_all_who_ask_once_more() -> None:
    it, elsewhere = Peers("own", 10.0), pe.Home("9", ("elsewhere",))
    number = shake(it.on(pe.Get(1, "p", "h", ordered=False), 0.0))
    for asker, ordered in ((2, False), (3, True), (4, False)):
        it.on(pe.Get(asker, "p", "h", epoch="2", ordered=ordered), 0.0)
    number = shake(it.on(pe.Met(number, HOME), 0.0))
    assert it.in_the_way(number, elsewhere) is None, "an engine that nobody has ordered gives way"


def test_an_engine_does_not_read_from_itself() -> None:
    (refused,) = Peers("own", 10.0).on(pe.Get(1, "own", "h"), 0.0)
    assert isinstance(refused, pe.Refused)
    assert refused.why.code == "own_engine"


def test_a_peer_is_asked_again_where_it_is_lost_or_its_address_or_epoch_is_new() -> None:
    for wanted in (pe.Get(2, "p", "elsewhere"), pe.Get(2, "p", "h", epoch="2")):
        assert shake(met().on(wanted, 0.0)) == 2
    it = met()
    assert it.on(pe.Get(2, "p", "h", epoch="1"), 0.0) == [pe.Found(2, 1)]
    it.on(pe.Lost(1), 0.0)
    assert shake(it.on(pe.Get(3, "p", "h"), 0.0)) == 2


def test_a_peer_that_is_forgotten_is_listed_until_it_is_met_again() -> None:
    it = met()
    assert (list(it.forgotten()), it.is_bound("p"), it.is_bound("q")) == ([], True, False)
    assert it.on(pe.Forget(1), 0.0) == [pe.Unload(1)]
    assert list(it.forgotten()) == [("p", HOME)]
    it.on(pe.Met(shake(it.on(pe.Get(2, "p", "h"), 0.0)), HOME), 0.0)
    assert list(it.forgotten()) == []


def test_an_engine_id_that_is_given_free_passes_to_another() -> None:
    it, elsewhere = met(), pe.Home("9", ("elsewhere",))
    number = shake(it.on(pe.Get(2, "p", "elsewhere"), 0.0))
    assert it.in_the_way(number, elsewhere) == HOME
    assert it.in_the_way(99, elsewhere) is None
    it.on(pe.Unbind("p"), 0.0)
    assert (it.in_the_way(number, elsewhere), it.wanted.had) == (None, [])


def test_nobody_is_asked_or_answered_otherwise_once_our_engine_has_ended() -> None:
    it = met()
    it.on(pe.Use(1), 0.0)
    number = shake(it.on(pe.Get(2, "q", "elsewhere"), 0.0))
    it.on(pe.Want(("x",)), 0.0)
    it.on(pe.Named(("", "x"), "r", "x"), 0.0)
    over, peer = PeerFailed("peer_lost", "our engine has ended"), it.known("p")
    effects = it.on(pe.Shut(over), 0.0)
    assert peer is not None and peer.stale, "who has it sees that it is given to nobody any more"
    assert pe.Stop(number) in effects and pe.Close(1) in effects
    assert [each.asker for each in effects if isinstance(each, pe.Refused)] == [2]
    assert len([each for each in effects if isinstance(each, pe.Shaken)]) == 2
    assert it.on(pe.Leave(1), 0.0) == it.on(pe.Lost(1), 0.0) == it.on(pe.Forget(1), 0.0) == []
    for event in (pe.Want(("y",)), pe.Had((("q", "y"),)), pe.Named(("", "y"), "s", "y"), pe.Unnamed(("", "x"), SILENT)):
        assert it.on(event, 0.0) == []
    (refused,) = it.on(pe.Get(3, "p", "h"), 0.0)
    assert isinstance(refused, pe.Refused)
    assert it.next_timer() is None
    it.check()


def test_a_handshake_has_its_time_and_then_all_who_wait_are_told() -> None:
    it = Peers("own", 10.0)
    number = shake(it.on(pe.Get(1, "p", "h"), 1.0))
    assert it.next_timer() == 11.0
    assert it.on(pe.Tick(), 10.9) == []
    effects = it.on(pe.Tick(), 11.0)
    assert pe.Stop(number) in effects
    (refused,) = [each for each in effects if isinstance(each, pe.Refused)]
    assert (refused.asker, refused.why.code) == (1, "peer_unreachable")


def test_who_gives_up_is_not_answered() -> None:
    it = Peers("own", 10.0)
    number = shake(it.on(pe.Get(1, "p", "h"), 0.0))
    it.on(pe.GiveUp(1), 0.0)
    assert not [each for each in it.on(pe.Met(number, HOME), 0.0) if isinstance(each, pe.Found)]


def test_an_address_of_the_settings_that_fails_is_missed_once_for_each_reason() -> None:
    it = Peers("own", 10.0)
    assert it.on(pe.Want(("h",)), 0.0) == [pe.Name(("", "h"))]
    assert pe.Missing(("", "h"), SILENT) in it.on(pe.Unnamed(("", "h"), SILENT), 0.0)
    assert it.on(pe.Tick(), 1.0) == [pe.Name(("", "h"))]
    assert it.on(pe.Unnamed(("", "h"), SILENT), 1.0) == []
    assert it.next_timer() == 3.0


def test_so_many_places_are_asked_at_a_time_and_so_many_engines_are_known_of() -> None:
    assert (peers_wanted.AT_ONCE, peers_wanted.HAD) == (32, 1_024)


def test_a_lost_peer_that_nobody_uses_goes_when_the_next_one_is_met() -> None:
    for used in (False, True):
        it = met()
        if used:
            it.on(pe.Use(1), 0.0)
        it.on(pe.Lost(1), 0.0)
        number = shake(it.on(pe.Get(2, "q", "elsewhere"), 0.0))
        effects = it.on(pe.Met(number, pe.Home("1", ("elsewhere",))), 0.0)
        assert (pe.Unload(1) in effects, it.known("p") is None) == (not used, not used)


def test_an_engine_that_has_moved_is_wanted_where_it_is_now() -> None:
    it = peers_wanted.Wanted()
    it.met(("e", "a"), 1)
    it.met(("e", "b"), 2)
    it.check()
    assert it.had == [("e", "b")]
    it.drop(1, 0.0)
    assert it.next(1.0) == []
    it.drop(2, 1.0)
    assert it.next(1.1) == [("e", "b")]


def test_an_address_that_fails_and_is_not_wanted_any_more_is_not_tried_again() -> None:
    it = peers_wanted.Wanted()
    it.want(("a",))
    it.next(0.0)
    it.want(())
    assert not it.failed(("", "a"), SILENT, 0.0)
    it.check()
    assert it.resting.next() is None


def test_places_that_have_failed_take_half_of_the_room() -> None:
    it, half = peers_wanted.Wanted(), peers_wanted.AT_ONCE // 2
    old, new = ([f"{kind}{number}" for number in range(2 * half)] for kind in ("old", "new"))
    it.want(old)
    for place in it.next(0.0):
        it.failed(place, SILENT, 0.0)
    it.want(old + new)
    assert it.next(1.0) == [("", each) for each in old[:half] + new[:half]]
    it.failed(("", old[0]), SILENT, 1.0)
    it.found(("", new[0]), 1)
    assert it.next(1.0) == [("", old[half]), ("", new[half])]


# rosters


def test_a_rank_joins_as_one_of_its_engine_and_from_one_address() -> None:
    rosters, here = Rosters(), ro.Member("a", instance="i1")
    rosters.join(1, Rank("p", "1", 0, 2), here)
    for rank, address, code in (
        (Rank("p", "1", 1, 3), "b", "malformed_member"), (Rank("p", "1", 2, 2), "b", "malformed_member"),
        (Rank("p", "1", 0, 2), "b", "rank_taken"), (Rank("p", "1", 0, 2), "a", ""), (Rank("p", "1", 1, 2), "b", ""),
        (Rank("p", "2", 0, 3), "b", ""),
    ):  # fmt: skip
        refusal = rosters.refusal(rank, address)
        assert ("" if refusal is None else refusal.code) == code
    rosters.join(2, Rank("p", "1", 1, 2), ro.Member("b", instance="i2"))
    rosters.leave(1)
    assert rosters.refusal(Rank("p", "1", 0, 2), "b") is not None, "it comes from nowhere else after it has left"
    rosters.leave(2)
    assert not any(rosters.sizes().values())


def test_a_daemon_that_started_anew_speaks_for_its_rank_and_all_are_told() -> None:
    rosters, rank = Rosters(), Rank("p", "1", 0, 1)
    assert rosters.join(1, rank, ro.Member("a", instance="i1")).streams == (1,)
    assert rosters.join(2, rank, ro.Member("a", draining=True, instance="i1")).streams == (1, 2)
    told = rosters.join(3, rank, ro.Member("a", instance="i2"))
    assert (told.streams, told.members[0].instance) == ((3,), "i2")
    assert rosters.leave(1) == ro.Tell((), {})
    assert rosters.leave(2) == ro.Tell((), {})
    assert rosters.leave(3) == ro.Tell((), {})


def test_a_joining_is_tried_again_later_each_time_until_it_holds() -> None:
    it = Joinings(10.0)
    assert it.on(ro.Renew(), 0.0) == [ro.Begin(1)]
    now = 0.0
    for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        assert it.on(ro.Ended(1, SILENT), now) == [ro.Alone(SILENT)]
        assert it.next_timer() == pytest.approx(now + pause)
        assert it.on(ro.Tick(), now + pause - 0.01) == []
        now = it.next_timer() or 0.0
        assert it.on(ro.Tick(), now) == [ro.Begin(1)]
    assert it.on(ro.Told(1, {}), now) == [ro.Know({})]
    assert it.next_timer() is None
    it.on(ro.Ended(1), now)
    assert it.next_timer() == pytest.approx(now + 0.1)


def test_a_renewal_ends_the_joining_before_it_once_it_holds_or_has_had_its_time() -> None:
    for late in (False, True):
        it = Joinings(10.0)
        it.on(ro.Renew(), 0.0)
        it.on(ro.Told(1, {}), 0.0)
        assert it.on(ro.Renew(), 1.0) == [ro.Begin(2)]
        it.on(ro.Ended(2, SILENT), 1.0)
        assert it.on(ro.Tick(), 1.1) == [ro.Begin(2)], "it is not alone while the one before holds"
        if late:
            assert it.on(ro.Tick(), 11.0) == [ro.End(1), ro.Alone(SILENT)]
        else:
            assert it.on(ro.Told(2, {}), 2.0) == [ro.End(1), ro.Know({})]
        assert (it.sizes()["joinings"], it.next_timer()) == (1, None)


# leaders


def leads(*ranks: int, asked: bool = True) -> Leader:
    it = Leader()
    assert it.on(le.Lead(1, AT, "r", Attempt(1), ranks, 60.0), 0.0) == [le.Gather(1)]
    if asked:
        assert it.on(le.Whole(1, {rank: f"i{rank}" for rank in ranks}), 0.0) == [le.Ask(1, rank) for rank in ranks]
    return it


def test_a_rank_that_cannot_be_reached_is_asked_again_later_each_time() -> None:
    it = leads(1)
    for pause in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert it.on(le.Unheard(1, 1, SILENT, lost=True), 0.0) == [le.Pause(1, 1, pause)]
        assert it.on(le.Again(1, 1, "i1"), 0.0) == [le.Ask(1, 1)]
    assert it.on(le.Heard(1, 1), 0.0) == []
    assert it.on(le.Heard(1, 1, done=True), 0.0) == [le.Finished(1)]


def test_a_rank_is_not_asked_again_whose_daemon_is_another_or_whose_attempt_is_over() -> None:
    closed = [le.Close(1, 1, SILENT), le.StopOwn(1, 1, "peer_unreachable"), le.Finished(1)]
    for instance in ("another", None):
        it = leads(1)
        it.on(le.Unheard(1, 1, SILENT, lost=True), 0.0)
        assert it.on(le.Again(1, 1, instance), 0.0) == closed
    it = leads(1)
    it.on(le.Unheard(1, 1, SILENT, lost=True), 0.0)
    it.on(le.GaveUp(1, "failed", failed=True), 0.0)
    assert it.on(le.Again(1, 1, "i1"), 0.0) == closed
    assert leads(1).on(le.Unheard(1, 1, SILENT), 0.0) == closed


def test_a_rank_that_fails_stops_rank_0() -> None:
    it = leads(1, 2)
    assert it.on(le.Heard(1, 1, done=False, code="full"), 0.0) == [le.StopOwn(1, 1, "full")]
    assert it.on(le.Heard(1, 2, done=True), 0.0) == [le.Finished(1)]


def test_an_order_that_was_given_up_before_all_ranks_joined_is_handed_to_none() -> None:
    it = leads(1, 2, asked=False)
    it.on(le.GaveUp(1, "failed", failed=True), 0.0)
    closed = [le.Close(1, 1, None), le.Close(1, 2, None), le.Finished(1)]
    assert it.on(le.Whole(1, {1: "i1", 2: "i2"}), 0.0) == closed
    assert it.on(le.GaveUp(1, "failed", failed=True), 0.0) == []


def test_ranks_that_have_reserved_are_told_that_another_is_missing() -> None:
    effects = leads(1, asked=False).on(le.Incomplete(1, SILENT), 0.0)
    assert [type(each) for each in effects] == [le.Tell, le.Close, le.StopOwn, le.Finished]
    assert isinstance(effects[0], le.Tell)
    assert (effects[0].end.code, effects[0].end.failed) == ("peer_unreachable", True)


def test_a_rank_that_has_not_ended_a_little_after_the_deadline_is_late() -> None:
    it = leads(1, 2, 3)
    it.on(le.Heard(1, 1, done=True), 1.0)
    it.on(le.Unheard(1, 2, SILENT, lost=True), 1.0)
    assert it.next_timer() == 60.5
    assert [(type(each), getattr(each, "rank", None)) for each in it.on(le.Tick(), 60.5)] == [
        (le.Tell, 2), (le.Tell, 3), (le.Close, 2), (le.StopOwn, 2), (le.Late, 3), (le.StopOwn, 3), (le.Finished, None)
    ]  # fmt: skip


def test_an_end_is_told_again_until_it_is_heard_or_the_other_part_is_over() -> None:
    it = leads(1)
    (tell,) = it.on(le.GaveUp(1, "failed", failed=False), 0.0)
    assert isinstance(tell, le.Tell)
    assert (tell.end.failed, tell.seconds) == (False, 0.0)
    for pause in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert it.on(le.Told(tell.tell, lost=True), 1.0) == [tell._replace(seconds=pause)]
    assert it.on(le.Told(tell.tell, lost=True), 59.0) == []
    assert it.sizes()["told"] == 0


# sessions


def session(*events: se.SessionEvent, now: float = 0.0) -> Sessions:
    it = Sessions()
    for event in (se.Attach("one", ENGINE), *events):
        it.on(event, now)
    return it


def stands(it: Sessions, id: str = "one") -> tuple[bool, bool]:
    return it.is_open(id), it.is_ending(id)


def test_a_session_is_open_until_it_retires_and_ends_until_it_is_over() -> None:
    it = session()
    assert stands(it) == (True, False)
    assert stands(it, "another") == (False, False)
    effects = it.on(se.Withdraw("one"), 0.0)
    assert stands(it) == (False, True)
    while taken := [each.step for each in effects if isinstance(each, se.Take)]:
        effects = it.on(se.StepOver("one", taken[0], done=True), 0.0)
    assert stands(it) == (False, False)


def test_an_engine_whose_stream_ends_has_time_to_die_where_its_death_will_be_told() -> None:
    for introduced, due in ((True, 11.0), (False, 1.0)):
        it = session(*([se.Introduced("one")] if introduced else []))
        assert [type(each) for each in it.on(se.StreamEnded("one"), 1.0)] == [se.Detach]
        assert (it.next_timer(), it.sessions["one"].state, it.is_open("one")) == (due, State.LOST, True)
        assert it.on(se.StreamEnded("one"), 1.0) == []
        assert it.on(se.Tick(), due - 0.1) == []
        assert it.on(se.Tick(), due) != []
        assert it.sessions["one"].state is State.RETIRING


def test_a_step_that_takes_too_long_is_given_up_and_counts_when_it_ends() -> None:
    it = session(se.Allocated("one", owned=True), se.Close())
    assert it.next_timer() == 300.0
    for number, step in enumerate((se.Step.TRANSFERS, se.Step.LEASES, se.Step.FENCES, se.Step.STOP), 1):
        assert it.sessions["one"].taking is step
        it.on(se.Tick(), 300.0 * number)
    assert it.sessions["one"].state is State.STUCK
    assert it.on(se.StepOver("one", se.Step.LEASES, done=True), 2000.0) == []
    assert it.on(se.StepOver("one", se.Step.STOP, done=False), 2000.0) == []
    assert it.on(se.StepOver("one", se.Step.STOP, done=True), 2000.0) == []


def test_an_epoch_that_was_registered_is_over_with_its_session() -> None:
    it = session(se.RegistrationBegun("one"), se.RegistrationOver("one", done=True, stopped=False))
    it.on(se.StreamEnded("one"), 0.0)
    (refused,) = it.on(se.Attach("two", ENGINE), 0.0)
    assert isinstance(refused, se.Refused)
    assert refused.why.code == "epoch_reused"


def test_an_engine_that_attaches_waits_a_little_for_its_old_stream() -> None:
    it = session()
    assert it.on(se.Attach("two", ENGINE._replace(epoch="2")), 1.0) == []
    assert it.next_timer() == 1.5
    (refused,) = it.on(se.Tick(), 1.5)
    assert isinstance(refused, se.Refused)
    assert refused.why.code == "engine_attached"


def test_a_daemon_that_stops_opens_no_session() -> None:
    it = session(se.Close())
    (refused,) = it.on(se.Attach("two", se.Rank("f", "1", 0, 1)), 0.0)
    assert isinstance(refused, se.Refused)
    assert refused.why.code == "draining"


def test_memory_is_kept_for_an_engine_that_has_lost_its_session_and_for_none_that_has_gone() -> None:
    for event, kept in ((se.Withdraw("one"), True), (se.GiveUp("one"), False)):
        it = session(se.Allocated("one", owned=True))
        effects = it.on(event, 0.0)
        assert [each.keep for each in effects if isinstance(each, se.Take)] == [kept]
        while taken := [each.step for each in effects if isinstance(each, se.Take)]:
            effects = it.on(se.StepOver("one", taken[0], done=True), 0.0)
        assert ("one" in it.sessions) is kept
        assert it.on(se.Close(), 0.0) == (
            [se.Take("one", se.Step.FREE, "engine e has lost its session", False)] if kept else []
        )
    it = session(se.Allocated("one", owned=True))
    effects = it.on(se.Close(), 0.0)
    assert [each.keep for each in effects if isinstance(each, se.Take)] == [False]


def test_memory_of_an_engine_that_is_dead_is_freed_when_its_last_lease_has_ended() -> None:
    it = session(se.Allocated("one", owned=True), se.Died("one"))
    effects, taken = it.on(se.LeasesOver("one"), 0.0), []
    while takes := [each for each in effects if isinstance(each, se.Take)]:
        taken += takes
        effects = it.on(se.StepOver("one", takes[0].step, done=True), 0.0)
    assert se.Step.FREE in [each.step for each in taken] and not any(each.keep for each in taken)
    assert effects[-1] == se.Over("one")


def test_an_engine_says_how_it_ended() -> None:
    for event, why in (
        (se.Withdraw("one"), "engine e has lost its session"), (se.GiveUp("one"), "engine e is gone"),
        (se.Died("one"), "engine e is dead"), (se.Leave("one"), "engine e has left"),
        (se.StreamEnded("one"), "the session of engine e has ended"),
    ):  # fmt: skip
        assert [each.why for each in session().on(event, 0.0) if isinstance(each, se.Detach)] == [why]


# keepers


def test_a_daemon_is_told_to_stop_by_sigterm_and_ended_by_sigkill() -> None:
    assert (ke.TERM, ke.KILL) == (signal.SIGTERM, signal.SIGKILL)


def keeps(*events: ke.KeeperEvent, now: float = 1.0) -> Keeper:
    """A daemon serves."""
    it = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), *events):
        it.on(event, now)
    return it


def test_no_other_daemon_is_started_while_the_one_that_is_wished_for_takes_over() -> None:
    it = keeps(ke.Loaded(2, 5.0), ke.Upgrade(), ke.Loaded(3, 5.0))
    assert it.on(ke.Died(1, 0, "ended"), 30.0) == [ke.Turn(3, "it was upgraded")]


def test_a_daemon_that_stood_by_and_dies_answers_no_wish_that_was_fulfilled() -> None:
    it = keeps(ke.Loaded(2, 5.0), ke.Upgrade(), ke.Loaded(3, 5.0), ke.Died(1, 0, "ended"), ke.Serves(3))
    assert it.daemons[3].state is DaemonState.SERVING
    (report,) = it.on(ke.Died(4, 9, "killed"), 30.0)[:1]
    assert isinstance(report, ke.Report)
    assert "the daemon that stood by is dead" in report.what


def test_daemons_that_stand_by_are_started_ten_seconds_apart() -> None:
    for died, starts in ((3.0, 11.0), (30.0, 30.0)):
        it = keeps()
        it.on(ke.Loaded(2, 5.0), 2.0)
        it.on(ke.Died(2, 9, "killed"), died)
        it.on(ke.Tick(), 10.9)
        assert (3 in it.daemons) is (starts != 11.0)
        it.on(ke.Tick(), starts)
        assert 3 in it.daemons


def test_an_upgrade_that_dies_while_nothing_serves_is_loaded_again() -> None:
    it = keeps(ke.Loaded(2, 5.0))
    it.on(ke.Died(1, 9, "killed"), 30.0)
    it.on(ke.Upgrade(), 31.0)
    report = it.on(ke.Died(3, 9, "killed"), 32.0)[0]
    assert isinstance(report, ke.Report)
    assert report.what == "the new daemon is dead (killed): another one is loaded"


def test_an_upgrade_that_does_not_load_is_answered() -> None:
    it = keeps(ke.Loaded(2, 5.0), ke.Upgrade())
    (stays,) = [each for each in it.on(ke.Died(3, 1, "a bad setting"), 2.0) if isinstance(each, ke.Stays)]
    assert stays.daemon == 3
    assert "the new daemon does not load (a bad setting): the one that serves stays" in stays.what


def test_the_times_of_a_daemon_are_its_own_and_it_is_killed_after_them() -> None:
    it = keeps(ke.Loaded(2, 5.0))
    it.on(ke.Upgrade(), 10.0)
    assert it.daemons[3].due == 130.0
    (report, signal) = it.on(ke.Tick(), 130.0)[:2]
    assert isinstance(report, ke.Report) and signal == ke.Signal(3, ke.KILL)
    assert (it.daemons[3].due, it.slow) == (140.0, 2)
    assert [type(each) for each in it.on(ke.Tick(), 140.0)][:1] == [ke.Report]
    assert 3 not in it.daemons


def test_a_keeper_that_is_told_to_stop_while_nothing_serves_gives_nobody_a_turn() -> None:
    it = keeps(ke.Died(1, 9, "killed"))
    it.on(ke.Serves(2), 1.0)
    it.on(ke.Loaded(2, 5.0), 1.0)
    it.on(ke.Serves(2), 1.0)
    it.on(ke.Died(2, 9, "killed"), 1.0)
    assert it.next.turn == 1.5
    assert [each for each in it.on(ke.Stop(15), 2.0) if isinstance(each, ke.Turn | ke.Start)] == []
    assert it.ended


def test_daemons_that_do_not_last_have_their_turn_later_each_time() -> None:
    it, now, pauses = keeps(ke.Loaded(2, 5.0)), 1.0, []
    for number in range(1, 9):
        said = [each.what for each in it.on(ke.Died(number, 9, "killed"), now) if isinstance(each, ke.Report)]
        assert len(said) == (number > 1)
        it.on(ke.Loaded(number + 2, 5.0), now)
        pauses.append((it.next.turn or now) - now)
        now += pauses[-1]
        it.on(ke.Tick(), now)
        it.on(ke.Loaded(number + 1, 5.0), now)
        it.on(ke.Serves(number + 1), now)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    it.on(ke.Died(9, 9, "killed"), now + 5.0)
    assert it.deaths.in_a_row == 0
