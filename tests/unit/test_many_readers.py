"""More ranks, or more names for one, than a daemon keeps: the work that each of them is for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stepped import Daemon, manifest_of, stepping
from stepwise import World

from kvferry.protocol import peers
from kvferry.tables import BlockTable
from kvferryd.staging.share import PAIRINGS
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.transfer import Transfer

SOURCE = "127.0.0.1:7000"


@pytest.fixture
def world() -> Iterator[World]:
    with stepping() as world:
        yield world


def receive(reader: Daemon, request_id: str, source: str = SOURCE) -> Transfer:
    """A staged transfer, run until nothing goes on. source: where it is asked for."""
    world, jobs = reader.world, reader.ferry.jobs
    reservation = Reservation({"full": BlockTable.of([0, 1])}, None)
    order = Order("prefill", source, way="staged")
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


def test_a_peer_is_known_by_so_many_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order may name it otherwise each time, where allow_peers has a pattern that the names match."""
    monkeypatch.setattr(peers, "NAMES", 4)
    source = Daemon(world, SOURCE, manifest_of("prefill", heads=2), {0: SOURCE}, way="staged")
    reader = Daemon(world, "127.0.0.1:7001", manifest_of("decode", heads=2), {0: "127.0.0.1:7001"}, way="staged")
    for number in range(7):
        name = f"127.0.1.{number + 1}:7000"
        world.processes[name] = source.process
        source.publish(f"r-{number}", range(2))
        assert receive(reader, f"r-{number}", name).problem is None
        (peer,) = reader.ferry.peers_known
        assert {SOURCE, name} <= peer.addresses
    assert len(peer.addresses) == 1 + 4
    before = world.asked["Handshake"]
    source.publish("known", range(2))
    assert receive(reader, "known", name).problem is None
    assert world.asked["Handshake"] == before
