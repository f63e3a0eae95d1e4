"""The rules of leases, on an event loop and without a daemon."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import Conflict, KvferryError
from kvferry.schemas import LeaseState
from kvferry.tables import BlockTable
from kvferryd.leases import lease as lease_module
from kvferryd.leases.lease import MAX_READERS, Lease, Opened, Publication, ReaderId
from kvferryd.leases.leases import TOMBSTONES, Leases

pytestmark = pytest.mark.anyio
TABLES = {"full": BlockTable.of([4, 7])}
READER = ReaderId("decode", "1", 0, 1)
LONG_S, NOW_S = 60.0, 0.001


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def ended() -> list[Lease]:
    return []


@pytest.fixture
async def leases(ended: list[Lease]) -> Leases:
    return Leases("prefill", "1", ended.append, 8)


Publish = Callable[..., Lease]


def number_of(leases: Leases, request_id: str) -> int:
    """Of the lease that is there, or the next."""
    return lease.number if (lease := leases.get(request_id)) is not None else leases._newest(request_id) + 1


@pytest.fixture
def publish(leases: Leases) -> Publish:
    def publish(request_id: str = "r", num_tokens: int = 8, **more: Any) -> Lease:
        told = {"tables": TABLES, "more": False, "metadata": b"", "ttl_s": LONG_S, "readers": 1} | more
        ttl_s, readers, number = told.pop("ttl_s"), told.pop("readers"), told.pop("number", 0)
        said = Publication(num_tokens=num_tokens, **told)
        number = number or number_of(leases, request_id)
        return leases.publish(request_id, number, said, ttl_s=ttl_s, readers=readers)

    return publish


def read(leases: Leases, who: ReaderId, lease: Lease, *, complete: bool = True) -> None:
    with lease.reading(who) as opened:
        opened.close(complete=complete)


def word_stands(leases: Leases, lease: Lease) -> bool:
    """What a reader finds after its last byte."""
    return lease.word.value in leases.words._words


async def lasting(wait: Any) -> Any:
    async with asyncio.timeout(60):
        return await wait


# release


async def test_a_lease_is_released_by_its_reader(leases: Leases, publish: Publish, ended: list[Lease]) -> None:
    lease = publish()
    assert word_stands(leases, lease)
    read(leases, READER, lease)
    assert lease.state is LeaseState.RELEASED
    assert ended == [lease]
    assert len(leases) == 0


async def test_a_lease_ends_though_a_peer_has_written_its_word(
    leases: Leases, publish: Publish, ended: list[Lease]
) -> None:
    """A peer may write where it reads."""
    lease = publish()
    leases.words._words[:] = 1
    leases.revoke_all("a test")
    assert ended == [lease] and len(leases.words._free) == leases.limit
    assert not leases.words._words[(lease.word.address - leases.words._words.ctypes.data) // 8]


async def test_all_ranks_of_a_reader_must_have_read(leases: Leases, publish: Publish) -> None:
    lease = publish()
    for rank in range(3):
        assert lease.state is LeaseState.PUBLISHED
        read(leases, ReaderId("decode", "1", rank, 3), lease)
    assert lease.state is LeaseState.RELEASED


async def test_ranks_of_two_epochs_do_not_make_one_reader(leases: Leases, publish: Publish) -> None:
    lease = publish()
    read(leases, ReaderId("decode", "1", 0, 2), lease)
    read(leases, ReaderId("decode", "2", 1, 2), lease)
    assert lease.state is LeaseState.PUBLISHED


async def test_a_lease_is_over_exactly_when_all_have_read_whatever_its_readers_do(leases: Leases) -> None:
    """Its counts are those that its readers' records give, after every step."""
    rng = random.Random(1)
    for number in range(60):
        said = Publication(TABLES, 8, b"", more=False)
        lease = leases.publish(f"r{number}", 1, said, ttl_s=LONG_S, readers=rng.choice([1, 2, 50]))
        ranks = [
            ReaderId(f"d{each}", "1", rank, world) for each, world in enumerate((1, 2, 3)) for rank in range(world)
        ]
        opened: dict[ReaderId, tuple[AbstractContextManager[Opened], Opened]] = {}
        while not lease.state.ended and rng.random() > 0.02:
            who, step = rng.choice(ranks), rng.choice(["open", "packed", "leave", "close", "finished"])
            if step == "open" and who not in opened:
                reading = lease.reading(who, rng.choice([1, 1, 2, 3]))
                opened[who] = reading, reading.__enter__()
            elif step == "finished" and who not in opened:
                lease.finished(who, attempt=rng.choice([1, 1, 2, 3]))
            elif step == "packed" and who in opened:
                opened[who][1].packed()
            elif step in ("leave", "close") and who in opened:
                reading, reader = opened.pop(who)
                if step == "close":
                    reader.close(complete=True)
                reading.__exit__(None, None, None)
            readers = lease.readers()
            read = Counter((it.engine_id, it.world_size) for it in readers if it.state == "read")
            attempts = {(it.engine_id, it.attempt) for it in readers if it.state == "read"}
            assert len(attempts) == len(read), "an engine has read in one attempt"
            whole = sum(count == world for (_, world), count in read.items())
            assert lease.live_readers == len(opened)
            unread = any(it.state == "reading" for it in readers)
            assert lease.state.ended == (whole >= lease.expected and not unread), step
        leases.revoke(lease.request_id, "the next one")


