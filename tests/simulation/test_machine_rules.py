"""Rules of single machines that no world of tests/simulation comes to: a world has few peers and few names."""

from __future__ import annotations

import pytest
from by_events import ByEvents

from kvferry.errors import Full, PeerFailed
from kvferry.protocol import events as e
from kvferry.protocol import keeper_events as ke
from kvferry.protocol import peers_events as pe
from kvferry.protocol.keeper import Keeper
from kvferry.protocol.kept import Alarms
from kvferry.protocol.peers import NAMES, Peers
from kvferry.protocol.peers_homes import Homes
from kvferry.protocol.peers_wanted import Wanted
from kvferry.protocol.values import ReaderId, Reading
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
    assert wanted.next(0.0) == ["a", "b"]
    wanted.want(("b",))
    wanted.found("a", 1)
    assert not wanted.failed("b", SILENT, 0.0) or wanted.next(0.0) == []
    wanted.check()
    assert wanted.met == set()


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
