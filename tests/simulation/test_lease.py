"""The rules of leases, by events: refusals, bounds, counts, fences, the end of a registration.
source_world.py judges the rest."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from by_events import LONG_S, READER, ByEvents, Speaker, rank_of

from kvferry.errors import Conflict, KvferryError
from kvferry.protocol import events as e
from kvferry.protocol import readers as readers_module
from kvferry.protocol import source as source_module
from kvferry.protocol.lease import MAX_FENCED, REMEMBERED
from kvferry.protocol.leases import TOMBSTONES
from kvferry.protocol.readers import MAX_READERS
from kvferry.protocol.states import LeaseState
from kvferry.protocol.values import ReaderId, Reading
from kvferry.tables import BlockTable


@pytest.fixture
def source() -> ByEvents:
    return ByEvents()


def refused(source: ByEvents, **said: object) -> str:
    """The code with which a publish is refused. Nothing has changed."""
    before, words = source.account(), set(source.words)
    with pytest.raises(KvferryError) as caught:
        source.publish(**said)  # type: ignore[arg-type]
    assert (source.account(), source.words) == (before, words)
    return caught.value.code


# release


def test_a_lease_is_over_exactly_when_all_have_read_whatever_its_readers_do() -> None:
    """The counts are those that the readers' records give, after every step."""
    rng = random.Random(1)
    ranks = [rank_of(rank, world, f"d{world}") for world in (1, 2, 3) for rank in range(world)]
    for number in range(60):
        source = ByEvents()
        source.publish(readers=rng.choice([1, 2, 50]))
        streams, opened = {who: source.reader(who) for who in ranks}, dict[ReaderId, tuple[int, str]]()
        while not source.ended and rng.random() > 0.02:
            who, step = rng.choice(ranks), rng.choice(["open", "leave", "close", "finished"])
            said: dict[str, Any] = {"attempt": rng.choice([1, 1, 2, 3]), "by": rng.choice(["", "", "one", "two"])}
            if step == "open" and who not in opened:
                opened[who] = streams[who].opens(**said), said["by"]
            elif step == "finished" and who not in opened:
                streams[who].finishes(**said)
            elif step in ("leave", "close") and who in opened:
                number_of_reading, by = opened.pop(who)
                streams[who].closes(number_of_reading, complete=step == "close", by=by)
            account = source.account()
            read = Counter((it.who.engine_id, it.who.world_size) for it in account.readers if it.state == "read")
            whole = sum(count == world for (_, world), count in read.items())
            assert source.ended or account.open == len(opened)
            assert account.state.ended == (whole >= account.expected and not opened), (number, step)


def test_a_reader_opens_once_at_a_time(source: ByEvents) -> None:
    source.publish()
    reader, other = source.reader(), source.reader()
    reader.opens()
    other.opens()
    assert other.refused().code == "already_reading"
    assert source.account().open == 1


def test_a_reading_has_a_number_of_its_own(source: ByEvents) -> None:
    source.publish()
    reader = source.reader()
    reading = reader.opens()
    with pytest.raises(KvferryError) as refusal:
        source.on(e.Ask(Reading(reader.stream, reading), "r"))
    assert refusal.value.code == "malformed_read"
    assert reader.sees(reading)[0] == 1, "the one that was open is not read any more"


def test_readings_of_a_stream_are_bounded(source: ByEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "READINGS", 2)
    source = ByEvents(limit=1)
    reader = source.reader()
    reading = reader.opens("a"), reader.opens("b")
    with pytest.raises(KvferryError) as refusal:
        reader.opens("c")
    assert refusal.value.code == "malformed_read"
    reader.closes(reading[0])
    reader.opens("c")


def test_an_account_says_how_long_a_lease_is_there_and_will_be(source: ByEvents) -> None:
    source.wait(1)
    source.publish()
    source.wait(10)
    assert (source.account().age_s, source.account().expires_in_s) == (10, LONG_S - 10)
    source.reader().opens()
    assert source.account().expires_in_s is None
    source.wait(5)
    source.revoke()
    assert (source.account().age_s, source.account().expires_in_s) == (15, None)