async def test_ranks_of_two_attempts_do_not_make_one_reader(leases: Leases, publish: Publish) -> None:
    lease = publish()
    first, second = (ReaderId("decode", "1", rank, 2) for rank in range(2))
    with lease.reading(first, 1) as opened:
        opened.close(complete=True)
    with lease.reading(second, 2) as opened:
        opened.close(complete=True)
    assert [(it.rank, it.state) for it in lease.readers()] == [(0, "left"), (1, "read")]
    leases.finished("r", 1, first, attempt=1)  # late
    assert lease.state is LeaseState.PUBLISHED
    leases.finished("r", 1, first, attempt=2)
    assert lease.state is LeaseState.RELEASED


async def test_ranks_count_as_through_when_all_they_want_is_packed(leases: Leases, publish: Publish) -> None:
    lease = publish()
    first, second = (ReaderId("decode", "1", rank, 2) for rank in range(2))
    with lease.reading(first) as opened, lease.reading(second) as other:
        opened.packed()
        assert lease.state is LeaseState.PUBLISHED
        other.packed()
        assert lease.state is LeaseState.RELEASED
        opened.close(complete=True)
    assert lease.record().readers_closed == 2


async def test_what_is_packed_of_a_lease_for_two_engines_keeps_it_for_the_second(
    leases: Leases, publish: Publish
) -> None:
    lease = publish(readers=2)
    with lease.reading(READER) as opened:
        opened.packed()
    assert lease.state is LeaseState.PUBLISHED
    with lease.reading(ReaderId("decode-b", "1", 0, 1)) as opened:
        opened.packed()
    assert lease.state is LeaseState.RELEASED


async def test_a_reader_that_has_gone_is_not_through_by_what_is_packed_later(leases: Leases, publish: Publish) -> None:
    lease = publish()
    with lease.reading(READER) as opened:
        pass
    opened.packed()
    assert lease.state is LeaseState.PUBLISHED


async def test_a_lease_for_two_engines_is_released_by_the_second(leases: Leases, publish: Publish) -> None:
    lease = publish(readers=2)
    read(leases, READER, lease)
    read(leases, READER, lease)  # the same one again counts once
    assert lease.state is LeaseState.PUBLISHED
    read(leases, ReaderId("decode-b", "1", 0, 1), lease)
    assert lease.state is LeaseState.RELEASED


async def test_a_reader_that_gave_up_has_not_read(leases: Leases, publish: Publish) -> None:
    lease = publish()
    read(leases, READER, lease, complete=False)
    assert lease.state is LeaseState.PUBLISHED
    read(leases, READER, lease)
    assert lease.state is LeaseState.RELEASED


async def test_a_rank_with_nothing_to_read_here_counts_without_opening(leases: Leases, publish: Publish) -> None:
    lease = publish()
    leases.finished("r", 1, READER)
    assert lease.state is LeaseState.RELEASED


async def test_a_rank_with_nothing_to_read_may_close_before_the_publish(leases: Leases, publish: Publish) -> None:
    leases.finished("r", 1, READER)
    assert publish().state is LeaseState.RELEASED


async def test_a_rank_that_closes_early_counts_for_a_name_that_comes_again(leases: Leases, publish: Publish) -> None:
    publish()
    leases.finished("r", 1, READER)
    leases.finished("r", 2, READER)
    assert publish().state is LeaseState.RELEASED


