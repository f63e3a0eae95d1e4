"""Which attempt an order or a reservation belongs to, on one rank, and what is kept of those that are over.

simulation/requests_world.py judges which attempts end, and by which others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from stepped import Daemon, manifest_of, stepping
from stepwise import World

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.protocol import parts, requests
from kvferry.protocol.attempts import Attempt
from kvferry.schemas import TransferState
from kvferry.tables import BlockTable
from kvferryd.engine import Engine
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

SOURCE, READERS = "127.0.0.1:7001", ("127.0.0.1:7101", "127.0.0.1:7102")
ORDER = Order("prefill", SOURCE, deadline_s=30.0)
MOST, HISTORY = 4, 2
HIGHEST = (1 << 31) - 1
"""The highest number that a router may give."""


class Rank:
    """A source, and one rank of an engine that reads; the other one has no daemon."""

    def __init__(self, world: World, rank: int = 0, of: int = 1) -> None:
        self.world = world
        self.source = Daemon(world, SOURCE, manifest_of("prefill", heads=2), {0: SOURCE})
        members = dict(enumerate(READERS[:of]))
        manifest, limits = manifest_of("decode", rank=rank, of=of, heads=2), {"max_transfers": MOST, "history": HISTORY}
        self.daemon = Daemon(world, members[rank], manifest, members, **limits)
        self.jobs = self.daemon.ferry.jobs

    def call(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        with self.world.within(self.daemon.process):
            return self.world.loop.call(function, self.daemon.engine, *args, **more)

    def order(self, order: Order = ORDER, *, request_id: str = "r", **more: Any) -> tuple[Transfer, bool]:
        return self.call(self.jobs.order, request_id, order, **more)  # type: ignore[no-any-return]

    def order_tables(self, first: int) -> tuple[Transfer, bool]:
        """An order that brings its tables."""
        return self.order(brought={0: _into(first)})

    def receive(self, number: int, *, order: Order | None = None, request_id: str = "r", first: int = 0) -> Transfer:
        return self.call(self.jobs.receive, request_id, number, _into(first), order, None)  # type: ignore[no-any-return]

    def handed(self, number: int, order: Order = ORDER) -> Transfer:
        return self.call(self.jobs.handed, "r", Attempt(number), order, None)  # type: ignore[no-any-return]

    def ended_elsewhere(self, number: int, *, failed: bool = False) -> bool:
        return self.call(  # type: ignore[no-any-return]
            self.jobs.abort_attempt, "r", Attempt(number), "rank 1: deadline", failed=failed
        )

    def end(self, transfer: Transfer) -> None:
        self.world.loop.call(transfer.stop, TransferState.ABORTED, Conflict("aborted", "by the test"))
        assert transfer.ended.is_set()


def _into(first: int) -> Reservation:
    return Reservation({"full": BlockTable.of([first, first + 1])}, None)


@contextlib.contextmanager
def refused(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[KvferryError]]:
    with pytest.raises(KvferryError, match=match) as found:
        yield found
    assert found.value.code == code


@pytest.fixture
def world() -> Iterator[World]:
    with stepping() as world:
        yield world


@pytest.fixture
def rank(world: World) -> Rank:
    return Rank(world)


@pytest.fixture
def other(world: World) -> Rank:
    """Rank 1: it is led by rank 0, of which nothing is heard."""
    return Rank(world, rank=1, of=2)


# ---- orders by REST ----


def test_an_order_that_brings_the_same_tables_again_is_the_same(rank: Rank) -> None:
    first, new = rank.order_tables(0)
    assert new
    assert rank.order_tables(0) == (first, False)
    with refused("order_conflict", "with other tables"):
        rank.order_tables(2)
    with refused("order_conflict", "was ordered already, otherwise"):
        rank.order(replace(ORDER, address="127.0.0.1:7002"), brought={0: _into(0)})


@pytest.mark.parametrize(
    "otherwise",
    [{"order": replace(ORDER, way="direct")}, {"request_id": "s"}, {"number": 1}, {"brought": {0: _into(0)}}],
    ids=["the order", "the request", "the attempt", "the tables"],
)
def test_an_order_id_means_one_order(rank: Rank, otherwise: dict[str, Any]) -> None:
    first, _ = rank.order(order_id="o")
    for _ in range(2):  # before its end and after
        with refused("order_conflict", "order o was given already, otherwise") as found:
            rank.order(order_id="o", **otherwise)
        assert found.value.field == "order_id"
        rank.end(first)


def test_an_order_that_comes_again_when_its_record_is_forgotten_is_no_new_one(rank: Rank) -> None:
    rank.receive(1)
    first, _ = rank.order(order_id="o")
    rank.end(first)
    for number in range(HISTORY):
        rank.end(rank.receive(1, order=ORDER, request_id=f"later-{number}"))
    rank.world.loop.pass_time(1.0)
    assert rank.jobs.find(first.transfer_id) is None
    with refused("order_conflict", "order o was given already, and its record is forgotten") as found:
        rank.order(order_id="o")
    assert found.value.field == "order_id"


def test_an_order_that_comes_again_while_it_is_under_way_is_the_same(rank: Rank) -> None:
    first, new = rank.order()
    assert new and rank.order() == (first, False)
    assert rank.receive(4) is first and first.attempt == Attempt(4)
    assert rank.order() == (first, False) == rank.order(number=4)
    with refused("order_conflict", "was ordered already, otherwise"):
        rank.order(replace(ORDER, way="direct"))


def test_an_order_that_names_an_attempt_that_has_ended_is_told_of_that_one(rank: Rank) -> None:
    first = rank.receive(1, order=ORDER)
    rank.end(first)
    assert rank.order(number=1) == (first, False)
    with refused("order_conflict", "ordered already, otherwise"):
        rank.order(replace(ORDER, way="direct"), number=1)


def test_a_number_whose_attempt_has_ended_is_refused_with_why(rank: Rank) -> None:
    rank.source.publish("r", range(2))
    first = rank.receive(1, order=ORDER)
    rank.world.run()
    assert first.state is TransferState.DONE
    with refused("order_conflict", "has ended already in attempt 1"):
        rank.receive(1, order=ORDER)
    rank.end(rank.receive(2))
    with refused("aborted", "by the test"):
        rank.receive(2)


def test_an_order_that_names_an_attempt_to_come_waits_and_ends_nothing(rank: Rank) -> None:
    now = rank.receive(1)
    later, new = rank.order(number=3)
    assert new and later is not now and not now.ended.is_set()
    assert rank.receive(2, first=2) is not later
    assert now.ended.is_set() and not later.ended.is_set()
    assert rank.receive(3, first=4) is later


def test_a_lease_that_the_engine_names_is_meant_where_a_router_has_ordered_any(rank: Rank) -> None:
    """Other ranks, which have the engine's order alone, read that one: it has ended here, and the next one is there."""
    for number in (1, 2):
        rank.source.publish("r", range(2), number=number)
    waiting, _ = rank.order()
    transfer = rank.receive(1, order=replace(ORDER, epoch=rank.source.engine.epoch, lease=1))
    assert transfer is waiting
    rank.world.run()
    assert transfer.problem is not None and transfer.problem.code == "lease_ended"


