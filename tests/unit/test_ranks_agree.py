"""The ranks of one engine, each a whole daemon, and what they say to each other about a request. One step at a time
(stepwise.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stepped import ARENA, Daemon, manifest_of
from stepwise import Step, Stream, World

from kvferry.errors import Conflict
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
                daemon.ferry.jobs.receive, daemon.engine, "r", reservation, None, None
            )

    def stop(self, transfer: Transfer) -> None:
        self.world.loop.call(transfer.stop, TransferState.ABORTED, Conflict("aborted", "by the test"))

    def calls(self, method: str, to: int) -> list[Step]:
        return [
            step for call in self.world.calls if (call._method, call._address) == (method, RANKS[to])
            for step in call.steps()
        ]  # fmt: skip


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    world = World(ARENA)
    with pytest.MonkeyPatch.context() as patched:
        world.patch(patched)
        yield Ranks(world)
        world.dispose()


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