async def test_a_late_close_of_a_lease_that_was_withdrawn_does_not_count_for_the_next(
    leases: Leases, publish: Publish
) -> None:
    publish()
    leases.revoke("r", "by its engine")
    leases.finished("r", 1, READER)
    assert publish().state is LeaseState.PUBLISHED


async def test_closing_again_changes_nothing(leases: Leases, publish: Publish) -> None:
    lease = publish(readers=2)
    with lease.reading(READER) as opened:
        for _ in range(2):
            opened.close(complete=True)
            assert (lease.record().readers_closed, lease.state) == (1, LeaseState.PUBLISHED)


async def test_who_has_not_opened_a_lease_does_not_close_it_for_who_has(leases: Leases, publish: Publish) -> None:
    lease = publish()
    with lease.reading(READER):
        Opened(lease, READER).close(complete=True)
        with pytest.raises(KvferryError) as refused:
            leases.finished("r", 1, READER)
        assert refused.value.code == "not_opened"
        assert lease.live_readers == 1
    assert lease.state is LeaseState.PUBLISHED


async def test_a_reader_opens_once_at_a_time(leases: Leases, publish: Publish) -> None:
    lease = publish()
    with lease.reading(READER):
        with pytest.raises(KvferryError) as refused, lease.reading(READER):
            pass
        assert refused.value.code == "already_reading"
        assert lease.live_readers == 1


# numbers


async def test_a_reader_of_a_later_lease_waits_for_it_whatever_has_ended(leases: Leases, publish: Publish) -> None:
    publish(number=3)
    leases.revoke("r", "for a test")
    waiting = asyncio.create_task(leases.find("r", READER, 4))
    await asyncio.sleep(0)
    assert not waiting.done()
    lease = publish(number=4)
    assert await lasting(waiting) is lease


async def test_a_reader_of_an_earlier_lease_is_told_the_newest(leases: Leases, publish: Publish) -> None:
    waiting = asyncio.create_task(leases.find("r", READER, 3))
    await asyncio.sleep(0)
    publish(number=4)
    for asked in (waiting, leases.find("r", READER, 3)):
        with pytest.raises(KvferryError, match="its last is 4") as refused:
            await lasting(asked)
        assert refused.value.code == "lease_ended"


async def test_a_publish_of_a_higher_number_ends_the_lease_before(leases: Leases, publish: Publish) -> None:
    before = publish(number=3, more=True)
    after = publish(number=4)
    assert (before.state, after.state) == (LeaseState.REVOKED, LeaseState.PUBLISHED)
    assert not word_stands(leases, before)
    for number in (3, 2):
        with pytest.raises(KvferryError) as refused:
            publish(number=number)
        assert refused.value.code == "lease_ended"
    leases.revoke("r", "for a test")
    with pytest.raises(KvferryError) as refused:
        publish(number=4)
    assert refused.value.code == "lease_ended"


async def test_a_rank_closes_the_lease_that_it_means(leases: Leases, publish: Publish) -> None:
    lease = publish(number=4)
    leases.finished("r", 3, READER)
    assert lease.state is LeaseState.PUBLISHED
    leases.finished("r", 5, READER)
    leases.finished("r", 4, READER)
    assert lease.state is LeaseState.RELEASED
    assert publish(number=5).state is LeaseState.RELEASED


# time to live


async def test_a_lease_that_nobody_reads_expires(publish: Publish, leases: Leases) -> None:
    lease = publish(ttl_s=NOW_S)
    await lasting(lease.ended())
    assert lease.state is LeaseState.EXPIRED
    assert "nobody read it" in lease.reason


async def test_a_lease_with_a_live_reader_does_not_expire(publish: Publish, leases: Leases) -> None:
    read_one = publish("read")
    with read_one.reading(READER):
        read_one.ttl_s = NOW_S
        read_one.restart_ttl()
        unread = publish("unread", ttl_s=2 * NOW_S)
        await lasting(unread.ended())
        assert read_one.state is LeaseState.PUBLISHED
        assert read_one.record().expires_in_ms is None
    assert read_one.state is LeaseState.EXPIRED  # its time had passed long ago


async def test_every_publish_starts_the_time_to_live_anew(publish: Publish, leases: Leases) -> None:
    lease, other = publish(more=True), publish("other")
    assert lease._expiry.when() < other._expiry.when()
    publish(num_tokens=lease.num_tokens + 1, more=True)
    assert lease._expiry.when() > other._expiry.when()