def test_the_highest_number_that_a_router_may_give_stands_in_no_way(rank: Rank) -> None:
    """It waits for a reservation that never comes; its own deadline ends it."""
    ordered, _ = rank.order(replace(ORDER, deadline_s=10.0), number=HIGHEST)
    for number in (1, 2):
        rank.source.publish("r", range(2))
        transfer = rank.receive(number, order=ORDER, first=2 * number)
        rank.world.run()
        assert transfer.state is TransferState.DONE
    assert not ordered.ended.is_set() and not ordered.reservation
    rank.world.loop.pass_time(10.0)
    assert ordered.problem is not None and ordered.problem.code == "deadline"
    assert rank.receive(3).attempt == Attempt(3)


def test_orders_that_bring_tables_and_reservations_are_two_kinds_of_attempts(rank: Rank) -> None:
    rank.order_tables(0)
    with refused("order_conflict", "another kind of attempts: its orders bring tables"):
        rank.receive(1, first=2)


def test_reservations_and_orders_that_bring_tables_are_two_kinds_of_attempts(rank: Rank) -> None:
    first = rank.receive(1)
    with pytest.raises(Conflict):
        rank.order_tables(2)
    assert not first.ended.is_set()
    rank.end(first)
    with refused("order_conflict", "another kind of attempts: its engine reserves blocks for it"):
        rank.order_tables(2)