def test_bytes_are_counted_by_what_readers_say(source: ByEvents) -> None:
    source.publish(readers=2)
    for complete, nbytes in ((False, 5), (True, 7)):
        reader = source.reader()
        reader.closes(reader.opens(), complete=complete, nbytes=nbytes)
    source.revoke()
    assert [(each.engine_id, each.nbytes) for each in source.all(e.Served)] == [("decode", 5), ("decode", 7)]
    assert (source.account().nbytes, source.account().readers[0].nbytes) == (12, 7)


def test_ranks_of_two_epochs_do_not_make_one_reader(source: ByEvents) -> None:
    source.publish()
    source.read(rank_of(0, 2))
    source.read(rank_of(1, 2, epoch="2"))
    assert source.state() is LeaseState.PUBLISHED


def test_a_rank_may_close_complete_what_it_still_waits_for(source: ByEvents) -> None:
    """It has the lease from an announcement of before its stream broke, say."""
    reader = source.reader()
    number = reader.opens(lease=1)
    reader.closes(number, lease=1)
    source.publish()
    assert source.state() is LeaseState.RELEASED


def test_a_late_close_of_a_lease_that_was_withdrawn_does_not_count_for_the_next(source: ByEvents) -> None:
    source.publish()
    source.revoke()
    source.finish()
    source.publish()
    assert source.state() is LeaseState.PUBLISHED


def test_closing_again_changes_nothing(source: ByEvents) -> None:
    source.publish(readers=2)
    reader = source.reader()
    number = reader.opens()
    for _ in range(2):
        reader.closes(number)
        assert (source.account().closed, source.state()) == (1, LeaseState.PUBLISHED)


def test_who_has_not_opened_a_lease_does_not_close_it_for_who_has(source: ByEvents) -> None:
    source.publish()
    reader, other = source.reader(), source.reader()
    number = reader.opens()
    other.closes(number)
    other.finishes()
    assert (source.account().open, source.state()) == (1, LeaseState.PUBLISHED)
    reader.closes(number)
    assert source.state() is LeaseState.RELEASED


def test_a_reader_of_an_earlier_lease_is_told_the_newest(source: ByEvents) -> None:
    reader = source.reader()
    reader.opens(lease=3)
    source.publish(number=4)
    reader.opens(lease=3)
    for number in (1, 2):
        why = reader.refused(number)
        assert why.code == "lease_ended" and "its last is 4" in why.message


def test_a_rank_closes_the_lease_that_it_means(source: ByEvents) -> None:
    source.publish(number=4)
    source.finish(lease=3)
    assert source.state() is LeaseState.PUBLISHED
    source.finish(lease=5)
    source.finish(lease=4)
    assert source.state() is LeaseState.RELEASED
    source.publish(number=5)
    assert source.state() is LeaseState.RELEASED


# attempts


def test_a_rank_has_not_finished_an_attempt_before_the_one_that_it_gave_up(source: ByEvents) -> None:
    newer, older = source.reader(), source.reader()
    newer.opens(attempt=2)
    source.publish()
    older.finishes(attempt=1)
    newer.goes()
    assert source.state() is LeaseState.PUBLISHED


# progressive


def test_published_tokens_are_not_taken_back(source: ByEvents) -> None:
    source.publish(num_tokens=8, more=True)
    assert refused(source, num_tokens=7, more=True) == "published_less"


def test_one_lease_has_one_digest(source: ByEvents) -> None:
    source.publish(num_tokens=8, more=True, digest=b"one")
    assert refused(source, num_tokens=9, digest=b"another") == "published_other_prompt"


@pytest.mark.parametrize(
    "later",
    [BlockTable.of([4, 8, 7]), BlockTable.of([4]), BlockTable.of([7, 9], 4), BlockTable.of([]), None],
    ids=["other blocks", "fewer", "of a window that has moved on", "none", "no table"],
)
def test_what_was_published_stays_where_it_is(source: ByEvents, later: BlockTable | None) -> None:
    """A reader that follows the lease may be reading it, and is told that it has held."""
    source.publish(num_tokens=8, more=True)
    tables = {} if later is None else {"full": later}
    assert refused(source, num_tokens=8, more=True, tables=tables) == "published_blocks_moved"