# progressive


async def test_followers_see_every_publish_and_then_the_end(publish: Publish, leases: Leases) -> None:
    lease = publish(num_tokens=4, more=True)
    follower = lease.follow()
    assert (await lasting(anext(follower)), lease.num_tokens, lease.more) == (1, 4, True)
    publish(num_tokens=6, more=True)
    publish(num_tokens=8)
    assert (await lasting(anext(follower)), lease.num_tokens, lease.more) == (3, 8, False)
    with pytest.raises(StopAsyncIteration):
        await lasting(anext(follower))


async def test_what_is_still_being_published_is_not_released(publish: Publish, leases: Leases) -> None:
    lease = publish(num_tokens=4, more=True)
    read(leases, READER, lease)
    assert lease.state is LeaseState.PUBLISHING
    publish(num_tokens=8)
    assert lease.state is LeaseState.RELEASED


async def test_a_follower_is_told_when_the_lease_ends_before_the_last_publish(publish: Publish, leases: Leases) -> None:
    follower = publish(more=True).follow()
    await lasting(anext(follower))
    leases.revoke("r", "aborted")
    with pytest.raises(KvferryError, match="revoked: aborted") as told:
        await lasting(anext(follower))
    assert told.value.code == "lease_ended"


async def test_published_tokens_are_not_taken_back(publish: Publish) -> None:
    publish(num_tokens=8, more=True)
    with pytest.raises(KvferryError) as refused:
        publish(num_tokens=7, more=True)
    assert refused.value.code == "published_less"


@pytest.mark.parametrize(
    "later",
    [BlockTable.of([4, 8, 7]), BlockTable.of([4]), BlockTable.of([7, 9], 4), BlockTable.of([]), None],
    ids=["other blocks", "fewer", "of a window that has moved on", "none", "no table"],
)
async def test_what_was_published_stays_where_it_is(publish: Publish, later: BlockTable | None) -> None:
    """A reader that follows the lease may be reading it, and is told that it has held."""
    publish(num_tokens=8, more=True)
    with pytest.raises(KvferryError) as refused:
        publish(num_tokens=8, more=True, tables={} if later is None else {"full": later})
    assert refused.value.code == "published_blocks_moved"


async def test_a_window_may_begin_with_the_first_publish_that_has_blocks(publish: Publish) -> None:
    publish(num_tokens=0, more=True, tables={"full": BlockTable.of([])})
    lease = publish(num_tokens=8, more=True, tables={"full": BlockTable.of([7], 4)})
    assert lease.version == 2


async def test_the_same_publish_again_changes_nothing(publish: Publish) -> None:
    lease = publish()
    assert publish() is lease
    assert lease.version == 1
    for different in ({"num_tokens": 7}, {"metadata": b"x"}, {"more": True}, {"tables": {"full": BlockTable.of([4])}}):
        with pytest.raises(KvferryError) as refused:
            publish(**different)
        assert refused.value.code == "already_published"


# revocation, waiting


async def test_a_reader_of_a_revoked_lease_learns_that_it_did_not_hold(publish: Publish, leases: Leases) -> None:
    lease = publish()
    with lease.reading(READER) as opened:
        assert leases.revoke("r", "aborted")
        assert not word_stands(leases, lease)
        opened.close(complete=True)
    assert lease.record().readers_closed == 0
    assert "aborted" in lease.over().message
    assert not leases.revoke("r", "again")


async def test_a_reader_that_comes_late_is_told_at_once(publish: Publish, leases: Leases) -> None:
    publish()
    leases.revoke("r", "aborted")
    with pytest.raises(KvferryError) as told:
        await lasting(leases.find("r", READER))
    assert told.value.code == "lease_ended"


async def test_a_lease_is_not_released_under_another_reader(publish: Publish, leases: Leases) -> None:
    """Whoever has read enough of them: who knows the request's id may be anybody."""
    lease = publish()
    with lease.reading(READER) as opened:
        for other in (ReaderId("other", "1", 0, 1), replace(READER, key=b"another")):
            read(leases, other, lease)
            leases.finished("r", 1, other)
            assert not leases.give_up("r", "aborted", other)
            assert lease.state is LeaseState.PUBLISHED
        assert word_stands(leases, lease)
        opened.close(complete=True)
    assert lease.state is LeaseState.RELEASED


