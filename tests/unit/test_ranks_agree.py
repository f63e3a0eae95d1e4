"""The ranks of one engine, each a whole daemon, and what they say to each other about a request. They take one step at
a time (stepwise.py)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from stepped import Daemon, manifest_of, stepping
from stepwise import Step, Stream, World

from kvferry.errors import Conflict, KvferryError
from kvferry.schemas import OrderBody, SourceBody, TransferState
from kvferry.tables import BlockTable
from kvferryd.api import peer
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

SOURCE, RANKS = "127.0.0.1:7001", ("127.0.0.1:7002", "127.0.0.1:7003", "127.0.0.1:7004")
ORDER, SOURCE_BODY = Order("prefill", SOURCE, deadline_s=30.0), SourceBody(engine_id="prefill", address=SOURCE)

ORDER_1, ORDER_2 = (dataclasses.replace(ORDER, epoch="prefill-1", lease=lease) for lease in (1, 2))
"""The source's engine is asked for one lease by its number and epoch."""


class Ranks:
    """A source, and the ranks of one reader."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.source = Daemon(world, SOURCE, manifest_of("prefill", heads=len(RANKS)), {0: SOURCE})
        self.daemons = [self._daemon(rank) for rank in range(len(RANKS))]
        self.stopping: list[asyncio.Task[None]] = []
        self.asked: list[asyncio.Task[str]] = []
        """Orders by REST."""
        self.attempt = 1
        """The number that the engine gives its reservations."""
        self.named: dict[int, Order] = {}
        """Keyed by attempt: the order that the engine gives on every rank, where it names a lease."""

    def _daemon(self, rank: int) -> Daemon:
        manifest = manifest_of("decode", heads=len(RANKS), rank=rank, of=len(RANKS))
        return Daemon(self.world, RANKS[rank], manifest, dict(enumerate(RANKS)))

    def order(self, rank: int, source: SourceBody = SOURCE_BODY, **more: Any) -> asyncio.Task[str]:
        """At one rank, as a router does: its transfer's id, from rank 0."""
        daemon = self.daemons[rank]
        body = OrderBody(request_id="r", source=source, deadline_ms=30_000, **more)

        async def ordered() -> str:
            return (await daemon.ferry.order(body))[0].transfer_id

        with self.world.within(daemon.process):
            self.asked.append(self.world.loop.create_task(ordered()))
        self.world.loop.settle()
        return self.asked[-1]

    def reserve(self, rank: int, blocks: range = range(4), *, order: Order | None = None) -> Transfer:
        """For the engine's attempt. order: by the engine itself."""
        return self.receive(rank, "r", self.attempt, blocks, self.named.get(self.attempt, order))

    def receive(self, rank: int, request_id: str, attempt: int, blocks: range, order: Order | None = None) -> Transfer:
        daemon, reservation = self.daemons[rank], Reservation({"full": BlockTable.of(list(blocks))}, None)
        with self.world.within(daemon.process):
            return self.world.loop.call(  # type: ignore[no-any-return]
                daemon.ferry.jobs.receive, daemon.engine, request_id, attempt, reservation, order, 30.0
            )

    def own(self, rank: int) -> Transfer:
        """The engine names the source itself."""
        return self.reserve(rank, order=ORDER)

    def own_named(self, rank: int) -> Transfer:
        """The engine's next attempt, which begins at this rank and names the newest lease as well."""
        lease = self.source.engine.leases.source.leases.newest("r")
        self.named[self.attempt + 1] = dataclasses.replace(ORDER, epoch="prefill-1", lease=lease)
        return self.anew(rank)

    def anew(self, rank: int) -> Transfer:
        """The engine's next attempt, which begins at this rank; into other blocks than the one before."""
        self.attempt += 1
        first = 4 * (self.attempt % 2)
        return self.reserve(rank, range(first, first + 4))

    def run_without(self, held: Callable[[], set[Step]]) -> None:
        """All that is under way goes on, but for these steps."""
        for _ in range(5000):
            steps = [step for step in self.world.pending() if step not in held()]
            if not steps:
                return
            steps[0]()
            self.world.loop.settle()
            self.world.calls = [call for call in self.world.calls if not call.over]
        raise AssertionError("it never comes to rest")

    def part(self, rank: int, attempt: int) -> Transfer | None:
        found = [each for each in self.daemons[rank].ferry.jobs if each.attempt.number == attempt]
        return found[-1] if found else None

    def restart(self, rank: int) -> None:
        """Its daemon stops, and another one starts in the same epoch."""
        before = self.daemons[rank]
        self.world.kill(before.process)
        with self.world.within(before.process):
            self.stopping.append(self.world.loop.create_task(before.ferry.close()))
        self.daemons[rank] = self._daemon(rank)

    def abort(self, rank: int) -> None:
        daemon = self.daemons[rank]
        self.world.loop.call(daemon.ferry.abort_here, daemon.engine, "r", "by the engine")

    def publish(self, _: int) -> None:
        self.source.publish("r", range(4))

    def come_to_rest(self) -> None:
        """It ends by the deadline, or what a daemon that stops may take."""
        for _ in range(8):
            self.world.run(2000)
            self.world.loop.pass_time(5.0)
        assert all(task.done() for task in (*self.stopping, *self.asked))

    def stop(self, transfer: Transfer) -> None:
        self.world.loop.call(transfer.stop, TransferState.ABORTED, Conflict("aborted", "by the test"))

    def calls(self, method: str, to: int) -> list[Step]:
        return [
            step for call in self.world.calls if (call._method, call._address) == (method, RANKS[to])
            for step in call.steps()
        ]  # fmt: skip


