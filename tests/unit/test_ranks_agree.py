"""The ranks of one engine, each a whole daemon, and what they say to each other about a request. They take one step at
a time (stepwise.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from stepped import Daemon, manifest_of
from stepwise import Stream, World

from kvferry.schemas import OrderBody, SourceBody, TransferState
from kvferryd.api import peer
from kvferryd.transfers.order import Order
from kvferryd.transfers.transfer import Transfer

SOURCE, RANKS = "127.0.0.1:7001", ("127.0.0.1:7002", "127.0.0.1:7003", "127.0.0.1:7004")
MEMBERS = dict(enumerate(RANKS))
ORDER, SOURCE_BODY = Order("prefill", SOURCE, deadline_s=30.0), SourceBody(engine_id="prefill", address=SOURCE)

ORDER_1 = dataclasses.replace(ORDER, epoch="prefill-1", lease=1)
"""The source's engine is asked for one lease by its number and epoch."""


class Ranks:
    """A source, and the ranks of one reader."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.source = Daemon(world, SOURCE, manifest_of("prefill", heads=len(RANKS)), {0: SOURCE})
        self.daemons = [
            Daemon(world, address, manifest_of("decode", heads=len(RANKS), rank=rank, of=len(RANKS)), MEMBERS)
            for rank, address in MEMBERS.items()
        ]

    def order(self, rank: int) -> None:
        """At one rank, as a router does."""
        daemon, body = self.daemons[rank], OrderBody(request_id="r", source=SOURCE_BODY, deadline_ms=30_000)
        with self.world.within(daemon.process):
            self.world.loop.create_task(daemon.ferry.order(body))
        self.world.loop.settle()

    def reserve(self, rank: int, *, order: Order | None = None) -> Transfer:
        """order: by the engine itself."""
        return self.daemons[rank].receive("r", 1, range(4), order)

    def own(self, rank: int) -> Transfer:
        """The engine names the source itself."""
        return self.reserve(rank, order=ORDER)

    def publish(self) -> None:
        self.source.publish("r", range(4))


@pytest.fixture
def ranks(world: World) -> Ranks:
    return Ranks(world)


def test_an_order_that_takes_no_time_costs_rank_0_one_message_of_each_other_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, told = peer._share, []

    def counted(transfer: Transfer) -> Any:
        told.append(transfer.own.rank)
        return share(transfer)

    monkeypatch.setattr(peer, "_share", counted)
    ranks.publish()
    ranks.order(1)
    ranks.world.run(500)
    parts = [ranks.reserve(rank) for rank in range(len(RANKS))]
    ranks.world.run(5000)
    assert {part.state for part in parts} == {TransferState.DONE} and parts[0].over
    assert sorted(told) == list(range(1, len(RANKS)))


def test_a_rank_that_has_said_done_stays_done_when_its_stream_breaks(ranks: Ranks) -> None:
    ranks.publish()
    transfer, _ = ranks.own(0), ranks.own(1)
    (orders,) = (call for call in ranks.world.calls if (call._method, call._address) == ("Order", RANKS[1]))
    for _ in range(500):
        if transfer.ranks[1].state is TransferState.DONE:
            break
        ranks.world.step(0)
    assert isinstance(orders, Stream)
    orders.break_down()
    ranks.world.run(500)
    assert transfer.ranks[1].state is TransferState.DONE and transfer.problem is None


def test_orders_of_one_source_are_completed_by_each_other_and_never_changed() -> None:
    lease, epoch = dataclasses.replace(ORDER, lease=1), dataclasses.replace(ORDER, epoch="prefill-1")
    assert lease.naming(epoch) == epoch.naming(lease) == ORDER.naming(ORDER_1) == ORDER_1
    assert ORDER_1.naming(lease) == ORDER_1.naming(ORDER) == ORDER_1
    assert not ORDER_1.same_source(dataclasses.replace(ORDER_1, epoch="prefill-2"))
    assert not epoch.same_source(dataclasses.replace(lease, epoch="prefill-2"))
    assert epoch.same_source(lease) and lease.same_source(ORDER_1) and ORDER.same_source(ORDER_1)


def test_a_deadline_says_that_rank_0_has_not_said_which_lease_it_reads(ranks: Ranks) -> None:
    ranks.publish()
    ranks.world.run(500)
    transfer = ranks.own(1)
    ranks.world.run(5000)
    assert transfer.state is TransferState.VERIFYING
    assert "while waiting for rank 0 of the same engine to say which lease it reads" in transfer.work._late().message


def test_a_lease_that_the_engine_names_is_meant_where_a_router_has_ordered_any(ranks: Ranks) -> None:
    """Other ranks, which have the engine's order alone, read that one: it has ended here, and the next one is there."""
    for _ in range(2):
        ranks.publish()
    ranks.order(0)
    transfer = ranks.reserve(0, order=ORDER_1)
    ranks.world.run()
    assert transfer.problem is not None and transfer.problem.code == "lease_ended"
    assert len(list(ranks.daemons[0].ferry.jobs)) == 1