async def test_a_lease_that_nobody_else_reads_is_given_up_by_one_that_was_to_read_it(
    publish: Publish, leases: Leases
) -> None:
    lease = publish()
    with lease.reading(READER):
        assert leases.give_up("r", "aborted", replace(READER, rank=0))
    assert lease.state is LeaseState.REVOKED


async def test_a_publish_that_another_reader_waits_for_is_not_given_up(publish: Publish, leases: Leases) -> None:
    waiting = asyncio.create_task(leases.find("r", READER))
    await asyncio.sleep(0)
    assert not leases.give_up("r", "aborted", replace(READER, key=b"another"))
    lease = publish()
    assert await lasting(waiting) is lease


async def test_ranks_of_two_keys_do_not_make_one_reader(leases: Leases, publish: Publish) -> None:
    lease = publish()
    first, second = (ReaderId("decode", "1", rank, 2, b"ours") for rank in range(2))
    read(leases, first, lease)
    read(leases, replace(second, key=b"a stranger's"), lease)
    assert lease.state is LeaseState.PUBLISHED
    read(leases, second, lease)
    assert lease.state is LeaseState.RELEASED


async def test_readers_that_gave_up_take_no_place(leases: Leases, publish: Publish) -> None:
    lease = publish()
    for number in range(MAX_READERS + 1):
        read(leases, ReaderId(f"stranger-{number}", "1", 0, 1), lease, complete=False)
    assert len(lease._attempts) <= MAX_READERS and not lease._ranks_read
    read(leases, READER, lease)
    assert lease.state is LeaseState.RELEASED


