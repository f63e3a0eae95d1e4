"""Transfers that are over keep what their records tell, and by what to know an order that comes again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from stepped import Daemon, manifest_of, stepping
from stepwise import World

from kvferry.errors import KvferryError
from kvferry.schemas import TransferState
from kvferry.tables import BlockTable
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.record import record_of
from kvferryd.transfers.transfer import Transfer

SOURCE, READER = "127.0.0.1:7001", "127.0.0.1:7002"
BLOCKS = [4, 5]


class Between:
    """A source and its reader."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.source = Daemon(world, SOURCE, manifest_of("prefill", heads=2), {0: SOURCE})
        self.reader = Daemon(world, READER, manifest_of("decode", heads=2), {0: READER})

    def order(self, request_id: str, blocks: list[int], order_id: str = "") -> tuple[Transfer, weakref.ref[BlockTable]]:
        """A router orders it and names the blocks; the world runs until nothing goes on."""
        table = BlockTable.of(blocks)
        brought = {0: Reservation({"full": table}, None)}
        with self.world.within(self.reader.process):
            jobs, engine = self.reader.ferry.jobs, self.reader.engine
            transfer, _ = self.world.loop.call(
                jobs.order, engine, request_id, Order("prefill", SOURCE), brought, order_id=order_id
            )
        self.world.run()
        return transfer, weakref.ref(table)


@pytest.fixture
def between() -> Iterator[Between]:
    with stepping() as world:
        yield Between(world)


@pytest.mark.parametrize("end", [TransferState.DONE, TransferState.ABORTED])
def test_the_blocks_of_a_transfer_that_is_over_are_not_kept(between: Between, end: TransferState) -> None:
    """1.6 MiB of ids for 200,000 tokens in blocks of one, a thousand times over."""
    if end is TransferState.DONE:
        between.source.publish("r", range(2))
    transfer, table = between.order("r", BLOCKS)
    if end is TransferState.ABORTED:
        between.world.loop.call(between.reader.ferry.abort_here, between.reader.engine, "r", "a test")
        between.world.run()
    assert transfer.state is end and transfer.quiet.is_set()
    told = record_of(transfer)
    gc.collect()
    assert table() is None, gc.get_referrers(table())
    assert record_of(transfer) == told


def test_an_order_that_comes_again_after_the_end_is_known_by_its_id_and_its_blocks(between: Between) -> None:
    between.source.publish("r", range(2))
    transfer, _ = between.order("r", BLOCKS, "o")
    assert transfer.state is TransferState.DONE
    assert between.order("r", BLOCKS, "o")[0] is transfer
    with pytest.raises(KvferryError, match="order o was given already, otherwise") as refused:
        between.order("r", BLOCKS[::-1], "o")
    assert refused.value.code == "order_conflict"


def test_an_order_without_an_id_that_comes_again_after_the_end_is_another(between: Between) -> None:
    between.source.publish("r", range(2))
    first, _ = between.order("r", BLOCKS)
    assert first.state is TransferState.DONE
    between.source.publish("r", range(2, 4))
    second, _ = between.order("r", BLOCKS)
    assert second is not first and second.state is TransferState.DONE
    assert (first.attempt.number, second.attempt.number) == (1, 2) and first.attempt.by == second.attempt.by != ""