def test_a_window_may_begin_with_the_first_publish_that_has_blocks(source: ByEvents) -> None:
    source.publish(num_tokens=0, more=True, tables={"full": BlockTable.of([])})
    source.publish(num_tokens=8, more=True, tables={"full": BlockTable.of([7], 4)})
    assert source.lease().version == 2


def test_the_same_publish_again_changes_nothing(source: ByEvents) -> None:
    source.publish()
    source.publish()
    assert source.lease().version == 1
    for different in ({"num_tokens": 7}, {"metadata": b"x"}, {"more": True}, {"tables": {"full": BlockTable.of([4])}}):
        assert refused(source, **different) == "already_published"


# fences


def test_publishes_are_seen_in_their_order(source: ByEvents) -> None:
    source.publish(num_tokens=4, more=True, fence=1)
    source.publish(num_tokens=6, more=True, fence=2)
    source.publish(num_tokens=8)
    source.on(e.FenceOver("r", 2))
    assert (source.lease().version, source.lease().more) == (0, True)
    source.on(e.FenceOver("r", 1))
    assert (source.lease().version, source.account().num_tokens) == (3, 8)


def test_a_fence_that_is_never_reached_ends_the_lease(source: ByEvents) -> None:
    source.publish(num_tokens=4, more=True)
    source.publish(num_tokens=8, fence=1)
    reader = source.reader()
    reader.opens()
    assert reader.sees() == (1, 4, True), "what came before is read"
    source.on(e.FenceOver("r", 1, Conflict("fence_timeout", "the GPU is slow")))
    reader.opens()
    assert [reader.refused(each).code for each in (1, 2)] == 2 * ["fence_timeout"]
    (ended,) = source.ended
    assert (ended.state, ended.problem and ended.problem.code) == (LeaseState.REVOKED, "fence_timeout")
    assert not source.words


def test_what_waits_for_a_fence_does_not_expire(source: ByEvents) -> None:
    source.publish(ttl_s=5, fence=1)
    source.wait(60)
    assert source.state() is LeaseState.PUBLISHING
    source.on(e.FenceOver("r", 1))
    source.wait(4)
    assert source.state() is LeaseState.PUBLISHED
    source.wait(1)
    assert source.state() is LeaseState.EXPIRED


@pytest.mark.parametrize("event", [e.Revoke("r", "aborted"), e.Shut("the engine is gone", keep_whole=True)])
def test_a_lease_that_ends_waits_for_no_fence(source: ByEvents, event: e.SourceEvent) -> None:
    """Later writes of its engine's stream are not published."""
    source.publish(fence=1)
    source.on(event)
    assert source.state() is LeaseState.REVOKED and [each.fence for each in source.all(e.CancelFence)] == [1]
    source.on(e.FenceOver("r", 1))
    assert source.state() is LeaseState.REVOKED


def test_publishes_that_wait_are_bounded(source: ByEvents) -> None:
    for fence in range(MAX_FENCED):
        source.publish(num_tokens=1, more=True, fence=fence)
    assert refused(source, num_tokens=1, more=True) == "full"


# revocation, waiting


def test_a_lease_that_nobody_else_reads_is_given_up_by_one_that_was_to_read_it(source: ByEvents) -> None:
    source.publish()
    source.reader().opens()
    source.on(e.GiveUp("r", "aborted", replace(READER, rank=0)))
    assert source.state() is LeaseState.REVOKED


def test_a_publish_that_another_reader_waits_for_is_not_given_up(source: ByEvents) -> None:
    reader = source.reader()
    reader.opens()
    source.on(e.GiveUp("r", "aborted", replace(READER, key=b"another")))
    source.publish()
    assert reader.sees()


def test_ranks_of_two_keys_do_not_make_one_reader(source: ByEvents) -> None:
    source.publish()
    first, second = (replace(rank_of(rank, 2), key=b"ours") for rank in range(2))
    source.read(first)
    source.read(replace(second, key=b"a stranger's"))
    assert source.state() is LeaseState.PUBLISHED
    source.read(second)
    assert source.state() is LeaseState.RELEASED


