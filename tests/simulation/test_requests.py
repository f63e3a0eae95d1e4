"""Rules of requests on one rank that no world comes to: what an order says, ids, kinds of attempts, what is forgotten.

requests_world.py judges which attempts end, and by which others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.protocol import parts, requests
from kvferry.protocol import requests_events as e
from kvferry.protocol.attempts import Attempt, Limits, ReadingRank
from kvferry.protocol.requests import Requests
from kvferryd.transfers.order import Order

ORDER, TRANSFERS, HISTORY = Order("prefill", "127.0.0.1:7001", deadline_s=30.0), 4, 2
DRAINING = PeerFailed("draining", "a test")


def blocks(*first: int) -> e.Reservation:
    return e.Reservation(first, {"full": np.array(first, dtype=np.int64)})


class Rank:
    """A rank of an engine that reads; the last effect of each event answers it."""

    def __init__(self, rank: int = 0, transfers: int = TRANSFERS) -> None:
        self.at, self.requests = ReadingRank("decode", "1", rank, 1), Requests("one", Limits(transfers, HISTORY))

    def order(self, order: Order = ORDER, name: str = "r", *, number: int = 0, into: int | None = None, id: str = "") \
            -> e.Effect:  # fmt: skip
        """into: the first block of the tables that it brings."""
        brought, said = {} if into is None else {0: into}, (name, order, number, into)
        reserved = None if into is None else blocks(into)
        return self.requests.on(e.Ordered(self.at, name, order, number, brought, reserved, id, said))[-1]

    def reserve(self, number: int, order: Order | None = None, name: str = "r", first: int = 0) -> e.Effect:
        return self.requests.on(e.Reserved(self.at, name, Attempt(number), blocks(first), order))[-1]

    def hand(self, name: str = "r", order: Order = ORDER, closed: KvferryError | None = None) -> e.Effect:
        return self.requests.on(e.Handed(self.at, name, Attempt(1), order, None, closed))[-1]

    def end(self, part: int) -> None:
        self.requests.on(e.Ended(part, Conflict("aborted", "by the test"), over=True))
        self.requests.on(e.Quiet(part))

    def refuses(self, answer: str, code: str, why: str = "", **said: Any) -> KvferryError:
        """answer: the name of the method above that is answered so."""
        try:
            refused = getattr(self, answer)(**said)
        except KvferryError as error:
            refused = e.Refused(error)
        assert isinstance(refused, e.Refused) and refused.why.code == code and why in refused.why.message
        return refused.why


OTHERWISE: tuple[dict[str, Any], ...] = (
    {"order": replace(ORDER, way="direct")}, {"name": "s"}, {"number": 1}, {"into": 0},
)  # fmt: skip


@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_an_order_id_means_one_order(otherwise: dict[str, Any]) -> None:
    rank = Rank()
    assert rank.order(id="o") == e.Taken(1, new=True)
    for _ in range(2):  # before its end and after
        assert rank.order(id="o") == e.Taken(1, new=False)
        refused = rank.refuses("order", "order_conflict", "order o was given already, otherwise", id="o", **otherwise)
        assert refused.field == "order_id"
        if not rank.requests.parts[1].ended:
            rank.end(1)


def test_an_order_that_comes_again_when_its_record_is_forgotten_is_no_new_one() -> None:
    rank = Rank()
    assert [rank.reserve(1), rank.order(id="o")] == 2 * [e.Taken(1)]
    rank.end(1)
    for number in range(HISTORY):
        rank.reserve(1, ORDER, f"later-{number}")
        rank.end(2 + number)
    assert 1 not in rank.requests.parts
    why = "order o was given already, and its record is forgotten"
    assert rank.refuses("order", "order_conflict", why, id="o").field == "order_id"


def test_an_order_that_brings_the_same_tables_again_is_the_same() -> None:
    rank = Rank()
    assert [rank.order(into=0), rank.order(into=0)] == [e.Taken(1), e.Taken(1, new=False)]
    rank.refuses("order", "order_conflict", "with other tables", into=2)
    rank.refuses(
        "order", "order_conflict", "was ordered already, otherwise", into=0, order=replace(ORDER, way="direct")
    )


def test_an_order_of_an_attempt_that_has_ended_is_told_of_that_one() -> None:
    rank = Rank()
    rank.reserve(1, ORDER)
    rank.end(1)
    assert rank.order(number=1) == e.Taken(1, new=False)
    rank.refuses("order", "order_conflict", "ordered already, otherwise", order=replace(ORDER, way="direct"), number=1)


def test_reservations_and_orders_that_bring_tables_are_two_kinds_of_attempts() -> None:
    rank = Rank()
    rank.reserve(1)
    rank.refuses("order", "receive_conflict", into=2)
    assert not rank.requests.parts[1].stopped
    rank.end(1)
    rank.refuses("order", "order_conflict", "another kind of attempts: its engine reserves blocks for it", into=2)
    rank.refuses("order", "order_conflict", "names attempt 1: rank 0 counts such orders", into=0, number=1)


def test_orders_of_one_attempt_name_one_source_and_are_completed_by_each_other() -> None:
    rank, lease = Rank(), replace(ORDER, epoch="prefill-1", lease=1)
    rank.order()
    named = rank.requests.on(e.Reserved(rank.at, "r", Attempt(1), blocks(0), lease))
    assert e.NameSource(1, lease) in named
    rank.refuses("reserve", "order_conflict", number=1, order=replace(ORDER, engine_id="another"))
    other = Rank(1)
    other.hand()  # rank 0 was told none: it may read another lease
    assert other.refuses("reserve", "order_conflict", number=1, order=lease).field == "source.lease"


def test_a_number_is_known_when_its_record_is_forgotten() -> None:
    """A late reservation must not begin what is over."""
    rank = Rank()
    rank.reserve(5)
    rank.end(1)
    for number in range(2 * HISTORY):
        rank.reserve(1, name=f"s-{number}")
        rank.end(2 + number)
    assert not rank.requests.parts.of_request(rank.at.key("r"))
    rank.refuses("reserve", "aborted", "by the test", number=5)
    rank.refuses("reserve", "stale_attempt", number=4)
    assert rank.refuses("order", "stale_attempt", number=4).value == "5"
    assert isinstance(rank.reserve(6), e.Taken)


@pytest.mark.parametrize(("failed", "code"), [(False, "aborted"), (True, "rank_failed")])
def test_what_ends_elsewhere_ends_here_or_does_not_begin(failed: bool, code: str) -> None:
    rank = Rank(1)
    ended = e.EndedElsewhere(rank.at, "r", Attempt(7), failed, "rank 1: deadline")
    rank.reserve(7)
    assert not rank.requests.on(replace(ended, attempt=Attempt(6))), "the attempt before is over already"
    (stop,) = rank.requests.on(ended)
    why = "attempt 7 of request r has ended on another rank: rank 1: deadline"
    assert isinstance(stop, e.Stop) and (stop.failed, stop.why.code, stop.why.message) == (failed, code, why)
    rank.requests.on(replace(ended, request_id="s"))
    rank.refuses("reserve", code, why.replace("request r", "request s"), number=7, name="s")


def test_orders_that_wait_or_are_handed_on_need_room() -> None:
    rank, other = Rank(), Rank(1, transfers=1)
    for number in range(TRANSFERS):
        rank.order(name=f"r-{number}", number=(1 << 31) - 1)
    assert rank.refuses("order", "full").field == "max_transfers"
    rank.end(1)
    assert rank.order() == e.Taken(TRANSFERS + 1)
    other.refuses("hand", "draining", closed=DRAINING)
    other.hand("s")
    other.refuses("hand", "full", name="t")


def test_hands_are_shaken_before_the_reservation_only() -> None:
    rank = Rank()
    assert e.Meet(1) in rank.requests.on(e.Ordered(rank.at, "r", ORDER))
    rank.reserve(1, name="s")
    assert e.Meet not in map(type, rank.requests.on(e.Ordered(rank.at, "s", ORDER)))


def test_who_waits_for_fewer_transfers_hears_of_each() -> None:
    rank = Rank()
    rank.reserve(1)
    rank.requests.on(e.Ended(1, None))
    assert (rank.requests.on(e.Quiet(1)), rank.requests.left) == ([e.OneFewer()], 0)


def test_a_drain_hands_back_what_no_reservation_waits_for() -> None:
    rank = Rank(1)
    rank.reserve(1)
    rank.hand("s")
    assert rank.requests.on(e.HandBack(rank.at, DRAINING)) == []


def test_a_group_without_blocks_is_reserved() -> None:
    rank = Rank()
    assert isinstance(rank.requests.on(e.Reserved(rank.at, "r", Attempt(1), blocks()))[-1], e.Taken)


def test_what_is_kept_of_attempts_that_are_over_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any numbers and ids may be given."""
    for each in (parts, requests):
        monkeypatch.setattr(each, "ATTEMPTS", 3)
    rank = Rank()
    for number in range(1, 20):
        for name in (f"r-{number}", "s"):
            taken = rank.order(name=name, number=number, id=f"{name}-{number}")
            assert isinstance(taken, e.Taken) and rank.reserve(number, name=name) == e.Taken(taken.part)
            rank.end(taken.part)
        rank.requests.on(e.EndedElsewhere(rank.at, f"q-{number}", Attempt(number), True, "rank 1: deadline"))
        sizes = rank.requests.sizes()
        assert sizes["over"] <= 3 and sizes["order ids"] <= 3 and not sizes["waiting"] and not sizes["claims"]
        assert max(sizes["parts"], sizes["newest"]) <= HISTORY + 2