async def test_a_lease_remembers_so_many_readers(
    publish: Publish, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an engine of many ranks, which has not read with all of them."""
    monkeypatch.setattr(lease_module, "MAX_READERS", 8)
    lease = publish()
    for rank in range(8):
        lease.finished(ReaderId("wide", "1", rank, 9))
    for refused in (lambda: read(leases, READER, lease), lambda: lease.finished(READER)):
        with pytest.raises(KvferryError) as full:
            refused()
        assert (full.value.code, full.value.value) == ("full", "8")
    assert lease.state is LeaseState.PUBLISHED


async def test_of_leases_that_are_lost_so_many_are_remembered_however_often_they_are_told(leases: Leases) -> None:
    for time in range(3):
        leases.lost((f"{time}-{number}", 1) for number in range(TOMBSTONES))
    assert len(leases._lost) == TOMBSTONES
    with pytest.raises(KvferryError, match="lost"):
        await lasting(leases.find("2-0", READER))


async def test_of_leases_that_have_ended_so_many_are_remembered(leases: Leases, publish: Publish) -> None:
    """A reader of an older one waits, as if it were still to be published."""
    for number in range(TOMBSTONES + 1):
        publish(f"r{number}")
        leases.revoke(f"r{number}", "aborted")
    assert len(list(leases.ended)) == TOMBSTONES
    with pytest.raises(KvferryError, match="aborted"):
        await lasting(leases.find("r1", READER))
    waiting = asyncio.create_task(leases.find("r0", READER))
    await asyncio.sleep(0)
    assert not waiting.done()
    publish("r0")
    assert (await lasting(waiting)).request_id == "r0"


async def test_a_reader_may_come_before_the_publish(publish: Publish, leases: Leases) -> None:
    waiting = [asyncio.create_task(leases.find("r", READER)) for _ in range(2)]
    await asyncio.sleep(0)
    lease = publish()
    assert await lasting(asyncio.gather(*waiting)) == [lease, lease]


async def test_what_is_lost_is_refused_however_few_leases_there_may_be(publish: Publish, leases: Leases) -> None:
    """To those of the session before come all that could not be published since."""
    names = [f"lost-{number}" for number in range(2 * leases.limit)]
    leases.lost((name, 7) for name in names)
    for name in names:
        with pytest.raises(KvferryError, match="lost"):
            await asyncio.wait_for(leases.find(name, READER), 10)
        with pytest.raises(KvferryError, match="its last is 7"):
            await asyncio.wait_for(leases.find(name, READER, 6), 10)
        assert leases.held(name, 8) is None, "one that is published later is not lost"
    published = publish(names[0])
    assert await leases.find(names[0], READER) is published


async def test_a_reader_that_waits_is_told_when_the_request_is_aborted(leases: Leases) -> None:
    waiting = asyncio.create_task(leases.find("r", READER))
    await asyncio.sleep(0)
    leases.revoke("r", "aborted")
    with pytest.raises(KvferryError, match="aborted"):
        await lasting(waiting)


async def test_one_address_does_not_take_all_the_waits(leases: Leases) -> None:
    stranger = replace(READER, host="10.0.0.9")
    waiting = [asyncio.create_task(leases.find(f"never-{n}", stranger)) for n in range(leases.limit // 2)]
    await asyncio.sleep(0)
    with pytest.raises(KvferryError) as full:
        await lasting(leases.find("one more", stranger))
    assert (full.value.code, full.value.value) == ("full", "10.0.0.9")
    ours = asyncio.create_task(leases.find("r", replace(READER, host="10.0.0.7")))
    await asyncio.sleep(0)
    assert not ours.done()
    for wait in (*waiting, ours):
        wait.cancel()
    await asyncio.wait([*waiting, ours])
    again = asyncio.create_task(leases.find("one more", stranger))
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_readers_that_give_up_waiting_leave_nothing_behind(publish: Publish, leases: Leases) -> None:
    for n in range(3 * leases.limit):
        waiting = asyncio.create_task(leases.find(f"never-{n}", READER))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    last = asyncio.create_task(leases.find("r", READER))
    await asyncio.sleep(0)
    publish()
    assert (await lasting(last)).request_id == "r"


async def test_leases_and_waiting_readers_are_bounded(publish: Publish, leases: Leases) -> None:
    for n in range(leases.limit):
        publish(f"r{n}")
    with pytest.raises(KvferryError) as refused:
        publish("one more")
    assert refused.value.code == "full"
    waiting = [asyncio.create_task(leases.find(f"never-{n}", READER)) for n in range(leases.limit)]
    await asyncio.sleep(0)
    with pytest.raises(KvferryError) as refused:
        await lasting(leases.find("one more", READER))
    assert refused.value.code == "full"
    for task in waiting:
        task.cancel()


async def test_the_end_of_a_registration_ends_everything(publish: Publish, leases: Leases, ended: list[Lease]) -> None:
    whole, partly = publish("whole"), publish("partly", more=True)
    waiting = asyncio.create_task(leases.find("awaited", READER))
    await asyncio.sleep(0)
    leases.revoke_all("started anew")
    assert [lease.state for lease in (whole, partly)] == [LeaseState.REVOKED] * 2
    assert ended == [whole, partly]
    for wait in (waiting, leases.find("awaited", READER), leases.find("later", READER)):
        with pytest.raises(KvferryError, match="started anew"):
            await lasting(wait)


async def test_what_a_dead_engine_published_whole_stays_and_the_rest_ends(publish: Publish, leases: Leases) -> None:
    whole, partly = publish("whole"), publish("partly", more=True)
    waiting = asyncio.create_task(leases.find("awaited", READER))
    await asyncio.sleep(0)
    leases.revoke_all("the engine is gone", keep_whole=True)
    assert (whole.state, partly.state) == (LeaseState.PUBLISHED, LeaseState.REVOKED)
    assert await lasting(leases.find("whole", READER)) is whole
    for wait in (waiting, leases.find("later", READER)):
        with pytest.raises(KvferryError, match="the engine is gone"):
            await lasting(wait)


async def test_a_request_may_be_published_again_after_its_lease_ended(publish: Publish, leases: Leases) -> None:
    publish()
    leases.revoke("r", "preempted")
    again = publish()
    assert await lasting(leases.find("r", READER)) is again
    assert again.state is LeaseState.PUBLISHED


async def test_why_a_lease_is_over_does_not_hold_on_to_whoever_was_told(leases: Leases, publish: Publish) -> None:
    """An error that is raised again and again gathers the frames that it is raised through, and what lies in them."""
    fence: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fence.set_exception(Conflict("fence_timeout", "the GPU is slow"))
    leases.publish("r", 1, Publication(TABLES, 8, b"", more=False), ttl_s=LONG_S, readers=1, after=fence)
    frames = []
    for _ in range(3):
        with pytest.raises(KvferryError, match="the GPU is slow") as caught:
            await leases.find("r", READER)
        frames.append(len(list(traceback.walk_tb(caught.tb))))
    assert len(set(frames)) == 1