@contextlib.contextmanager
def alone() -> Iterator[Ranks]:
    with stepping() as world:
        yield Ranks(world)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with alone() as ranks:
        yield ranks


def test_an_order_that_takes_no_time_costs_rank_0_one_message_of_each_other_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, told = peer._share, []

    def counted(transfer: Transfer) -> Any:
        told.append(transfer.own.rank)
        return share(transfer)

    monkeypatch.setattr(peer, "_share", counted)
    ranks.publish(0)
    ranks.order(1)
    ranks.world.run(500)
    parts = [ranks.reserve(rank) for rank in range(len(RANKS))]
    ranks.world.run(5000)
    assert {part.state for part in parts} == {TransferState.DONE} and parts[0].over
    assert sorted(told) == list(range(1, len(RANKS)))


def test_two_ranks_that_have_ended_do_not_tell_each_other_so_for_ever(ranks: Ranks) -> None:
    """While neither has heard from the other's part that it has."""
    first, second = ranks.own(0), ranks.own(1)
    ranks.world.run(500)
    for transfer in (first, second):
        ranks.stop(transfer)
    for _ in range(100):
        if not (steps := [step for rank in (0, 1) for step in ranks.calls("Abort", rank)]):
            break
        steps[0]()
        ranks.world.loop.settle()
        ranks.world.calls = [call for call in ranks.world.calls if not call.over]
    else:
        raise AssertionError("they abort each other for ever")
    assert not first.over
    ranks.world.run(500)
    assert first.over and second.over


def test_a_rank_that_has_said_done_stays_done_when_its_stream_breaks(ranks: Ranks) -> None:
    ranks.publish(0)
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


@pytest.mark.parametrize("named", [False, True])
def test_an_engine_that_names_two_leases_is_done_at_no_leader(ranks: Ranks, *, named: bool) -> None:
    """Each rank reads what it is told by name; rank 0 is told none, or another. Each hears that they differ."""
    ranks.publish(0)
    first = ranks.reserve(0, order=ORDER_1 if named else ORDER)
    ranks.run_without(lambda: {step for rank in (1, 2) for step in ranks.calls("Order", rank)})
    ranks.world.loop.call(ranks.source.engine.leases.revoke, "r", "preempted")
    ranks.publish(0)
    others = [ranks.reserve(rank, order=ORDER_2) for rank in (1, 2)]
    ranks.world.run(5000)
    assert [part.lease for part in (first, *others) if part.state is TransferState.DONE] == [1]
    assert {part.problem.code for part in others if part.problem} == {"order_conflict"}
    assert first.state_of_all is TransferState.FAILED
    assert {share.error.code for share in first.ranks.values() if share.error} == {"order_conflict"}


