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


def test_an_order_that_names_an_attempt_that_has_ended_is_told_of_that_one(rank: Rank) -> None:
    first = rank.receive(1, order=ORDER)
    rank.end(first)
    assert rank.order(number=1) == (first, False)
    with refused("order_conflict", "ordered already, otherwise"):
        rank.order(replace(ORDER, way="direct"), number=1)


def test_a_lease_that_the_engine_names_is_meant_where_a_router_has_ordered_any(rank: Rank) -> None:
    """Other ranks, which have the engine's order alone, read that one: it has ended here, and the next one is there."""
    for number in (1, 2):
        rank.source.publish("r", range(2), number=number)
    waiting, _ = rank.order()
    transfer = rank.receive(1, order=replace(ORDER, epoch=rank.source.engine.epoch, lease=1))
    assert transfer is waiting
    rank.world.run()
    assert transfer.problem is not None and transfer.problem.code == "lease_ended"


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


# ---- rank 0 hands on ----


def test_what_has_failed_elsewhere_may_be_tried_again(other: Rank) -> None:
    assert not other.ended_elsewhere(7, failed=True)
    with refused("rank_failed", "attempt 7 of request r has ended on another rank: rank 1: deadline"):
        other.receive(7)


@pytest.mark.parametrize(("failed", "code"), [(False, "aborted"), (True, "rank_failed")])
def test_what_has_begun_here_and_ends_elsewhere_says_the_same(other: Rank, failed: bool, code: str) -> None:
    part = other.receive(7)
    assert not other.ended_elsewhere(6) and not part.ended.is_set(), "the attempt before is over already"
    assert other.ended_elsewhere(7, failed=failed)
    assert part.problem is not None and part.problem.code == code
    assert part.problem.message.startswith("attempt 7 of request r has ended on another rank: ")


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
