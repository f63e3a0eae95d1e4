"""More readers of one shape than a daemon keeps plans: the work that each of them is for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stepped import Daemon, manifest_of, stepping
from stepwise import World

from kvferry.tables import BlockTable
from kvferryd.staging.share import PAIRINGS
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

SOURCE = "127.0.0.1:7000"


@pytest.fixture
def world() -> Iterator[World]:
    with stepping() as world:
        yield world


def receive(reader: Daemon, request_id: str) -> Transfer:
    """A staged transfer, run until nothing goes on."""
    world, jobs = reader.world, reader.ferry.jobs
    reservation = Reservation({"full": BlockTable.of([0, 1])}, None)
    order = Order("prefill", SOURCE, way="staged")
    with world.within(reader.process):
        transfer: Transfer = world.loop.call(jobs.receive, reader.engine, request_id, 1, reservation, order, None)
    world.run()
    return transfer


def test_readers_of_one_shape_share_a_plan_and_each_pairs_once(world: World) -> None:
    source = Daemon(world, SOURCE, manifest_of("prefill", heads=2), {0: SOURCE}, way="staged")
    readers = []
    for number in range(PAIRINGS + 1):
        address = f"127.0.0.1:{7001 + number}"
        manifest = manifest_of(f"decode-{number}", heads=2)
        readers.append(Daemon(world, address, manifest, {0: address}, way="staged"))
    for turn in range(2):
        for number, reader in enumerate(readers):
            request_id = f"r-{turn}-{number}"
            source.publish(request_id, range(2))
            assert receive(reader, request_id).problem is None
    assert world.asked["Pair"] == len(readers)
    assert len(source.engine.pairings) == 1
