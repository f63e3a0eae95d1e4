"""A source's daemon dies between what it has told a reader and what the reader does with that. One step at a time
(stepwise.py): the engine has attached to the next daemon at its address by then, in the same epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from stepped import BLOCKS, SLOTS, Daemon, manifest_of, stepping
from stepwise import World

from kvferry.schemas import TransferState
from kvferry.tables import BlockTable
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

SOURCE, READER = "127.0.0.1:7001", "127.0.0.1:7002"


class Pair:
    """A source and its reader, which have not met."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.source = self.start()
        self.reader = Daemon(world, READER, manifest_of("decode", heads=2), {0: READER}, way="staged")
        self.attempt = 0

    def start(self) -> Daemon:
        return Daemon(self.world, SOURCE, manifest_of("prefill", heads=2), {0: SOURCE}, way="staged")

    def restart(self) -> None:
        self.world.kill(self.source.process)
        self.source = self.start()

    def receive(self, blocks: range, way: str, *, epoch: bool = False) -> Transfer:
        reservation = Reservation({"full": BlockTable.of(list(blocks))}, (0, SLOTS * len(blocks)))
        order = Order("prefill", SOURCE, self.source.engine.epoch if epoch else "", way=way)
        self.attempt += 1
        with self.world.within(self.reader.process):
            transfer: Transfer = self.world.loop.call(
                self.reader.ferry.jobs.receive, self.reader.engine, "r", self.attempt, reservation, order, None
            )
        return transfer

    def is_there(self, blocks: range) -> bool:
        return np.array_equal(*(each.memory.reshape(2, BLOCKS, -1)[:, blocks] for each in (self.source, self.reader)))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with stepping() as world:
        yield Pair(world)


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("epoch", [False, True], ids=["any epoch", "the epoch that is ordered"])
def test_a_stream_is_for_the_daemon_that_was_met(pair: Pair, way: str, *, epoch: bool) -> None:
    """It dies after it has answered and before the stream is opened. The next daemon refuses that by name, and is met
    within the same request."""
    blocks, world = range(4), pair.world
    transfer = pair.receive(blocks, way, epoch=epoch)
    while not world.asked["Pair"]:  # the last that is asked before the stream
        assert world.step(0)
    assert not pair.source.engine.leases.inbound()
    pair.restart()
    pair.source.publish("r", blocks)
    world.run()
    assert transfer.state is TransferState.DONE and transfer.problem is None and pair.is_there(blocks)
