"""Rules of single machines that no world of tests/simulation comes to: a world has few peers and few names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from by_events import ANOTHER, READER, ByEvents, Speaker

from kvferry.errors import Conflict, Full, KvferryError, PeerFailed
from kvferry.protocol import book_events as be
from kvferry.protocol import events as e
from kvferry.protocol import keeper_events as ke
from kvferry.protocol import leader_events as le
from kvferry.protocol import packing_events as pk
from kvferry.protocol import peers_events as pe
from kvferry.protocol import reading as rd
from kvferry.protocol import roster_events as ro
from kvferry.protocol import session_events as se
from kvferry.protocol.attempts import Attempt, ReadingRank
from kvferry.protocol.book import Book
from kvferry.protocol.claims import Claims
from kvferry.protocol.keeper import Keeper
from kvferry.protocol.kept import Alarms
from kvferry.protocol.leader import TOLD_AGAIN, Leader
from kvferry.protocol.lease import lease_ended
from kvferry.protocol.leases import ANNOUNCED_TO
from kvferry.protocol.packing import IDLE_S, Packing
from kvferry.protocol.peers import IDLE_S as IDLE_PEER_S
from kvferry.protocol.peers import NAMES, Peers
from kvferry.protocol.peers_asked import ASKINGS
from kvferry.protocol.peers_homes import Homes
from kvferry.protocol.peers_wanted import AT_ONCE, BACK_S, GONE_S, HAD, Wanted
from kvferry.protocol.reading import Computed, Following
from kvferry.protocol.roster import Rank, Rosters
from kvferry.protocol.serving import ANNOUNCEMENTS
from kvferry.protocol.session import Memory, Session, State
from kvferry.protocol.sessions import Sessions
from kvferry.protocol.states import LeaseState
from kvferry.protocol.values import Publication, ReaderId, Reading, Terms, Times, View
from kvferry.protocol.waits import Waits

HOME = pe.Home("1", ("h",))
SILENT = PeerFailed("peer_unreachable", "it is silent")


def met(peers: Peers, address: str, home: pe.Home = HOME, asker: int = 1) -> None:
    (shake,) = peers.on(pe.Get(asker, "p", address), 0.0)
    assert isinstance(shake, pe.Shake)
    peers.on(pe.Met(shake.number, home), 0.0)
    peers.check()


def test_an_engine_has_so_many_addresses_however_many_orders_name() -> None:
    peers = Peers("own", 10.0)
    for number in range(2 * NAMES):
        met(peers, f"alias {number}")
    assert peers.sizes()["addresses"] == 1 + NAMES


def test_so_many_handshakes_are_under_way_at_a_time() -> None:
    peers = Peers("own", 10.0)
    for number in range(ASKINGS):
        assert len(peers.on(pe.Get(number, "p", f"a{number}"), 0.0)) == 1
    assert peers.on(pe.Get(ASKINGS, "p", "a0"), 0.0) == [], "one that is under way is joined"
    (refused,) = peers.on(pe.Get(ASKINGS + 1, "p", "another"), 0.0)
    assert isinstance(refused, pe.Refused) and refused.why.code == "too_many_peers"


def test_an_address_that_fails_is_tried_again_later_each_time_and_within_a_minute() -> None:
    wanted, now = Wanted(), 0.0
    wanted.want(("a",))
    assert wanted.next(now) == [("", "a")]
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        wanted.failed(("", "a"), PeerFailed("peer_unreachable", "a test"), now)
        assert not wanted.next(now + pause - 0.5)
        now += pause
        assert wanted.next(now) == [("", "a")]
    wanted.found(("", "a"), 1)
    wanted.drop(1, now)
    assert wanted.next(now) == [("", "a")], "at once"


def test_an_engine_that_was_met_is_tried_again_soon_and_not_for_ever() -> None:
    wanted, now, place = Wanted(), 0.0, ("p", "a")
    wanted.met(place, 1)
    wanted.drop(1, now)
    assert (wanted.next(now), wanted.resting.next()) == ([], BACK_S[0])
    while (timer := wanted.resting.next()) is not None:
        now = timer
        assert wanted.next(now) == [place]
        why = SILENT if now < GONE_S else PeerFailed("stale_epoch", "it is another")
        assert wanted.failed(place, why, now) is (now == BACK_S[0]), "said once, and not of one that is given up"
        wanted.check()
    assert (place in wanted, GONE_S <= now < GONE_S + 2 * BACK_S[1]) == (False, True)


def test_so_many_engines_that_were_met_are_kept() -> None:
    wanted = Wanted()
    wanted.take_over((str(number), "a") for number in range(HAD))
    wanted.met(("0", "a"), 1)
    wanted.met(("another", "a"), 2)
    wanted.check()
    assert [place[0] for place in wanted.had] == [*map(str, range(2, HAD)), "0", "another"]
    assert wanted.awaited == HAD - 2


def test_who_joins_a_handshake_that_fails_goes_by_that_unless_an_order_joined_what_none_had_begun() -> None:
    peers = Peers("own", 10.0)
    (shake,) = peers.on(pe.Get(1, "p", "h", ordered=False), 0.0)
    assert isinstance(shake, pe.Shake)
    assert peers.on(pe.Get(2, "p", "h", ordered=False), 0.0) == []
    assert peers.on(pe.Get(3, "p", "h", ordered=True), 0.0) == []
    effects = peers.on(pe.Unmet(shake.number, SILENT), 0.0)
    assert [each.asker for each in effects if isinstance(each, pe.Refused)] == [1, 2]
    assert len([each for each in effects if isinstance(each, pe.Shake)]) == 1
    (shake,) = (each for each in effects if isinstance(each, pe.Shake))
    effects = peers.on(pe.Unmet(shake.number, SILENT), 0.0)
    assert [each.asker for each in effects if isinstance(each, pe.Refused)] == [3]
    (shake,) = peers.on(pe.Get(4, "p", "h"), 0.0)
    assert isinstance(shake, pe.Shake)
    assert peers.on(pe.Get(5, "p", "h"), 0.0) == []
    refused = [pe.Refused(4, SILENT), pe.Refused(5, SILENT)]
    assert peers.on(pe.Unmet(shake.number, SILENT), 0.0) == [pe.Shaken(shake.number, SILENT), *refused]


def test_orders_that_name_another_epoch_ask_once_more_together() -> None:
    peers = Peers("own", 10.0)
    for asker, epoch in ((1, ""), (2, "2"), (3, "2")):
        peers.on(pe.Get(asker, "p", "h", epoch), 0.0)
    for number, refused in ((1, []), (2, [2, 3])):
        effects = peers.on(pe.Met(number, HOME), 0.0)
        assert [each.asker for each in effects if isinstance(each, pe.Refused)] == refused
        assert any(isinstance(each, pe.Shake) for each in effects) is not bool(refused)


def test_an_order_for_an_engine_id_that_another_has_taken_meanwhile_is_refused() -> None:
    peers = Peers("own", 10.0)
    peers.on(pe.Get(1, "p", "x"), 0.0)
    met(peers, "h", asker=2)
    effects = peers.on(pe.Met(1, pe.Home("1", ("x",))), 0.0)
    assert [type(each) for each in effects] == [pe.Unload, pe.Shaken, pe.Refused]


def test_an_engine_whose_daemons_say_that_it_is_over_is_that_of_their_home() -> None:
    homes = Homes()
    homes.over("p", HOME)
    homes.bind("p", HOME, ordered=True)
    homes.over("p", pe.Home("2", ("elsewhere",)))
    assert "p" in homes
    homes.over("p", HOME)
    assert "p" not in homes


def test_an_engine_id_that_an_order_has_bound_stays_so_bound() -> None:
    homes = Homes()
    for ordered in (True, False):
        homes.bind("p", HOME, ordered=ordered)
        assert not homes.is_presumed("p")


def test_an_address_that_is_not_wanted_any_more_is_not_met() -> None:
    wanted = Wanted()
    wanted.want(("a", "b"))
    assert wanted.next(0.0) == [("", "a"), ("", "b")]
    wanted.want(("b",))
    wanted.found(("", "a"), 1)
    assert wanted.failed(("", "b"), SILENT, 0.0)
    assert wanted.next(0.0) == []
    wanted.check()
    assert wanted.named == set()


def test_many_readers_of_one_request_take_one_place() -> None:
    waits = Waits(2)
    for number, name in enumerate(("r", "s", "r"), 1):
        who = ReaderId(f"d{number}", "1", 0, 1)
        assert waits.refusal(name, who) is None
        waits.add(e.Ask(Reading(number, 1), name), who)
    refusal = waits.refusal("t", ReaderId("d4", "1", 0, 1))
    assert isinstance(refusal, Full)
    with pytest.raises(Full, match="2 publishes"):
        raise refusal


def test_the_end_of_a_handshake_that_is_over_changes_nothing() -> None:
    peers = Peers("own", 10.0)
    assert peers.on(pe.Unmet(7, SILENT), 0.0) == []
    assert peers.on(pe.Met(7, HOME), 0.0) == [pe.Unload(7)]


def test_a_lease_that_is_closed_without_bytes_is_not_counted_as_read() -> None:
    source = ByEvents()
    source.publish(readers=3)
    reader = source.reader()
    for nbytes in (5, 0):
        reader.closes(reader.opens(), nbytes=nbytes)
    serving = source.source.streams[reader.stream]
    assert (serving.read, serving.nbytes) == (1, 5)


def test_a_rank_that_finishes_an_older_lease_is_not_remembered() -> None:
    source = ByEvents()
    source.publish(number=2)
    source.finish(lease=1)
    assert source.source.leases.sizes()["early"] == 0


def test_timers_that_are_set_anew_take_bounded_room() -> None:
    alarms = Alarms[int]()
    for _ in range(3):
        alarms.set(0, 11.0)
        assert alarms.entries == 1
    for at in range(10, 0, -1):
        for key in range(100):
            alarms.set(key, float(at))
            assert alarms.entries <= 2 * len(alarms) + Alarms.SLACK
    assert alarms.due(1.0) == list(range(100))
    assert alarms.next() is None
    alarms.set(0, 200.0)
    for at in range(199, 99, -1):
        alarms.set(1, float(at))
    assert alarms.due(200.0) == [1, 0], "none is lost when room is made"


def test_a_daemon_that_cannot_be_started_is_tried_again_when_the_report_says() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1)):
        keeper.on(event, 1.0)
    (report,) = keeper.on(ke.NotStarted(2, "no memory"), 1.0)
    assert isinstance(report, ke.Report)
    assert "in 10 s" in report.what
    assert keeper.next_timer() == 11.0
    keeper.on(ke.Died(1, 9, "killed"), 3.0)
    (report,) = keeper.on(ke.NotStarted(3, "no memory"), 3.0)
    assert isinstance(report, ke.Report)
    assert "nobody serves; it is tried again in 4 s" in report.what
    assert keeper.next_timer() == 7.0


def test_so_many_addresses_are_asked_at_a_time() -> None:
    wanted = Wanted()
    wanted.want(tuple(f"a{number}" for number in range(3 * AT_ONCE)))
    asked = wanted.next(0.0)
    assert asked == [("", f"a{number}") for number in range(AT_ONCE)]
    assert wanted.next(0.0) == []
    wanted.found(("", "a0"), 1)
    assert wanted.next(0.0) == [("", f"a{AT_ONCE}")]


def test_timers_of_one_time_ring_in_the_order_in_which_they_were_set() -> None:
    alarms = Alarms[str]()
    for key in "cab":
        alarms.set(key, 1.0)
    assert alarms.due(1.0) == ["c", "a", "b"]


def test_an_upgrade_is_loaded_beside_a_daemon_that_does_not_serve_yet() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), ke.NotStarted(2, "no memory")):
        keeper.on(event, 1.0)
    assert [each for each in keeper.on(ke.Died(1, 9, "killed"), 30.0) if isinstance(each, ke.Start)] == [ke.Start(3)]
    assert ke.Start(4) in keeper.on(ke.Upgrade(), 31.0)


def test_a_daemon_that_takes_over_has_another_stand_by_at_once() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), ke.NotStarted(2, "no memory"), ke.Died(1, 9, "killed")):
        keeper.on(event, 1.0)
    keeper.on(ke.Loaded(3, 5.0), 2.0)
    assert keeper.on(ke.Serves(3), 2.0) == [ke.Start(4)]


def test_a_call_that_is_left_after_its_end_or_again_is_told_nothing() -> None:
    book = Book()
    (sent,) = book.on(be.Publish("call", "lease", "r"))
    assert isinstance(sent, be.Send)
    assert sent.number == 1
    assert [type(each) for each in book.on(be.Leave("call"))] == [be.SendAbort]
    assert book.on(be.Leave("call")) == []
    assert book.on(be.Leave("another")) == []


def test_what_is_published_next_follows_what_waits_for_its_fence() -> None:
    source = ByEvents()
    source.publish(num_tokens=8, more=True, fence=1)
    with pytest.raises(Conflict, match="had 8 tokens published already"):
        source.publish(num_tokens=4, more=True)


def test_a_handshake_that_fails_forgets_no_other_peer() -> None:
    peers = Peers("own", 10.0)
    met(peers, "h")
    (shake,) = peers.on(pe.Get(2, "q", "elsewhere"), 0.0)
    assert isinstance(shake, pe.Shake)
    assert pe.Unload(1) not in peers.on(pe.Unmet(shake.number, SILENT), 0.0)
    assert peers.known("p") is not None


def test_words_of_a_daemon_that_is_not_known_are_dropped() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1)):
        keeper.on(event, 1.0)
    assert [keeper.on(event, 2.0) for event in (ke.Loaded(9, 5.0), ke.Serves(9), ke.Died(9, 1, "ended"))] == [
        [],
        [],
        [],
    ]
    assert keeper.on(ke.Serves(1), 2.0) == []


def test_a_reader_that_reads_what_was_packed_has_more_time_for_the_rest() -> None:
    at = pk.At(Reading(1, 1), 1)
    packing = Packing(e.Pack(at.reading, at.number, 2, True, None))
    packing.begin(View(Terms("r", 1, 7, 60.0, 1), Publication({}, 0, b"", more=False), 1))
    packing.on(pk.WasCut(at), 0.0)
    packing.on(pk.Want(at, (0, 1)), 0.0)
    for chunk in (0, 1):
        packing.on(pk.Gathered(at, chunk), 0.0)
    assert packing.take() is not None
    packing.on(pk.Want(at, read=(0,)), 5.0)
    assert packing.on(pk.Idle(at), IDLE_S) == [pk.SetIdle(at, 5.0 + IDLE_S)]
    assert pk.Forget(at) in packing.on(pk.Idle(at), 5.0 + IDLE_S)


def test_a_peer_that_was_forgotten_is_not_renewed_while_it_is_used() -> None:
    peers = Peers("own", 10.0)
    met(peers, "h")
    peers.on(pe.Use(1), 0.0)
    peers.on(pe.Forget(1), 0.0)
    (refused,) = peers.on(pe.Renew(5, 1), 0.0)
    assert isinstance(refused, pe.Refused)
    assert refused.why.code == "peer_lost"


def test_a_renewal_that_has_to_ask_once_more_is_judged_by_what_holds_then() -> None:
    """The id has passed to another engine meanwhile, and the peer is forgotten. (SEED=261638466437882 of the peers: the
    renewal took the id back, as it had begun as that of its owner.)"""
    peers = Peers("own", 10.0)
    met(peers, "h")
    peers.on(pe.Get(2, "p", "h", epoch="another"), 0.0)
    assert peers.on(pe.Renew(3, 1), 0.0) == []
    peers.on(pe.Over("p", HOME), 0.0)
    peers.on(pe.Get(4, "p", "x0", ordered=False), 0.0)
    peers.on(pe.Met(3, pe.Home("1000", ("x0",))), 0.0)
    *_, ordered, renewal = peers.on(pe.Unmet(2, SILENT), 0.0)
    assert ordered == pe.Refused(2, SILENT)
    assert isinstance(renewal, pe.Refused) and (renewal.asker, renewal.why.code) == (3, "peer_lost")


def test_so_many_refusals_are_told_again() -> None:
    leader = Leader()
    end = le.End(ReadingRank("decode", "1", 1, 1), "r", Attempt(1), "full", failed=True)
    told = [leader.on(le.Refused(end, (1,), 60.0), 0.0) for _ in range(TOLD_AGAIN + 1)]
    tells = [each for effects in told for each in effects if isinstance(each, le.Tell)]
    assert [leader.on(le.Told(each.tell, lost=True), 1.0) == [] for each in (tells[0], tells[-1])] == [False, True]


def test_a_publish_that_is_refused_leaves_what_was_published_unless_it_withdraws() -> None:
    for withdraw, told in (({}, be.Refused), ({"withdraw": True}, be.SendAbort)):
        book = Book()
        (first,) = book.on(be.Publish("first", "lease", "r", more=True))
        assert isinstance(first, be.Send)
        book.on(be.Answered(first.id))
        (second,) = book.on(be.Publish("second", "lease", "r", **withdraw))
        assert isinstance(second, be.Send)
        (end,) = book.on(be.Answered(second.id, Full("full", "for a while")))
        assert isinstance(end, told)


def test_bytes_of_a_rank_that_opened_nothing_are_counted() -> None:
    source = ByEvents()
    source.publish(readers=2)
    source.reader().finishes(nbytes=5)
    assert source.account().nbytes == 5


def test_the_publish_of_another_lease_that_is_refused_says_nothing_of_the_one_that_is_there() -> None:
    source = ByEvents()
    source.publish()
    source.on(e.Refuse("r", 1, Conflict("mixed_weights", "other weights")))
    source.revoke()
    reader = source.reader()
    assert reader.refused(reader.opens(lease=1)).code == "lease_ended"


def test_a_rank_that_finishes_while_it_reads_is_remembered_whatever_others_do() -> None:
    source = ByEvents()
    source.publish(readers=2)
    reader, another = source.reader(), source.reader(ANOTHER)
    reading, other = reader.opens(), another.opens()
    source.finish()
    another.closes(other)
    assert source.state() is LeaseState.PUBLISHED
    reader.closes(reading, complete=False)
    assert source.state() is LeaseState.RELEASED


def test_an_engine_that_numbers_its_leases_and_attempts_is_taken_at_its_word() -> None:
    for said in (be.Publish("call", "lease", "r", number=7), be.Receive("call", "r", attempt=7)):
        (sent,) = Book().on(said)
        assert isinstance(sent, be.Send)
        assert sent.number == 7


def test_a_lease_that_ends_with_its_session_is_told_why() -> None:
    book = Book()
    book.on(be.Publish("call", "lease", "r"))
    book.on(be.SessionLost(SILENT))
    ended = [each for each in book.on(be.SessionOver()) if isinstance(each, be.LeaseEnded)]
    assert [getattr(each.end, "code", "") for each in ended] == ["daemon_gone"]


def test_a_daemon_that_has_loaded_takes_over_before_one_that_loads() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), ke.Loaded(2, 5.0), ke.Upgrade()):
        keeper.on(event, 1.0)
    keeper.on(ke.Tick(), 20.0)
    assert sorted(keeper.daemons) == [1, 2, 3]
    assert ke.Turn(2, "killed") in keeper.on(ke.Died(1, 9, "killed"), 30.0)


def test_nothing_is_done_after_a_keepers_end_though_two_daemons_are_late_at_once() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 0.0), ke.Serves(1), ke.Upgrade(), ke.Loaded(3, 0.0)):
        keeper.on(event, 0.0)
    for _ in range(2):
        keeper.on(ke.Tick(), 10.0)
    keeper.on(ke.Stop(15), 10.0)
    ended = keeper.on(ke.Tick(), 20.0)
    assert [type(each) for each in ended] == [ke.Report, ke.End]


def test_an_engine_that_has_read_keeps_no_lease_from_being_given_up() -> None:
    source = ByEvents()
    source.publish(readers=2)
    source.read(ANOTHER)
    source.on(e.GiveUp("r", "aborted", READER))
    assert source.state() is LeaseState.REVOKED


def test_a_lease_that_is_refused_twice_is_refused_for_the_first_reason() -> None:
    source = ByEvents()
    for code in ("published_less", "full"):
        source.on(e.Refuse("r", 1, Conflict(code, "a test")))
    reader = source.reader()
    assert reader.refused(reader.opens(lease=1)).code == "published_less"


def test_a_lease_that_another_engine_reads_is_not_given_up() -> None:
    source = ByEvents()
    source.publish(readers=2)
    source.reader(ANOTHER).opens()
    source.on(e.GiveUp("r", "aborted", READER))
    assert source.state() is LeaseState.PUBLISHED


def test_ranks_of_an_engine_number_their_leases_and_attempts() -> None:
    for said in (be.Publish("call", "lease", "r"), be.Receive("call", "r")):
        with pytest.raises(KvferryError) as refused:
            Book(2).on(said)
        assert refused.value.code == "number_required"


def revoked_while_read() -> tuple[ByEvents, Speaker, int]:
    """A source, its reader, and the reading of a lease that was revoked meanwhile."""
    source = ByEvents()
    source.publish()
    reader = source.reader()
    reading = reader.opens()
    source.revoke()
    reader.refused(reading)
    return source, reader, reading


def test_a_reading_that_has_ended_does_not_finish_the_lease_that_follows() -> None:
    source, reader, reading = revoked_while_read()
    source.publish()
    reader.closes(reading, lease=2)
    assert source.state() is LeaseState.PUBLISHED


def test_the_first_reason_why_a_reading_is_over_stands() -> None:
    following = Following(0, "r", 0, Computed())
    following.on(rd.Begin(), 0.0)
    for why in (SILENT, PeerFailed("peer_lost", "the stream is over")):
        following.on(rd.Over(following.opening, why), 0.0)
    assert following.problem is SILENT


def is_over(memory: Memory, *, follows: str = "", gone: bool = False) -> bool:
    """Whether nothing is kept of a session when its last step has ended."""
    one = Session("one", se.Rank("e", "1", 0, 1), memory, follows)
    if gone:
        one.part("its engine is dead")
    effects = one.retire("a test", 0.0, keep=True)
    while one.taking is not None:
        effects = one.step_over(one.taking, done=True, now=0.0)
    return se.Over("one") in effects


def test_a_session_is_kept_for_memory_of_the_daemons_that_its_engine_may_come_back_for() -> None:
    assert not is_over(Memory.DAEMONS)
    assert not is_over(Memory.NONE, follows="another")
    assert is_over(Memory.DAEMONS, gone=True)
    assert is_over(Memory.NONE)


def test_memory_is_not_kept_for_an_engine_that_leaves() -> None:
    sessions = Sessions()
    sessions.on(se.Attach("one", se.Rank("decode", "1", 0, 1)), 0.0)
    sessions.on(se.Allocated("one", owned=True), 0.0)
    effects = sessions.on(se.Withdraw("one"), 0.0)
    while taken := [each.step for each in effects if isinstance(each, se.Take)]:
        effects = sessions.on(se.StepOver("one", taken[0], done=True), 0.0)
    assert sessions.sessions["one"].state is State.KEPT
    sessions.on(se.Leave("one"), 0.0)
    assert sessions.sessions["one"].state is State.FREEING


def test_memory_goes_on_in_the_next_session_of_its_own_rank_alone() -> None:
    for rank, before in ((0, "one"), (1, None)):
        sessions, effects = Sessions(), []
        for event in (se.Attach("one", se.Rank("decode", "1", 0, 2)), se.Allocated("one", True), se.Withdraw("one")):
            effects = sessions.on(event, 0.0)
        while taken := [each.step for each in effects if isinstance(each, se.Take)]:
            effects = sessions.on(se.StepOver("one", taken[0], done=True), 0.0)
        attached = se.Rank("decode", "1", rank, 2)
        effects = sessions.on(se.Attach("two", attached, "one"), 0.0)
        assert se.Open("two", attached, before) in effects
        assert (se.Over("one") in effects) is (before is not None)


def test_a_rank_that_was_not_let_in_is_missing_for_that_reason() -> None:
    rosters = Rosters()
    rosters.keep_out("e", 1, Conflict("rank_taken", "it has joined from elsewhere"))
    assert rosters.why_missing("e", "1", 1) == "rank 1 was not let in: it has joined from elsewhere"
    assert rosters.why_missing("e", "1", 2) == ""


def test_what_is_said_of_an_earlier_opening_does_not_count() -> None:
    following = Following(0, "r", 0, Computed())
    following.on(rd.Begin(), 0.0)
    following.on(rd.AskFor(2), 0.0)
    following.on(rd.Over(1, SILENT), 0.0)
    following.on(rd.Update(1, rd.Seen(lease=1, version=1)), 0.0)
    following.on(rd.Unpublished(1), 0.0)
    assert following.problem is None
    assert not following.awaits_publish
    assert not following.take()


def test_a_receive_waits_for_one_that_is_aborted_and_not_quiet() -> None:
    book = Book()
    (sent,) = book.on(be.Receive("first", "r"))
    assert isinstance(sent, be.Send)
    book.on(be.Answered(sent.id, transfer_id="t"))
    book.on(be.Abort("abort", "r"))
    assert book.on(be.Receive("second", "r")) == []
    effects = book.on(be.TransferOver("r", "t", "aborted", done=False, safe=True))
    assert [type(each) for each in effects] == [be.Ended, be.Quiet, be.Send]


def test_one_opening_is_of_one_lease_which_has_a_number() -> None:
    for leases in ((1, 2), (0,)):
        following = Following(0, "r", 0, Computed())
        following.on(rd.Begin(), 0.0)
        for lease in leases:
            following.on(rd.Update(1, rd.Seen(lease=lease, version=1)), 0.0)
        assert following.problem is not None
        assert following.problem.code == "malformed_update"


def test_a_second_stop_ends_a_drain() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 50.0), ke.Serves(1), ke.Loaded(2, 50.0), ke.Stop(15)):
        keeper.on(event, 1.0)
    assert keeper.on(ke.Stop(2), 2.0) == [ke.Signal(1, 2)]
    assert keeper.daemons[1].due == 7.0


def test_a_daemon_that_was_told_to_go_says_nothing_by_its_death() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), ke.Loaded(2, 5.0), ke.Upgrade(), ke.Loaded(3, 5.0)):
        keeper.on(event, 1.0)
    assert keeper.on(ke.Died(2, 9, "killed"), 2.0) == []


def test_a_caller_that_has_its_answer_may_give_up() -> None:
    peers = Peers("own", 10.0)
    met(peers, "h")
    assert peers.on(pe.GiveUp(1), 0.0) == []


def test_a_peer_that_somebody_wants_is_not_idle() -> None:
    peers = Peers("own", 10.0)
    met(peers, "h")
    assert peers.on(pe.Get(2, "p", "h"), IDLE_PEER_S) == [pe.Found(2, 1)]
    (shake,) = peers.on(pe.Get(3, "q", "elsewhere"), IDLE_PEER_S)
    assert isinstance(shake, pe.Shake)
    peers.on(pe.Met(shake.number, pe.Home("1", ("elsewhere",))), IDLE_PEER_S + 1.0)
    assert peers.known("p") is not None


def test_an_engine_that_was_not_read_from_for_long_is_not_wanted_any_more() -> None:
    peers, now = Peers("own", 10.0), IDLE_PEER_S + 1.0
    met(peers, "h")
    assert [place[0] for place in peers.wanted.had] == ["p"]
    (shake,) = peers.on(pe.Get(2, "q", "elsewhere"), now)
    assert isinstance(shake, pe.Shake)
    assert pe.Unload(1) in peers.on(pe.Met(shake.number, pe.Home("1", ("elsewhere",))), now)
    assert [place[0] for place in peers.wanted.had] == ["q"]


def test_only_an_order_says_whose_an_engine_id_is() -> None:
    peers = Peers("own", 10.0)
    for asker, ordered in ((1, False), (2, False), (3, True)):
        effects = peers.on(pe.Get(asker, "p", "h", ordered=ordered), 0.0)
        if asker == 1:
            (shake,) = effects
            assert isinstance(shake, pe.Shake)
            peers.on(pe.Met(shake.number, HOME), 0.0)
        (other,) = peers.on(pe.Get(10 + asker, "p", f"x{asker}"), 0.0)
        assert isinstance(other, pe.Shake)
        assert (peers.in_the_way(other.number, pe.Home("1", ("x",))) is None) is not ordered
        peers.on(pe.Unmet(other.number, SILENT), 0.0)


def test_an_engine_of_which_nothing_is_known_is_not_remembered() -> None:
    homes = Homes()
    homes.forget("p", HOME)
    homes.bind("p", HOME, ordered=True)
    assert list(homes.forgotten()) == []


def test_a_publish_of_a_lease_that_is_over_is_refused() -> None:
    source = ByEvents()
    for number in (1, 2):
        source.publish(number=number)
    source.revoke()
    for number in (1, 2):
        with pytest.raises(Conflict) as refused:
            source.publish(number=number)
        assert refused.value.code == "lease_ended"


def test_only_what_is_published_whole_at_once_is_announced_and_to_few() -> None:
    for more, readers, told in ((False, ANNOUNCED_TO, True), (True, 1, False), (False, ANNOUNCED_TO + 1, False)):
        source = ByEvents()
        listening = [source.reader(ReaderId(f"d{at}", "1", 0, 1), announcing=True) for at in range(readers)]
        for goes_on in (True, False) if more else (False,):
            source.publish(more=goes_on)
        assert [isinstance(each.hears(0), e.Announcement) for each in listening] == [told] * readers


def test_a_lease_that_has_ended_says_when() -> None:
    source = ByEvents()
    source.publish()
    assert source.account().ended_at is None
    source.wait(5.0)
    source.revoke()
    assert (source.account().ended_at, source.account().expires_in_s) == (5.0, None)


def packing_of(source: ByEvents) -> Packing:
    """The packing of a lease that one reader packs whole."""
    source.publish()
    reader = source.reader()
    reading = reader.opens()
    source.on(e.Pack(Reading(reader.stream, reading), 1, 1, True, None))
    packing = source.source.packing(pk.At(Reading(reader.stream, reading), 1))
    assert packing is not None
    packing.on(pk.WasCut(packing.at), 0.0)
    packing.on(pk.Want(packing.at, (0,)), 0.0)
    return packing


def test_a_lease_whose_chunks_are_packed_may_end() -> None:
    source = ByEvents()
    packing = packing_of(source)
    packing.on(pk.Gathered(packing.at, 0), 0.0)
    source.revoke()
    told = source.source.take(packing.at.reading)
    assert isinstance(told, pk.Packed)
    assert told.chunks == (0,)


def test_nothing_is_packed_after_the_end() -> None:
    packing = packing_of(ByEvents())
    packing.on(pk.Gathered(packing.at, 0, SILENT), 0.0)
    assert packing.on(pk.Want(packing.at, (0,)), 0.0) == []
    packing.check()
    assert not any(packing.sizes().values())


def test_why_a_rank_is_missing_is_said_of_its_engine_and_another_epoch() -> None:
    rosters = Rosters()
    rosters.join(1, Rank("p", "1", 1, 2), ro.Member("a", "i1"))
    assert "in epoch 1" in rosters.why_missing("p", "2", 1)
    assert {rosters.why_missing(*of) for of in (("q", "2", 1), ("p", "2", 0), ("p", "1", 0), ("p", "1", 1))} == {""}


def test_ends_that_are_told_again_take_no_place_of_a_refusal() -> None:
    leader, at = Leader(), ReadingRank("decode", "1", 0, 1)
    for part in range(TOLD_AGAIN):
        leader.on(le.Lead(part, at, "r", Attempt(1), (1,), 60.0), 0.0)
        leader.on(le.GaveUp(part, "failed", failed=True), 0.0)
    (tell,) = leader.on(le.Refused(le.End(at, "r", Attempt(1), "full", failed=True), (1,), 60.0), 0.0)
    assert isinstance(tell, le.Tell)
    assert leader.on(le.Told(tell.tell, lost=True), 1.0) != []


def test_a_receive_whose_blocks_were_safe_before_its_end_is_quiet() -> None:
    book = Book()
    (sent,) = book.on(be.Receive("call", "r"))
    assert isinstance(sent, be.Send)
    book.on(be.Answered(sent.id, transfer_id="t"))
    book.on(be.BlocksSafe("r", "t"))
    (refused,) = book.on(be.Receive("another", "r"))
    assert isinstance(refused, be.Refused), "the first has not ended"
    assert be.Quiet("call") in book.on(be.TransferOver("r", "t", "end", done=True, safe=False))


def test_what_is_published_in_part_goes_on_when_the_same_weights_are_named() -> None:
    book = Book()
    (sent,) = book.on(be.Publish("first", "lease", "r", more=True))
    assert isinstance(sent, be.Send)
    book.on(be.Answered(sent.id))
    for weights in ("", "others"):
        (sent,) = book.on(be.ReplaceWeights(f"replace by {weights}", weights))
        assert isinstance(sent, be.Send)
        book.on(be.Answered(sent.id))
        if not weights:
            assert isinstance(book.on(be.Publish("second", "lease", "r", more=True))[0], be.Send)
    with pytest.raises(Conflict) as refused:
        book.on(be.Publish("third", "lease", "r"))
    assert refused.value.code == "mixed_weights"


def test_a_publish_that_comes_after_the_end_of_its_lease_begins_another() -> None:
    book = Book()
    (first,) = book.on(be.Publish("first", "lease", "r", more=True))
    (second,) = book.on(be.Publish("second", "lease", "r", more=True))
    assert isinstance(first, be.Send) and isinstance(second, be.Send)
    book.on(be.Answered(first.id))
    book.on(be.LeaseOver("r", 1, "expired"))
    (again,) = book.on(be.Answered(second.id, Conflict("lease_ended", "it is over")))
    assert isinstance(again, be.Send)
    assert (again.call, again.number) == ("second", 2)


def test_a_publish_whose_lease_goes_on_is_not_sent_again() -> None:
    book, over = Book(), Conflict("lease_ended", "it is over")
    id = sends(book, be.Publish("call", "lease", "r"))
    assert book.on(be.Answered(id, over)) == [be.Refused("call", over)]


def test_an_upgrade_that_is_wished_for_after_a_stop_begins_nothing() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), ke.Stop(15)):
        keeper.on(event, 0.0)
    assert keeper.on(ke.Upgrade(), 1.0) == []
    assert keeper.wishes.upgrade == 0


def test_a_keeper_whose_first_daemon_cannot_be_started_says_so_and_ends() -> None:
    keeper = Keeper()
    keeper.on(ke.Begin(), 0.0)
    assert keeper.on(ke.NotStarted(1, "no memory"), 0.0) == [
        ke.Report("no daemon can be started now (no memory)"), ke.End(1)
    ]  # fmt: skip


def test_other_ranks_are_told_once_that_an_attempt_is_given_up() -> None:
    leader, at = Leader(), ReadingRank("decode", "1", 0, 1)
    leader.on(le.Lead(1, at, "r", Attempt(1), (1,), 60.0), 0.0)
    leader.on(le.Whole(1, {1: "i"}), 0.0)
    assert [len(leader.on(le.GaveUp(1, "failed", failed=True), 0.0)) for _ in range(2)] == [1, 0]


def test_one_timer_looks_after_a_reader_that_holds_slots() -> None:
    source = ByEvents()
    source.publish()
    reader = source.reader()
    reading = Reading(reader.stream, reader.opens())
    source.on(e.Pack(reading, 1, 2, True, None))
    packing = source.source.packing(pk.At(reading, 1))
    assert packing is not None
    packing.on(pk.WasCut(packing.at), 0.0)
    packing.on(pk.Want(packing.at, (0, 1)), 0.0)
    said = [each for chunk in (0, 1) for each in packing.on(pk.Gathered(packing.at, chunk), 0.0)]
    assert said.count(pk.SetIdle(packing.at, IDLE_S)) == 1


def test_an_engine_that_has_gone_ends_its_leases_and_those_of_its_own_memory_at_once() -> None:
    for memory in (Memory.DAEMONS, Memory.ENGINES):
        one = Session("one", se.Rank("e", "1", 0, 1), memory)
        detached, ends = one.part("its engine is dead")
        assert detached == se.Detach("one", "its engine is dead")
        assert isinstance(ends, se.EndLeases)
        assert ends.keep_whole is (memory is Memory.DAEMONS)
        assert ends.why == "its engine is dead" + ("" if ends.keep_whole else ", and owned its memory")


# ---- an engine's book ----


def sends(book: Book, said: be.Said) -> int:
    (sent,) = book.on(said)
    assert isinstance(sent, be.Send)
    assert bool(sent.number) is isinstance(said, be.Publish | be.Receive)
    book.check()
    return sent.id


def test_what_is_said_while_the_cache_is_described_is_sent_in_its_order_but_for_aborts() -> None:
    book = Book()
    book.on(be.Register())
    for said in (be.Publish("publish", "lease", "r"), be.Receive("receive", "s"), be.ReplaceWeights("replace", "v2")):
        assert book.on(said) == []
    sends(book, be.Probe("probe"))
    sends(book, be.Abort("abort", "t"))
    (refused,) = book.on(be.Leave("receive"))
    assert isinstance(refused, be.Refused)
    assert refused.why.code == "deadline"
    assert book.on(be.Leave("replace")) == [], "the name goes out anyway"
    assert [each.call for each in book.on(be.Registered()) if isinstance(each, be.Send)] == ["publish", "replace"]
    sends(book, be.Publish("at once", "lease", "u"))


def test_what_waits_to_be_published_in_part_is_cut_by_other_weights_too() -> None:
    book = Book()
    book.on(be.Register())
    for name, more in (("part", True), ("whole", False)):
        book.on(be.Publish(name, "lease", name, more=more))
    book.on(be.Receive("receive", "r"))
    book.on(be.ReplaceWeights("replace", "v2"))
    assert book.on(be.Publish("whole again", "lease", "whole")) == []
    with pytest.raises(KvferryError, match="before the weights were replaced"):
        book.on(be.Publish("part again", "lease", "part"))


def test_an_abort_refuses_what_waits_and_nothing_of_other_requests() -> None:
    book = Book()
    book.on(be.Register())
    for name in "rs":
        book.on(be.Publish(name, "lease", name))
    refused, sent = book.on(be.Abort("abort", "r"))
    assert isinstance(refused, be.Refused) and isinstance(sent, be.Send)
    assert (refused.call, refused.why.code) == ("r", "aborted")


def test_a_call_is_answered_once() -> None:
    for said in (
        be.Publish("call", "lease", "r"),
        be.Abort("call", "r"),
        be.ReplaceWeights("call", "v2"),
        be.Probe("call"),
    ):
        for problem in (None, SILENT):
            book = Book()
            id = sends(book, said)
            assert book.on(be.Answered(id + 1)) == []
            assert book.on(be.Answered(id, problem)) == [
                be.Taken("call") if problem is None else be.Refused("call", SILENT)
            ]
            assert book.on(be.Answered(id)) == []


def test_a_lease_is_told_one_end() -> None:
    book = Book()
    book.on(be.Answered(sends(book, be.Publish("call", "lease", "r"))))
    assert book.on(be.LeaseOver("r", 2, "expired")) == []
    assert book.on(be.LeaseOver("r", 1, "expired")) == [be.LeaseEnded("lease", "expired")]
    assert book.on(be.LeaseOver("r", 1, "expired")) == []


def test_a_publish_that_is_refused_has_no_lease_unless_another_of_it_was_taken() -> None:
    for taken in (False, True):
        book = Book()
        if taken:
            book.on(be.Answered(sends(book, be.Publish("first", "lease", "r", more=True))))
        book.on(be.Answered(sends(book, be.Publish("second", "lease", "r")), SILENT))
        assert (book.on(be.LeaseOver("r", 1, "expired")) != []) is taken


def test_the_end_of_a_receive_may_come_before_its_name() -> None:
    book = Book()
    id = sends(book, be.Receive("call", "r"))
    over = be.TransferOver("r", "t", "end", done=True, safe=True)
    for event in (be.TransferOver("r", "before", "another end", done=False, safe=True), over):
        assert book.on(event) == []
    assert book.on(be.Answered(id, transfer_id="t")) == [be.Named("call"), be.Ended("call", "end"), be.Quiet("call")]
    sends(book, be.Receive("again", "r"))


def test_what_was_heard_before_the_name_of_a_receive_is_kept_until_then() -> None:
    book = Book()
    id = sends(book, be.Receive("call", "r"))
    book.on(be.BlocksSafe("r", "before"))
    assert book.sizes()["early"] == 1
    book.on(be.Answered(id, transfer_id="t"))
    assert book.sizes()["early"] == 0


def test_a_caller_that_has_heard_the_end_of_its_call_has_nothing_to_leave() -> None:
    book = Book()
    book.on(be.Answered(sends(book, be.Receive("call", "r")), transfer_id="t"))
    assert book.on(be.TransferOver("r", "t", "end", done=False, safe=False)) == [be.Ended("call", "end")]
    assert book.on(be.Leave("call")) == []
    sends(book, be.Receive("again", "r"))
    sends(book, be.Publish("publish", "lease", "s"))
    book.on(be.SessionLost(SILENT))
    assert book.on(be.Leave("publish")) == [], "there is nobody to whom it could be said"


def test_what_is_published_after_an_abort_is_another_lease() -> None:
    book = Book()
    for call, number in (("first", 1), ("second", 2)):
        (sent,) = book.on(be.Publish(call, "lease", "r", more=True))
        assert isinstance(sent, be.Send) and sent.number == number
        sends(book, be.Abort(f"abort the {call}", "r"))


def test_a_receive_that_is_refused_leaves_its_request_free() -> None:
    book = Book()
    assert book.on(be.Answered(sends(book, be.Receive("call", "r")), SILENT)) == [be.Refused("call", SILENT)]
    sends(book, be.Receive("again", "r"))


def test_one_receive_of_a_request_is_under_way_at_a_time() -> None:
    book = Book()
    id = sends(book, be.Receive("call", "r"))
    (refused,) = book.on(be.Receive("another", "r"))
    assert isinstance(refused, be.Refused)
    assert refused.why.code == "receive_pending"
    book.on(be.Answered(id, transfer_id="t"))
    assert book.on(be.TransferOver("r", "t", "end", done=True, safe=False)) == [be.Ended("call", "end")]
    sends(book, be.Receive("another", "r"))
    assert book.on(be.BlocksSafe("r", "t")) == [be.Quiet("call")], "it writes until then"


def test_a_receive_that_nobody_waits_for_is_aborted_once_it_has_a_name_and_is_quiet_later() -> None:
    for named in (False, True):
        book = Book()
        id = sends(book, be.Receive("call", "r"))
        if named:
            book.on(be.Answered(id, transfer_id="t"))
        said = book.on(be.Leave("call"))
        assert [type(each) for each in said] == ([be.SendAbort] if named else [])
        assert book.left("r") == ["call"] and book.left("s") == []
        if not named:
            assert [type(each) for each in book.on(be.Answered(id, transfer_id="t"))] == [be.SendAbort]
        assert book.on(be.Receive("next", "r")) == [], "it waits for the one before"
        assert book.on(be.TransferOver("r", "t", "end", done=False, safe=False)) == [], "its blocks are not safe yet"
        quiet, sent = book.on(be.BlocksSafe("r", "t"))
        assert quiet == be.Quiet("call") and isinstance(sent, be.Send)


def test_bytes_for_weights_that_were_replaced_meanwhile_are_of_no_use() -> None:
    for done in (True, False):
        book = Book()
        book.on(be.Answered(sends(book, be.Receive("call", "r")), transfer_id="t"))
        sends(book, be.ReplaceWeights("replace", "v2"))
        ended, _ = book.on(be.TransferOver("r", "t", "end", done=done, safe=True))
        assert isinstance(ended, be.Ended)
        assert (None if ended.problem is None else ended.problem.code) == ("other_weights" if done else None)


def test_calls_of_a_session_that_ends_are_in_doubt_and_then_quiet_and_leases_are_lost() -> None:
    book = Book()
    book.on(be.Answered(sends(book, be.Publish("told", "lease", "r"))))
    sends(book, be.Publish("publish", "another", "s"))
    sends(book, be.Receive("receive", "t"))
    book.on(be.Leave("receive"))
    assert book.on(be.SessionLost(SILENT)) == [be.Doubtful("publish", SILENT)]
    assert book.on(be.Probe("late")) == [be.Doubtful("late", SILENT)]
    assert book.on(be.Publish("too late", "third", "u")) == [be.Doubtful("too late", SILENT)]
    assert list(book.start.lost) == [("r", 1), ("s", 2), ("u", 3)]
    effects = book.on(be.SessionOver())
    assert [each.call for each in effects if isinstance(each, be.Quiet)] == ["publish", "receive", "late", "too late"]
    assert [each.lease for each in effects if isinstance(each, be.LeaseEnded)] == ["lease", "another"]
    assert book.on(be.Probe("later")) == [be.Doubtful("later", SILENT), be.Quiet("later")]
    resumed = Book(before=book)
    resumed.on(be.Register())
    resumed.on(be.Registered((("r", 1), ("never", 9))))
    assert list(book.start.lost) == [("s", 2), ("u", 3)]
    (sent,) = resumed.on(be.Publish("next", "fourth", "v"))
    assert isinstance(sent, be.Send)
    assert sent.number == 4


def test_it_may_never_be_certain_that_a_session_is_quiet() -> None:
    book = Book()
    sends(book, be.Publish("call", "lease", "r"))
    book.on(be.SessionLost(SILENT))
    assert book.on(be.SessionOver(SILENT)) == [be.Quiet("call", SILENT), be.LeaseEnded("lease", SILENT)]
    assert book.on(be.Probe("later")) == [be.Doubtful("later", SILENT), be.Quiet("later", SILENT)]


def test_a_publish_that_nobody_waits_for_is_settled_by_the_abort_behind_it() -> None:
    book = Book()
    id = sends(book, be.Publish("call", "lease", "r", more=True))
    (abort,) = book.on(be.Leave("call"))
    assert isinstance(abort, be.SendAbort)
    assert book.on(be.Answered(id)) == []
    assert book.on(be.Answered(abort.id)) == [be.Quiet("call")]


def test_a_publish_that_nobody_waits_for_is_the_last_of_its_lease() -> None:
    book = Book()
    book.on(be.Answered(sends(book, be.Publish("first", "lease", "r", more=True))))
    sends(book, be.Publish("second", "lease", "r", more=True))
    book.on(be.Leave("second"))
    (sent,) = book.on(be.Publish("third", "another", "r", more=True))
    assert isinstance(sent, be.Send)
    assert (sent.number, sent.lease) == (2, "another")


def test_a_publish_that_withdraws_is_refused_for_its_own_reason() -> None:
    book = Book()
    book.on(be.Answered(sends(book, be.Publish("first", "lease", "r", more=True))))
    (abort,) = book.on(be.Answered(sends(book, be.Publish("second", "lease", "r", withdraw=True)), SILENT))
    assert isinstance(abort, be.SendAbort)
    assert book.on(be.Answered(abort.id)) == [be.Refused("second", SILENT)]


def test_a_publish_that_was_aborted_or_has_a_number_begins_no_other_lease() -> None:
    over = Conflict("lease_ended", "it is over")
    for number, aborted in ((7, False), (0, True)):
        book = Book()
        id = sends(book, be.Publish("call", "lease", "r", number=number, more=True))
        if aborted:
            sends(book, be.Abort("abort", "r"))
        book.on(be.LeaseOver("r", number or 1, "revoked"))
        assert book.on(be.Answered(id, over)) == [be.Refused("call", over)]


def test_a_publish_whose_lease_ended_by_other_weights_is_not_sent_again() -> None:
    book = Book()
    id = sends(book, be.Publish("call", "lease", "r"))
    sends(book, be.ReplaceWeights("replace", "v2"))
    book.on(be.LeaseOver("r", 1, "revoked"))
    (refused,) = book.on(be.Answered(id, Conflict("lease_ended", "it is over")))
    assert isinstance(refused, be.Refused)
    assert refused.why.code == "mixed_weights"


def test_what_was_published_in_part_is_cut_by_other_weights_until_it_is_aborted() -> None:
    book = Book()
    for name, more in (("whole", False), ("part", True)):
        book.on(be.Answered(sends(book, be.Publish(name, "lease", name, more=more))))
    doubtful = sends(book, be.Publish("left", "lease", "doubtful", more=True))
    book.on(be.Leave("left"))
    book.on(be.Answered(doubtful, SILENT))
    sends(book, be.ReplaceWeights("replace", "v2"))
    for name, cut in (("whole", False), ("part", True), ("doubtful", True)):
        said = be.Publish(f"{name} again", "lease", name, more=True)
        if cut:
            with pytest.raises(KvferryError) as refused:
                book.on(said)
            assert refused.value.code == "mixed_weights"
            sends(book, replace(said, call=f"{name} by old weights", current=False))
        else:
            sends(book, said)
    sends(book, be.Abort("abort", "part"))
    sends(book, be.Publish("anew", "lease", "part"))


# ---- sources ----


def test_a_request_is_published_anew_though_so_many_leases_are_held() -> None:
    source = ByEvents(limit=1)
    source.publish()
    with pytest.raises(Full):
        source.publish("s")
    source.publish(number=2)
    assert (source.lease().number, len(source.source.leases)) == (2, 1)


def test_a_lease_that_a_reader_waits_for_or_has_open_is_not_announced() -> None:
    for opens_first, stays in ((True, False), (False, True), (False, False)):
        source = ByEvents()
        listener, reader = source.reader(ANOTHER, announcing=True), source.reader()
        if opens_first:
            reader.opens()
        source.publish(fence=1)
        if not opens_first:
            reader.opens()
        if not stays:
            reader.goes()
        source.on(e.FenceOver("r", 1))
        assert isinstance(listener.hears(0), e.Announcement) is not (opens_first or stays)


def test_an_announcement_of_a_lease_that_has_ended_is_not_sent() -> None:
    source = ByEvents()
    listener = source.reader(announcing=True)
    for name in "rst":
        source.publish(name)
    source.revoke("s")
    heard = [listener.hears(0) for _ in range(3)]
    assert [isinstance(each, e.Announcement) and each.view.terms.request_id for each in heard[:2]] == ["r", "t"]
    assert heard[2] is None


def test_a_reader_that_takes_nothing_is_told_of_so_many_leases() -> None:
    source = ByEvents(limit=ANNOUNCEMENTS + 2)
    listener = source.reader(announcing=True)
    for number in range(ANNOUNCEMENTS + 2):
        source.publish(f"r{number}")
    heard = [listener.hears(0) for _ in range(ANNOUNCEMENTS + 1)]
    assert (heard.count(None), heard[-1]) == (1, None)


def test_a_stream_that_is_over_hears_nothing() -> None:
    source = ByEvents()
    reader = source.reader(announcing=True)
    reading = reader.opens()
    reader.goes()
    assert reader.hears(reading) is None
    assert source.source.packing(pk.At(Reading(reader.stream, reading), 1)) is None
    source.publish()
    assert source.state() is LeaseState.PUBLISHED
    assert source.account().open == 0


def test_a_reader_that_knows_the_lease_by_its_announcement_is_not_told_of_it() -> None:
    source = ByEvents()
    source.publish(more=True)
    view = source.lease().view
    for known, told in ((view.known_by, False), ((view.terms.word, 9), True)):
        reader, said = source.reader(ReaderId(f"d{told}", "1", 0, 1)), len(source.said)
        reading = reader.opens(known=known)
        assert source.said[said:] == ([e.Speak(Reading(reader.stream, reading))] if told else [])
        assert isinstance(reader.hears(reading), e.Update) is told
        source.publish(num_tokens=9, more=True)
        assert isinstance(reader.hears(1), e.Update)


def test_a_message_that_cannot_be_taken_is_the_end_of_its_reading() -> None:
    source = ByEvents()
    source.publish()
    reader = source.reader()
    assert reader.refused(reader.opens(refused=SILENT)) is SILENT
    assert reader.hears(1) is None
    assert source.account().open == 0


def test_a_reading_of_which_all_was_packed_is_over_when_it_packs_again() -> None:
    source = ByEvents()
    packing = packing_of(source)
    packing.on(pk.Gathered(packing.at, 0), 0.0)
    source.revoke()
    assert source.on(e.Pack(packing.at.reading, 2, 1, True, None)) == [
        pk.Forget(packing.at),
        e.Speak(packing.at.reading),
    ]
    assert isinstance(source.source.take(packing.at.reading), e.Problem)
    assert source.on(e.Pack(packing.at.reading, 3, 1, True, None)) == []


def test_a_reading_whose_packing_is_not_whole_is_over_with_its_lease() -> None:
    source = ByEvents()
    packing = packing_of(source)
    source.revoke()
    assert pk.Forget(packing.at) in source.said
    assert isinstance(source.source.take(packing.at.reading), e.Problem)
    assert source.source.packing(packing.at) is None


def test_a_reader_that_packs_before_the_publish_is_packed_for_then() -> None:
    source = ByEvents()
    reader = source.reader()
    at = pk.At(Reading(reader.stream, reader.opens()), 1)
    assert source.on(e.Pack(at.reading, 1, 1, True, "wanted")) == []
    source.publish()
    (cut,) = source.all(pk.Cut)
    assert (cut.at, cut.wanted) == (at, "wanted")


def packs(chunks: int, *, last: bool = True) -> Packing:
    at = pk.At(Reading(1, 1), 1)
    packing = Packing(e.Pack(at.reading, at.number, chunks, last, None))
    packing.begin(View(Terms("r", 1, 7, 60.0, 1), Publication({}, 0, b"", more=False), 1))
    return packing


def test_one_chunk_is_gathered_first_and_then_two_at_a_time() -> None:
    packing = packs(4)
    assert packing.on(pk.Want(packing.at, (0, 1, 2, 3)), 0.0) == [], "nothing is cut"
    assert packing.on(pk.WasCut(packing.at), 0.0) == [pk.Gather(packing.at, 0, False)]
    gathers = [each for each in packing.on(pk.Gathered(packing.at, 0), 0.0) if isinstance(each, pk.Gather)]
    assert gathers == [pk.Gather(packing.at, 1, True), pk.Gather(packing.at, 2, True)]
    assert pk.Gather(packing.at, 3, True) in packing.on(pk.Gathered(packing.at, 1), 0.0)
    assert packing.packed_at is None


def test_what_no_reader_of_ours_says_ends_its_packing() -> None:
    for field, value in (("want", 0), ("want", -1), ("want", 4), ("read", 0), ("read", 1), ("vouch", True)):
        packing = packs(4)
        packing.on(pk.WasCut(packing.at), 0.0)
        packing.on(pk.Want(packing.at, (0, 1)), 0.0)
        packing.on(pk.Gathered(packing.at, 0), 0.0)
        said = {"want": (), field: value if value is True else (value,)}
        assert packing.on(pk.Want(packing.at, **said), 0.0) == [
            pk.Forget(packing.at), e.Speak(packing.at.reading)
        ]  # fmt: skip
        told = packing.take()
        assert told is not None and told.problem is not None
        assert (told.chunks, told.problem.code, packing.take()) == ((), "malformed_pack", None)
        assert (told.problem.field, told.problem.value) == (field, str(value))


def test_a_packing_is_vouched_for_when_all_its_chunks_are_read() -> None:
    packing = packs(1)
    packing.on(pk.WasCut(packing.at), 0.0)
    packing.on(pk.Want(packing.at, (0,)), 0.0)
    assert not packing.whole
    packing.on(pk.Gathered(packing.at, 0), 0.0)
    assert packing.whole
    assert packing.take() == pk.Packed(packing.at, (0,), False, None)
    assert packing.on(pk.Want(packing.at, (), (0,), vouch=True), 0.0) == [
        pk.GiveBack(packing.at, 0), e.Speak(packing.at.reading)
    ]  # fmt: skip
    assert [packing.take(), packing.take()] == [pk.Packed(packing.at, (), True, None), None]
    assert packing.on(pk.Idle(packing.at), 2 * IDLE_S) == []


def test_a_reader_that_says_nothing_keeps_no_slot_whether_it_knows_of_it_or_not() -> None:
    packing = packs(2)
    packing.on(pk.WasCut(packing.at), 0.0)
    packing.on(pk.Want(packing.at, (0, 1)), 0.0)
    packing.on(pk.Gathered(packing.at, 0), 0.0)
    packing.take()
    packing.on(pk.Gathered(packing.at, 1), 0.0)
    assert pk.Forget(packing.at) in packing.on(pk.Idle(packing.at), IDLE_S)
    told = packing.take()
    assert told is not None and told.problem is not None
    assert "the reader held 2 slots" in told.problem.message


def test_a_packing_that_cannot_be_cut_says_why() -> None:
    packing = packs(1)
    assert packing.on(pk.WasCut(packing.at, SILENT), 0.0) == [pk.Forget(packing.at), e.Speak(packing.at.reading)]
    assert packing.take() == pk.Packed(packing.at, (), False, SILENT)
    assert packing.end() == []


def test_more_is_to_be_packed_where_it_was_not_the_last() -> None:
    packing = packs(0, last=False)
    packing.on(pk.WasCut(packing.at), 0.0)
    assert not packing.whole
    assert packing.begin(View(Terms("r", 1, 7, 60.0, 1), Publication({}, 0, b"", more=False), 2)) == []


# ---- readings ----

ANNOUNCED = rd.Seen(lease=4, version=2, word=7, num_tokens=2, digest=b"d")
PROMPT = Computed(b"d")


def following(announced: rd.Seen | None = None, *, named: int = 0) -> tuple[Following, list[rd.ReadingEffect]]:
    it = Following(0, "r", named, PROMPT)
    return it, it.on(rd.Begin(announced), 1.0)


def test_a_reader_opens_at_once_what_was_not_announced_and_later_what_was() -> None:
    for announced in (None, replace(ANNOUNCED, digest=b"another"), replace(ANNOUNCED, weights="others")):
        it, said = following(announced, named=4)
        assert (said, it.announced, it.due) == ([rd.Open(1, 4, (0, 0))], False, False)
        assert it.on(rd.Due(), 1.0) == []
    it, said = following(ANNOUNCED)
    assert (said, it.announced, it.seen) == ([rd.OpenLater(1.02)], True, ANNOUNCED)
    assert [it.on(rd.Due(), 1.02), it.on(rd.Due(), 1.02)] == [[rd.Open(1, 0, (7, 2))], []]
    it.on(rd.Gathered(), 1.1)
    assert not it.announced


def test_nothing_is_opened_before_a_reading_begins() -> None:
    assert Following(0, "r", 0, PROMPT).on(rd.Due(), 0.0) == []


def test_a_reading_that_was_never_opened_is_closed_where_it_is_complete() -> None:
    for announced, lease in ((ANNOUNCED, 4), (None, 0)):
        it = Following(0, "r", 0, PROMPT)
        if announced is not None:
            it.on(rd.Begin(announced), 0.0)
        it.on(rd.Read(5), 0.0)
        it.on(rd.Read(2), 0.0)
        assert it.on(rd.Leave(complete=False), 0.0) == []
        assert it.on(rd.Leave(complete=True), 0.0) == [rd.Close(0, lease, True, 7)]
        assert it.on(rd.Due(), 0.0) == []
    it, _ = following(named=4)
    assert it.on(rd.Leave(complete=False), 0.0) == [rd.Close(1, 4, False, 0)]


def test_a_reader_knows_that_its_lease_is_still_to_come_until_it_comes() -> None:
    it, _ = following()
    it.on(rd.Unpublished(1), 0.0)
    assert (it.awaits_publish, it.take()) == (True, False)
    it.on(rd.Update(1, ANNOUNCED), 0.0)
    assert it.awaits_publish
    assert (it.take(), it.awaits_publish, it.seen, it.take()) == (True, False, ANNOUNCED, False)


def test_a_source_is_asked_again_unless_it_has_said_what_is_wanted() -> None:
    other, over = replace(ANNOUNCED, digest=b"another"), Conflict("lease_ended", "it is over")
    for heard, said in (
        (None, [rd.Close(1, 4, False, 5), rd.Open(2, 0, (0, 0))]), (rd.Update(1, ANNOUNCED), []),
        (rd.Update(1, other), [rd.Close(1, 4, False, 5), rd.Open(2, 0, (0, 0))]), (rd.Over(1, SILENT), []),
        (rd.Over(1, over), [rd.Close(1, 4, False, 5), rd.Open(2, 0, (0, 0))]),
    ):  # fmt: skip
        it, _ = following(ANNOUNCED)
        it.on(rd.Due(), 0.0)
        it.on(rd.Read(5), 0.0)
        if heard is not None:
            it.on(heard, 0.0)
        assert it.on(rd.AskAgain(), 0.0) == said
        assert not it.announced
        assert (it.nbytes, it.problem) == ((5, getattr(heard, "why", None)) if not said else (0, None))
        it.check()
    it, _ = following(ANNOUNCED)
    assert it.on(rd.AskAgain(), 0.0) == [rd.Open(1, 0, (0, 0))], "nothing was opened"


def test_a_source_is_asked_for_the_lease_of_a_number() -> None:
    it, _ = following(ANNOUNCED)
    assert it.on(rd.AskFor(6), 0.0) == [rd.Open(1, 6, (0, 0))]
    it.on(rd.Update(1, replace(ANNOUNCED, lease=6)), 0.0)
    assert it.take()
    assert it.on(rd.AskFor(7), 0.0) == [rd.Close(1, 6, False, 0), rd.Open(2, 7, (0, 0))]
    assert (it.named, it.seen.lease, it.announced, it.take()) == (7, 0, False, False)


def test_a_lease_of_another_prompt_or_of_other_weights_is_not_taken() -> None:
    for seen, code, text in (
        (replace(ANNOUNCED, weights="v2", digest=b""), "other_weights", "by weights 'v2'"),
        (replace(ANNOUNCED, digest=b"another"), "other_prompt", "for another prompt"),
        (replace(ANNOUNCED, digest=b""), "other_prompt", "without a digest"),
    ):
        it, _ = following()
        it.on(rd.Update(1, seen), 0.0)
        with pytest.raises(KvferryError, match=text) as refused:
            it.take()
        assert refused.value.code == code
    it = Following(0, "r", 0, Computed())
    it.on(rd.Begin(), 0.0)
    it.on(rd.Update(1, ANNOUNCED), 0.0)
    assert it.take(), "no digest is asked for"


def test_a_reading_that_is_over_says_why() -> None:
    it, _ = following()
    it.on(rd.Over(1, SILENT), 0.0)
    for look in (it.take, it.check_goes_on):
        with pytest.raises(KvferryError, match="it is silent"):
            look()


# ---- leases ----


def test_what_is_lost_or_refused_is_so_up_to_the_newest_that_was() -> None:
    source = ByEvents()
    source.on(e.Lose((("r", 3), ("r", 2))))
    assert source.source.leases.newest("r") == 3
    reader = source.reader()
    assert "lost" in reader.refused(reader.opens()).message
    assert "lease 2 of request r is over: its last is 3" in reader.refused(reader.opens(lease=2)).message
    for number in (5, 4):
        source.on(e.Refuse("r", number, Conflict("mixed_weights", f"other weights than lease {number}")))
    assert "than lease 5" in reader.refused(reader.opens(lease=4)).message
    assert reader.waits(reader.opens(lease=6))


def test_a_lease_that_was_lost_later_is_the_last_of_its_request() -> None:
    source = ByEvents()
    leases = source.source.leases
    assert leases.state_of("r") is None
    source.publish()
    source.read()
    assert (leases.newest("r"), leases.state_of("r")) == (1, LeaseState.RELEASED)
    source.on(e.Lose((("r", 2),)))
    assert (leases.newest("r"), leases.state_of("r")) == (2, None)


def test_nothing_is_kept_of_ranks_that_finish_once_the_engine_is_gone() -> None:
    source = ByEvents()
    source.finish(lease=2)
    assert source.source.leases.sizes()["early"] == 1
    source = ByEvents()
    source.on(e.Shut("its engine is dead"))
    source.finish(lease=2)
    assert source.source.leases.sizes()["early"] == 0


def test_why_a_lease_is_over_is_told_with_its_number() -> None:
    source = ByEvents()
    source.publish(ttl_s=5.0)
    reader = source.reader()
    source.wait(5.0)
    assert "lease 1 of request r is expired: nobody read it within 5 s" in reader.refused(reader.opens()).message
    source.publish()
    source.read()
    assert reader.refused(reader.opens()).message == "lease 2 of request r is released"
    assert lease_ended("r", "over").message == "the lease of request r is over"
    source.publish()
    source.publish(number=4)
    assert source.ended[-1].reason == "published anew, as lease 4"


def test_a_lease_is_for_readers_for_as_long_as_it_was_published() -> None:
    source = ByEvents()
    source.publish(num_tokens=4, more=True, ttl_s=5.0)
    source.wait(3.0)
    source.publish(num_tokens=8, more=True, ttl_s=5.0)
    source.wait(4.0)
    assert (source.state(), source.account().expires_in_s) == (LeaseState.PUBLISHING, 1.0)
    source.publish(num_tokens=9, more=True, ttl_s=5.0, fence=1)
    assert source.account().expires_in_s == 5.0
    source.on(e.FenceOver("r", 1))
    reader = source.reader()
    reading = reader.opens()
    source.wait(60.0)
    assert source.state() is LeaseState.PUBLISHING, "it is read"
    reader.closes(reading, complete=False)
    assert source.state() is LeaseState.EXPIRED, "its time passed while it was read"


def test_the_trace_of_a_lease_is_that_of_its_last_reader() -> None:
    source = ByEvents()
    source.publish(readers=3)
    for at, who in enumerate((READER, ANOTHER)):
        source.reader(who).opens(trace=(f"t{at}", ""))
        assert source.account().trace == (f"t{at}", "")
    source.reader(ReaderId("third", "1", 0, 1)).finishes(trace=("t2", ""))
    assert source.account().trace == ("t2", "")


def test_readers_of_a_request_that_is_withdrawn_are_told_and_the_others_wait() -> None:
    source = ByEvents()
    reader = source.reader()
    one, other = reader.opens("r", lease=3), reader.opens("s")
    assert not source.revoke("r", "aborted")
    assert "lease 3 of request r is aborted" in reader.refused(one).message
    assert reader.waits(other)


def test_bytes_that_were_read_in_vain_are_counted() -> None:
    source, reader, reading = revoked_while_read()
    reader.closes(reading, complete=False, nbytes=5)
    assert source.all(e.Served) == [e.Served("decode", 5)]


def test_how_each_reader_stands_is_told() -> None:
    source = ByEvents()
    source.publish(readers=4)
    reader = source.reader()
    reader.opens(attempt=2)
    source.finish(ANOTHER, attempt=3)
    assert [(each.state, each.attempt, each.nbytes) for each in source.account().readers] == [
        ("reading", 2, 0), ("read", 3, 0)
    ]  # fmt: skip
    account = source.account()
    assert (account.open, account.closed, account.expected, account.expires_in_s) == (1, 1, 4, None)


def test_when_a_reader_opened_a_lease_had_all_of_it_packed_and_closed_it_is_told() -> None:
    source = ByEvents()
    packing = packing_of(source)
    packing.on(pk.Gathered(packing.at, 0), 3.0)
    source.wait(5.0)
    source.on(e.Leave(packing.at.reading, complete=True))
    assert [each.times for each in source.account().readers] == [Times(opened=0.0, packed=3.0, closed=5.0)]
    source.publish("s")
    source.wait(2.0)
    source.finish(request_id="s")
    assert [each.times for each in source.account("s").readers] == [Times(closed=2.0)]


def test_a_rank_reads_in_the_highest_attempt_that_it_has_said() -> None:
    for opened, closed in ((2, 0), (2, 3)):
        source = ByEvents()
        source.publish(readers=2)
        reader = source.reader()
        reader.closes(reader.opens(attempt=opened), attempt=closed)
        assert [(each.state, each.attempt) for each in source.account().readers] == [("read", max(opened, closed))]


def test_an_engine_is_in_the_attempt_that_was_counted_last() -> None:
    source = ByEvents()
    source.publish()
    engine, tables = (source.reader(ReaderId("wide", "1", rank, 2)) for rank in (0, 1))
    readings = engine.opens(attempt=1), tables.opens(attempt=1, by="one")
    engine.closes(readings[0], attempt=1)
    tables.closes(readings[1], attempt=1, by="one")
    assert [(each.who.rank, each.state) for each in source.account().readers] == [(1, "read")]


def test_a_rank_that_finishes_again_has_read_what_it_had_read() -> None:
    source = ByEvents()
    source.publish(readers=2)
    reader = source.reader()
    reader.closes(reader.opens(attempt=2), attempt=2, nbytes=7)
    source.finish(attempt=1)
    assert [(each.state, each.attempt, each.nbytes) for each in source.account().readers] == [("read", 2, 7)]


def test_a_rank_that_goes_before_it_has_read_has_not_finished() -> None:
    source = ByEvents()
    waiting = source.reader()
    waiting.closes(waiting.opens(lease=1), complete=False, lease=1)
    waiting.closes(waiting.opens())
    source.publish()
    assert source.state() is LeaseState.PUBLISHED
    reader, other = source.reader(), source.reader()
    reading = reader.opens()
    other.refused(other.opens())
    other.closes(1, complete=False, lease=1)
    reader.closes(reading, complete=False)
    assert source.state() is LeaseState.PUBLISHED


def test_a_view_says_how_long_its_fence_took() -> None:
    source = ByEvents()
    source.wait(5.0)
    source.publish(fence=1)
    reader = source.reader()
    reader.opens()
    assert isinstance(reader.hears(), e.Unpublished)
    source.wait(2.0)
    source.on(e.FenceOver("r", 1))
    told = reader.hears()
    assert isinstance(told, e.Update)
    assert (told.view.fenced_s, source.account().shown_s) == (2.0, 2.0)


def test_claims_of_ever_higher_blocks_grow_their_room_seldom() -> None:
    claims, rooms = Claims(), list[int]()
    for block in range(1000):
        claims.take(1, {"full": np.array([block])}, "r")
        claims.check()
        (room,) = map(len, claims._holders.values())
        rooms += [room] * (room not in rooms)
    assert rooms == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def test_calls_are_left_that_somebody_has_left() -> None:
    book = Book()
    sends(book, be.Receive("call", "r"))
    assert book.left("r") == []
    book.on(be.Leave("call"))
    assert (book.left("r"), book.left("s")) == (["call"], [])


def test_a_lease_that_the_engine_numbers_is_lost_by_that_number() -> None:
    book = Book()
    book.on(be.SessionLost(SILENT))
    book.on(be.Publish("call", "lease", "r", number=9))
    assert list(book.start.lost) == [("r", 9)]


def test_of_those_that_load_the_nearest_stays_when_an_upgrade_is_wished_for() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), ke.Loaded(2, 5.0), ke.Upgrade()):
        keeper.on(event, 1.0)
    assert sorted(keeper.daemons) == [1, 2, 3]
    assert ke.Signal(3, ke.KILL) in keeper.on(ke.Upgrade(), 2.0)
    assert keeper.daemons[2].wanted


def test_a_place_that_was_met_otherwise_is_not_asked_again_where_its_handshake_fails() -> None:
    wanted, place = Wanted(), ("p", "a")
    wanted.take_over([place])
    assert wanted.next(0.0) == [place]
    wanted.met(place, 1)
    assert not wanted.failed(place, SILENT, 0.0)
    wanted.check()
    assert wanted.resting.next() is None


def test_a_reader_that_names_no_prompt_goes_by_any_announcement() -> None:
    it = Following(0, "r", 0, Computed())
    it.on(rd.Begin(ANNOUNCED), 0.0)
    assert (it.announced, it.seen) == (True, ANNOUNCED)


def test_a_renewal_whose_own_handshake_fails_is_refused_and_its_peer_forgotten() -> None:
    peers = Peers("own", 10.0)
    met(peers, "h")
    assert peers.on(pe.Renew(2, 1), 0.0) == [pe.Shake(2, "p", "h")]
    assert peers.on(pe.Unmet(2, SILENT), 0.0) == [pe.Shaken(2, SILENT), pe.Unload(1), pe.Refused(2, SILENT)]
