"""The ranks of one engine, each a whole daemon, and what they say to each other about a request. One step at a time
(stepwise.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from stepped import Daemon, manifest_of, stepping
from stepwise import Step, Stream, World

from kvferry.errors import Conflict, KvferryError
from kvferry.schemas import TransferState
from kvferry.tables import BlockTable
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

SOURCE, RANKS = "127.0.0.1:7001", ("127.0.0.1:7002", "127.0.0.1:7003", "127.0.0.1:7004")
ORDER = Order("prefill", SOURCE, deadline_s=30.0)


class Ranks:
    """A source, and the ranks of one reader."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.source = Daemon(world, SOURCE, manifest_of("prefill", heads=len(RANKS)), {0: SOURCE})
        self.daemons = [self._daemon(rank) for rank in range(len(RANKS))]
        self.stopping: list[asyncio.Task[None]] = []

    def _daemon(self, rank: int) -> Daemon:
        manifest = manifest_of("decode", heads=len(RANKS), rank=rank, of=len(RANKS))
        return Daemon(self.world, RANKS[rank], manifest, dict(enumerate(RANKS)))

    def order(self, rank: int) -> Transfer:
        """At one rank, as a router does; the others get it from there."""
        daemon = self.daemons[rank]
        with self.world.within(daemon.process):
            transfer, _ = self.world.loop.call(daemon.ferry.jobs.order, daemon.engine, "r", ORDER)
        return transfer  # type: ignore[no-any-return]

    def reserve(self, rank: int, blocks: range = range(4)) -> Transfer:
        daemon, reservation = self.daemons[rank], Reservation({"full": BlockTable.of(list(blocks))}, None)
        with self.world.within(daemon.process):
            return self.world.loop.call(  # type: ignore[no-any-return]
                daemon.ferry.jobs.receive, daemon.engine, "r", reservation, None, 30.0
            )

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
        """By the deadline, or what a daemon that stops may take."""
        for _ in range(8):
            self.world.run(2000)
            self.world.loop.pass_time(5.0)
        assert all(task.done() for task in self.stopping)

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


def test_ranks_that_follow_each_other_come_to_rest_while_a_request_waits(ranks: Ranks) -> None:
    """A router has ordered it at each of them."""
    transfers = [ranks.order(rank) for rank in range(len(RANKS))]
    ranks.world.run(500)
    for transfer in transfers:
        assert {share.state for share in transfer.ranks.values()} == {TransferState.WAITING}
        ranks.stop(transfer)
    ranks.world.run(500)
    assert all(transfer.over for transfer in transfers)


def test_two_ranks_that_have_ended_do_not_tell_each_other_so_for_ever(ranks: Ranks) -> None:
    """While neither has heard from the other's part that it has."""
    first, second = (ranks.order(rank) for rank in (0, 1))
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
    assert not first.over and not second.over
    ranks.world.run(500)
    assert first.over and second.over


def test_a_rank_that_has_said_done_stays_done_when_its_stream_breaks(ranks: Ranks) -> None:
    ranks.source.publish("r", range(4))
    transfer = ranks.order(0)
    ranks.reserve(1)
    (orders,) = (call for call in ranks.world.calls if (call._method, call._address) == ("Order", RANKS[1]))
    for _ in range(500):
        if transfer.ranks[1].state is TransferState.DONE:
            break
        ranks.world.step(0)
    assert isinstance(orders, Stream)
    orders.break_down()
    ranks.world.run(500)
    assert transfer.ranks[1].state is TransferState.DONE and transfer.problem is None


DEEDS = (Ranks.order, Ranks.order, Ranks.reserve, Ranks.reserve, Ranks.publish, Ranks.abort, Ranks.restart)
DONE_AT = st.tuples(st.sampled_from(DEEDS), st.integers(0, len(RANKS) - 1), st.integers(0, 30), st.integers(0, 7))
"""What is done, at which rank, the steps before the next, and of which of those under way."""


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
        by_id = {transfer.transfer_id: transfer for transfer in every}
        for transfer in every:
            for share in transfer.ranks.values():
                part = by_id.get(transfer.parts.get(share.rank, ""))
                assert share.state is not TransferState.DONE or part is None or part.state is TransferState.DONE
        assert not ranks.world.loop.problems