def test_a_rank_is_told_no_lease_by_its_engine_alone(ranks: Ranks) -> None:
    """Rank 0, which has handed its order on, was told none: it may read another."""
    ranks.own(0)
    ranks.world.run(500)
    with pytest.raises(Conflict) as refused:
        ranks.reserve(1, order=ORDER_1)
    assert (refused.value.code, refused.value.field) == ("order_conflict", "source.lease")


def test_orders_of_one_source_are_completed_by_each_other_and_never_changed() -> None:
    lease, epoch = dataclasses.replace(ORDER, lease=1), dataclasses.replace(ORDER, epoch="prefill-1")
    assert lease.naming(epoch) == epoch.naming(lease) == ORDER.naming(ORDER_1) == ORDER_1
    assert ORDER_1.naming(lease) == ORDER_1.naming(ORDER) == ORDER_1
    assert not ORDER_1.same_source(dataclasses.replace(ORDER_1, epoch="prefill-2"))
    assert not epoch.same_source(dataclasses.replace(lease, epoch="prefill-2"))
    assert epoch.same_source(lease) and lease.same_source(ORDER_1) and ORDER.same_source(ORDER_1)


DEEDS = (Ranks.order, Ranks.order, Ranks.reserve, Ranks.reserve, Ranks.own, Ranks.own, Ranks.own_named,
         Ranks.anew, Ranks.publish, Ranks.abort, Ranks.restart)  # fmt: skip
DONE_AT = st.tuples(st.sampled_from(DEEDS), st.integers(0, len(RANKS) - 1), st.integers(0, 30), st.integers(0, 7))
"""Deeds: what is done, at which rank, the steps before the next, and of which of those under way."""


@seed(int(os.environ["STEPWISE_SEED"]))
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(DONE_AT, min_size=2, max_size=14))
def test_ranks_come_to_rest_whatever_happens_and_call_none_done_that_is_not(
    deeds: list[tuple[Callable[[Ranks, int], object], int, int, int]],
) -> None:
    with alone() as ranks:
        for deed, rank, steps, choice in deeds:
            with contextlib.suppress(KvferryError):  # refused
                deed(ranks, rank)
            for _ in range(steps):
                ranks.world.step(choice)
        ranks.come_to_rest()
        every = [transfer for daemon in ranks.daemons for transfer in daemon.ferry.jobs]
        assert all(transfer.over and transfer.quiet.is_set() for transfer in every)
        for transfer in every:
            for share in transfer.ranks.values():
                part = ranks.part(share.rank, transfer.attempt.number)
                assert share.state is not TransferState.DONE or part is None or part.state is TransferState.DONE
        read = defaultdict[int, set[tuple[str, int]]](set)
        for transfer in every:
            if transfer.state is TransferState.DONE:
                read[transfer.attempt.number].add((transfer.source_epoch, transfer.lease))
        assert all(len(leases) == 1 for leases in read.values()), read
        for request in (*ranks.asked, *ranks.stopping):
            assert request.exception() is None or isinstance(request.exception(), KvferryError)
        assert not ranks.world.loop.problems


def test_a_deadline_says_that_rank_0_has_not_said_which_lease_it_reads(ranks: Ranks) -> None:
    ranks.publish(0)
    ranks.world.run(500)
    transfer = ranks.own(1)
    ranks.world.run(5000)
    assert transfer.state is TransferState.VERIFYING
    assert "while waiting for rank 0 of the same engine to say which lease it reads" in transfer.work._late().message