def test_readers_that_gave_up_take_no_place(source: ByEvents) -> None:
    source.publish()
    for number in range(MAX_READERS + 1):
        who = rank_of(0, 1, f"stranger-{number}")
        source.lease().readers.open(who, Reading(1, number), 0, now=0.0)
        source.lease().readers.close(who, e.Leave(Reading(1, number)), 0.0)
    assert max(source.lease().sizes().values()) <= MAX_READERS
    source.read()
    assert source.state() is LeaseState.RELEASED


def test_a_lease_remembers_so_many_readers(source: ByEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of many ranks has not read with all of them."""
    monkeypatch.setattr(readers_module, "MAX_READERS", 8)
    source.publish()
    for rank in range(8):
        source.finish(rank_of(rank, 9, "wide"))
    source.finish(READER)
    reader = source.reader()
    reader.opens()
    why = reader.refused()
    assert (why.code, why.value) == ("full", "8")
    assert source.state() is LeaseState.PUBLISHED
    known = source.reader(rank_of(0, 9, "wide"))
    assert isinstance(known.hears(known.opens()), e.Update)


def test_a_lease_that_has_ended_names_a_few_of_its_readers(source: ByEvents) -> None:
    many = 4 * REMEMBERED
    source.publish(readers=2)
    for rank in range(many):
        source.finish(rank_of(rank, many, "wide"))
    assert len(source.account().readers) == many
    source.revoke()
    (ended,) = source.ended
    assert (len(ended.readers), ended.closed) == (REMEMBERED, many)
    assert all(it is ended for it in source.source.leases.ended()), "and nothing else is remembered of it"


def test_of_leases_that_are_lost_so_many_are_remembered_however_often_they_are_told(source: ByEvents) -> None:
    for time in range(3):
        source.on(e.Lose(tuple((f"{time}-{number}", 1) for number in range(TOMBSTONES))))
    assert source.source.sizes()["lost"] == TOMBSTONES
    reader = source.reader()
    reader.opens("2-0")
    assert "lost" in reader.refused().message


def test_of_leases_that_have_ended_so_many_are_remembered(source: ByEvents) -> None:
    """A reader of an older one waits, as if it were still to be published."""
    for number in range(TOMBSTONES + 1):
        source.publish(f"r{number}")
        source.revoke(f"r{number}", "aborted")
    assert source.source.sizes()["ended"] == TOMBSTONES
    reader = source.reader()
    reader.opens("r1")
    assert "aborted" in reader.refused().message
    reader.opens("r0")
    assert reader.waits(2)
    source.publish("r0")
    assert reader.sees(2)


def test_what_is_lost_is_refused_however_few_leases_there_may_be(source: ByEvents) -> None:
    """To those of the session before come all that could not be published since."""
    names = [f"lost-{number}" for number in range(2 * source.source.leases.limit)]
    source.on(e.Lose(tuple((name, 7) for name in names)))
    reader = source.reader()
    for name in names:
        assert "lost" in reader.refused(reader.opens(name)).message
        assert "its last is 7" in reader.refused(reader.opens(name, lease=6)).message
    number = reader.opens(names[0], lease=8)
    assert reader.waits(number), "one that is published later is not lost"
    source.publish(names[0])
    assert reader.sees(number)


def test_a_reader_that_waits_for_what_turns_out_to_be_lost_is_told(source: ByEvents) -> None:
    reader = source.reader()
    reader.opens("r", lease=7)
    assert reader.waits()
    source.on(e.Lose((("r", 7),)))
    assert "lost" in reader.refused().message


def test_a_reader_that_waits_is_told_when_the_publish_is_refused(source: ByEvents) -> None:
    reader, why = source.reader(), Conflict("mixed_weights", "other weights")
    reader.opens(lease=1)
    source.on(e.Refuse("r", 1, why))
    reader.opens()
    reader.opens(lease=2)
    assert [reader.refused(each).code for each in (1, 2)] == 2 * ["mixed_weights"]
    assert reader.waits(3)
    source.publish(number=2)
    source.on(e.Refuse("r", 2, why))
    assert reader.sees(3), "a lease that is there holds"


def test_a_reader_that_waits_is_told_of_the_refusal_though_an_earlier_lease_is_there(source: ByEvents) -> None:
    reader, why = source.reader(), Conflict("mixed_weights", "other weights")
    source.publish(number=4)
    reader.opens(lease=5)
    for number in (5, 2):
        source.on(e.Refuse("r", number, why))
    assert reader.refused(reader.opens(lease=5)).code == reader.refused(1).code == "mixed_weights"
    assert reader.refused(reader.opens(lease=3)).code == "lease_ended"
    assert reader.sees(reader.opens())
    source.publish(number=6)
    assert reader.refused(reader.opens(lease=5)).code == "lease_ended"


def test_one_address_does_not_take_all_the_waits(source: ByEvents) -> None:
    stranger = source.reader(replace(READER, host="10.0.0.9"))
    most = source.source.leases.limit // 2
    waiting = [stranger.opens(f"never-{number}") for number in range(most)]
    why = stranger.refused(stranger.opens("one more"))
    assert (why.code, why.value) == ("full", "10.0.0.9")
    ours = source.reader(replace(READER, host="10.0.0.7"))
    ours.opens()
    assert ours.waits()
    for each in waiting:
        stranger.closes(each, complete=False)
    assert stranger.waits(stranger.opens("one more"))


def test_leases_and_waiting_readers_are_bounded(source: ByEvents) -> None:
    limit = source.source.leases.limit
    for number in range(limit):
        source.publish(f"r{number}")
    with pytest.raises(KvferryError) as caught:
        source.publish("one more")
    assert caught.value.code == "full"
    reader = source.reader()
    for number in range(limit):
        assert reader.waits(reader.opens(f"never-{number}"))
    assert reader.refused(reader.opens("one more")).code == "full"


def _one_waits(source: ByEvents) -> tuple[Speaker, int]:
    source.publish("whole")
    source.publish("partly", more=True)
    reader = source.reader()
    return reader, reader.opens("awaited")


def test_the_end_of_a_registration_ends_everything(source: ByEvents) -> None:
    reader, waiting = _one_waits(source)
    source.on(e.Shut("started anew"))
    assert [(it.request_id, it.state) for it in source.ended] == [
        ("whole", LeaseState.REVOKED), ("partly", LeaseState.REVOKED)
    ]  # fmt: skip
    for number in (waiting, reader.opens("awaited"), reader.opens("later")):
        assert "started anew" in reader.refused(number).message
    with pytest.raises(KvferryError) as caught:
        source.publish("later")
    assert caught.value.code == "session_closed"


def test_what_a_dead_engine_published_whole_stays_and_the_rest_ends(source: ByEvents) -> None:
    reader, waiting = _one_waits(source)
    source.on(e.Shut("the engine is gone", keep_whole=True))
    assert (source.state("whole"), source.state("partly")) == (LeaseState.PUBLISHED, LeaseState.REVOKED)
    assert reader.sees(reader.opens("whole"))
    for number in (waiting, reader.opens("later")):
        assert "the engine is gone" in reader.refused(number).message


def test_leases_of_other_weights_end(source: ByEvents) -> None:
    for request_id, weights in (("old", ""), ("new", "v2"), ("fenced", "")):
        source.publish(request_id, weights=weights, fence=1 if request_id == "fenced" else None)
    source.on(e.ReplaceWeights("v2", "replaced"))
    assert [each.request_id for each in source.ended] == ["old", "fenced"]


def test_why_a_lease_is_over_does_not_hold_on_to_whoever_was_told(source: ByEvents) -> None:
    """An error that is raised again and again gathers the frames that it is raised through, and what lies in them."""
    source.publish(fence=1)
    source.on(e.FenceOver("r", 1, Conflict("fence_timeout", "the GPU is slow")))
    reader, frames = source.reader(), []
    for _ in range(3):
        with pytest.raises(KvferryError, match="the GPU is slow") as caught:
            raise reader.refused(reader.opens())
        frames.append(len(list(traceback.walk_tb(caught.tb))))
    assert len(set(frames)) == 1


def test_time_to_live_is_found_by_one_timer_however_often_it_begins_anew(source: ByEvents) -> None:
    for number in range(1, 500):
        source.publish(num_tokens=number, more=True, ttl_s=LONG_S)
        source.wait(1)
    assert source.source.sizes()["heap"] == 1
    source.revoke()
    assert source.source.next_timer() is None