def test_an_order_that_brings_tables_names_no_attempt(rank: Rank) -> None:
    with refused("order_conflict", "names attempt 1: rank 0 counts such orders"):
        rank.order(brought={0: _into(0)}, number=1)


# ---- reservations ----


def test_a_lower_attempt_whose_order_is_about_to_end_comes_after_no_higher_one(rank: Rank) -> None:
    """Both reservations come in one turn of the loop."""

    def both(engine: Engine) -> Transfer:
        higher = rank.jobs.receive(engine, "r", 5, _into(0), None, None)
        with refused("stale_attempt"):
            rank.jobs.receive(engine, "r", 3, _into(2), None, None)
        return higher

    ordered, _ = rank.order(number=3)
    higher = rank.call(both)
    assert ordered.problem is not None and ordered.problem.code == "superseded"
    assert not higher.ended.is_set() and rank.receive(5) is higher


def test_a_refused_reservation_is_the_end_of_an_attempt_that_was_ordered_by_its_number(rank: Rank) -> None:
    blocking = rank.receive(1, request_id="s")
    ordered, _ = rank.order(number=1)
    with refused("blocks_not_quiet"):
        rank.receive(1)
    assert ordered.problem is not None and ordered.problem.code == "blocks_not_quiet"
    rank.end(blocking)
    with refused("blocks_not_quiet"):
        rank.receive(1)
    assert rank.receive(2).attempt == Attempt(2)


# ---- rank 0 hands on ----


def test_an_order_that_rank_0_hands_on_joins_the_reservation_of_its_number_alone(other: Rank) -> None:
    first = other.receive(1)
    assert other.handed(1) is first and other.handed(1) is first
    second = other.handed(2)
    assert second is not first and not first.ended.is_set(), "only a reservation begins an attempt"
    assert other.receive(2, first=2) is second
    assert first.problem is not None and first.problem.code == "superseded"
    with refused("stale_attempt"):
        other.handed(1)


def test_a_reservation_that_comes_after_the_end_of_its_attempt_has_missed_it(other: Rank) -> None:
    other.end(other.handed(1))
    with refused("aborted", "by the test"):
        other.receive(1)
    assert other.receive(2).attempt == Attempt(2)


def test_what_has_ended_elsewhere_refuses_its_own_number_and_lower_ones(other: Rank) -> None:
    assert not other.ended_elsewhere(7)
    with refused("aborted", "attempt 7 of request r has ended on another rank"):
        other.receive(7)
    with refused("stale_attempt"):
        other.receive(6)
    waiting = other.receive(8)
    assert not other.ended_elsewhere(11) and not waiting.ended.is_set()
    with refused("stale_attempt"):
        other.receive(9)
    with refused("aborted"):
        other.handed(11)
    assert other.receive(12, first=2).attempt == Attempt(12) and waiting.ended.is_set()


def test_what_has_failed_elsewhere_may_be_tried_again(other: Rank) -> None:
    assert not other.ended_elsewhere(7, failed=True)
    with refused("rank_failed", "attempt 7 of request r has ended on another rank: rank 1: deadline"):
        other.receive(7)


