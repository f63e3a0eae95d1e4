"""Rules of single machines that no world of tests/simulation comes to: a world has few peers and few names."""

from __future__ import annotations

import pytest
from by_events import ANOTHER, READER, ByEvents

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
from kvferry.protocol.keeper import Keeper
from kvferry.protocol.kept import Alarms
from kvferry.protocol.leader import TOLD_AGAIN, Leader
from kvferry.protocol.leases import ANNOUNCED_TO
from kvferry.protocol.packing import IDLE_S, Packing
from kvferry.protocol.peers import IDLE_S as IDLE_PEER_S
from kvferry.protocol.peers import NAMES, Peers
from kvferry.protocol.peers_homes import Homes
from kvferry.protocol.peers_wanted import AT_ONCE, BACK_S, GONE_S, HAD, Wanted
from kvferry.protocol.reading import Computed, Following
from kvferry.protocol.roster import Rank, Rosters
from kvferry.protocol.session import Memory, Session, State
from kvferry.protocol.sessions import Sessions
from kvferry.protocol.states import LeaseState
from kvferry.protocol.values import Publication, ReaderId, Reading, Terms, View
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


def test_an_address_that_fails_is_tried_again_later_each_time_and_within_a_minute() -> None:
    wanted, now = Wanted(), 0.0
    wanted.want(("a",))
    assert wanted.next(now) == [("", "a")]
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        wanted.failed(("", "a"), PeerFailed("peer_unreachable", "a test"), now)
        assert not wanted.next(now + pause - 0.5)
        now += pause
        assert wanted.next(now) == [("", "a")]


def test_an_engine_that_was_met_is_tried_again_soon_and_not_for_ever() -> None:
    wanted, now, place = Wanted(), 0.0, ("p", "a")
    wanted.met(place, 1)
    wanted.drop(1, now)
    assert (wanted.next(now), wanted.resting.next()) == ([], BACK_S[0])
    while (timer := wanted.resting.next()) is not None:
        now = timer
        assert wanted.next(now) == [place]
        wanted.failed(place, SILENT, now)
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


def test_an_engine_whose_daemons_say_that_it_is_over_is_that_of_their_home() -> None:
    homes = Homes()
    homes.over("p", HOME)
    homes.bind("p", HOME, ordered=True)
    homes.over("p", pe.Home("2", ("elsewhere",)))
    assert "p" in homes
    homes.over("p", HOME)
    assert "p" not in homes


def test_an_address_that_is_not_wanted_any_more_is_not_met() -> None:
    wanted = Wanted()
    wanted.want(("a", "b"))
    assert wanted.next(0.0) == [("", "a"), ("", "b")]
    wanted.want(("b",))
    wanted.found(("", "a"), 1)
    assert not wanted.failed(("", "b"), SILENT, 0.0) or wanted.next(0.0) == []
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
    for at in range(10, 0, -1):
        for key in range(100):
            alarms.set(key, float(at))
            assert alarms.entries <= 2 * len(alarms) + Alarms.SLACK
    assert alarms.due(1.0) == list(range(100))
    assert alarms.next() is None


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


def test_a_reader_of_a_publish_that_waits_for_its_fence_is_told_nothing() -> None:
    source = ByEvents()
    source.publish(fence=1)
    reader = source.reader()
    assert reader.hears(reader.opens()) is None


def test_an_upgrade_is_loaded_beside_a_daemon_that_does_not_serve_yet() -> None:
    keeper = Keeper()
    for event in (ke.Begin(), ke.Loaded(1, 5.0), ke.Serves(1), ke.NotStarted(2, "no memory")):
        keeper.on(event, 1.0)
    assert [each for each in keeper.on(ke.Died(1, 9, "killed"), 30.0) if isinstance(each, ke.Start)] == [ke.Start(3)]
    assert ke.Start(4) in keeper.on(ke.Upgrade(), 31.0)


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
    for withdraw in (False, True):
        book = Book()
        (first,) = book.on(be.Publish("first", "lease", "r", more=True))
        assert isinstance(first, be.Send)
        book.on(be.Answered(first.id))
        (second,) = book.on(be.Publish("second", "lease", "r", withdraw=withdraw))
        assert isinstance(second, be.Send)
        (end,) = book.on(be.Answered(second.id, Full("full", "for a while")))
        assert isinstance(end, be.SendAbort if withdraw else be.Refused)


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


def test_an_engine_that_numbers_its_leases_is_taken_at_its_word() -> None:
    book = Book()
    (sent,) = book.on(be.Publish("call", "lease", "r", number=7))
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


def test_ranks_of_an_engine_number_their_leases_and_attempts() -> None:
    for said in (be.Publish("call", "lease", "r"), be.Receive("call", "r")):
        with pytest.raises(KvferryError) as refused:
            Book(2).on(said)
        assert refused.value.code == "number_required"


def test_a_reading_that_has_ended_does_not_finish_the_lease_that_follows() -> None:
    source = ByEvents()
    source.publish()
    reader = source.reader()
    reading = reader.opens()
    source.revoke()
    reader.refused(reading)
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
        source.publish(more=more)
        assert [isinstance(each.hears(0), e.Announcement) for each in listening] == [told] * readers


def test_a_lease_that_has_ended_says_when() -> None:
    source = ByEvents()
    source.publish()
    assert source.account().ended_at is None
    source.wait(5.0)
    source.revoke()
    assert source.account().ended_at == 5.0


def test_a_rank_that_finishes_ends_no_reading_of_its_own() -> None:
    source = ByEvents()
    source.publish()
    source.reader().opens()
    source.finish()
    assert source.state() is LeaseState.PUBLISHED


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


def test_what_was_never_opened_is_not_closed() -> None:
    following = Following(0, "r", 1, Computed())
    assert following.on(rd.Leave(complete=False), 0.0) == []
    assert len(following.on(rd.Leave(complete=True), 0.0)) == 1


def test_why_a_rank_is_missing_is_said_of_its_engine_and_another_epoch() -> None:
    rosters = Rosters()
    rosters.join(1, Rank("p", "1", 1, 2), ro.Member("a", "i1"))
    assert "in epoch 1" in rosters.why_missing("p", "2", 1)
    assert rosters.why_missing("q", "2", 1) == rosters.why_missing("p", "2", 0) == ""
    assert "was there" in rosters.why_missing("p", "1", 1)


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