@pytest.mark.parametrize(("failed", "code"), [(False, "aborted"), (True, "rank_failed")])
def test_what_has_begun_here_and_ends_elsewhere_says_the_same(other: Rank, failed: bool, code: str) -> None:
    part = other.receive(7)
    assert other.ended_elsewhere(7, failed=failed)
    assert part.problem is not None and part.problem.code == code
    assert part.problem.message.startswith("attempt 7 of request r has ended on another rank: ")


def test_what_is_over_stays_over_when_a_lower_attempt_ends_after_it(other: Rank) -> None:
    waiting = other.handed(1)
    assert not other.ended_elsewhere(7)
    other.end(waiting)
    with refused("aborted", "attempt 7 of request r has ended on another rank"):
        other.receive(7)
    with refused("stale_attempt"):
        other.handed(6)


def test_orders_that_wait_for_a_lower_attempt_than_one_that_is_over_wait_in_vain(other: Rank) -> None:
    waiting = other.handed(1)
    assert not other.ended_elsewhere(7)
    assert waiting.problem is not None and waiting.problem.code == "superseded"
    with refused("stale_attempt"):
        other.receive(1)


def test_a_part_goes_on_without_rank_0_until_another_daemon_of_rank_0_has_joined(other: Rank) -> None:
    """Orders that the first one has handed on are lost with it; those of the second are not."""
    part, engine, members = other.handed(1, replace(ORDER, leader="one")), other.daemon.engine, dict(enumerate(READERS))

    def joined(members: dict[int, str], instances: dict[int, str]) -> None:
        engine.set_members(members, instances)
        other.call(other.jobs.on_roster)

    joined(members, {0: "one", 1: "own"})
    joined({1: READERS[1]}, {1: "own"})
    assert not part.ended.is_set()
    joined(members, {0: "two", 1: "own"})
    later = other.handed(2, replace(ORDER, leader="two"))
    joined(members, {0: "two", 1: "own"})
    assert isinstance(part.problem, PeerFailed) and (part.problem.code, part.problem.value) == ("rank_failed", "0")
    assert not later.ended.is_set()


# ---- what is kept ----


def test_what_is_kept_of_attempts_that_are_over_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any numbers and ids may be given."""
    for each in (parts, requests):
        monkeypatch.setattr(each, "ATTEMPTS", 3)
    rank = Rank(world)
    for number in range(1, 20):
        for request_id in (f"r-{number}", "s"):
            ordered, _ = rank.order(request_id=request_id, number=number, order_id=f"{request_id}-{number}")
            assert rank.receive(number, request_id=request_id) is ordered
            rank.end(ordered)
        rank.call(rank.jobs.abort_attempt, f"q-{number}", Attempt(number), "rank 1: deadline", failed=True)
        rank.world.loop.pass_time(1.0)
        sizes = rank.jobs.requests.sizes()
        assert sizes["over"] <= 3 and sizes["order ids"] <= 3
        assert len(list(rank.jobs)) == sizes["parts"] <= HISTORY + 2 and sizes["newest"] <= HISTORY + 2
        assert not sizes["waiting"] and not sizes["claims"]


def test_orders_that_wait_count_as_transfers_and_their_deadline_ends_them(rank: Rank) -> None:
    for number in range(MOST):
        rank.order(request_id=f"r-{number}", number=HIGHEST)
    with refused("full") as found:
        rank.order(request_id="one more")
    assert found.value.field == "max_transfers" and rank.jobs.requests.sizes()["waiting"] == MOST
    rank.world.loop.pass_time(31.0)
    assert not rank.jobs.requests.sizes()["waiting"] and rank.order(request_id="one more")[1]


def test_a_number_is_known_when_its_record_is_forgotten(rank: Rank) -> None:
    """A late reservation must not begin what is over."""
    rank.end(rank.receive(5))
    for number in range(2 * HISTORY):
        rank.end(rank.receive(1, request_id=f"s-{number}"))
    rank.world.loop.pass_time(1.0)
    assert not rank.jobs.of_request("r")
    with refused("aborted", "by the test"):
        rank.receive(5)
    with refused("stale_attempt"):
        rank.receive(4)
    assert rank.receive(6).attempt == Attempt(6)
