"""A source of two ranks, read by one: what one says while the other still serves. They take one step at a time
(stepwise.py)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from stepped import BLOCKS, PIECE, SLOTS, Daemon, manifest_of
from stepwise import Step, World

from kvferry.errors import Conflict
from kvferry.protocol.claims import Claims
from kvferry.schemas import TransferState
from kvferryd.peers.peer import PeerEngine
from kvferryd.peers.peers import Meeting
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.staging.share import PAIRINGS
from kvferryd.transfers.order import Order
from kvferryd.transfers.transfer import Transfer
from kvferryd.transport.read import Read

SOURCES, READER = ("127.0.0.1:7001", "127.0.0.1:7002"), "127.0.0.1:7003"


class Two:
    """Two sources and their reader, which have shaken hands."""

    def __init__(self, world: World) -> None:
        self.world = world
        members = dict(enumerate(SOURCES))
        self.sources = [
            Daemon(world, address, manifest_of("prefill", heads=2, rank=rank, of=2), members, way="staged")
            for rank, address in members.items()
        ]
        self.reader = Daemon(world, READER, manifest_of("decode", heads=2), {0: READER}, way="staged")
        self.attempt = 0
        peers = self.reader.ferry.peers_known
        with world.within(self.reader.process):
            meeting = world.loop.create_task(peers.of(self.reader.engine).get("prefill", SOURCES[0]))
        world.loop.settle()
        world.run()
        self.peer = meeting.result()

    def receive(self, request_id: str, blocks: range, way: str) -> Transfer:
        self.attempt += 1
        return self.reader.receive(request_id, self.attempt, blocks, Order("prefill", SOURCES[0], way=way))

    def publish(self, request_id: str, blocks: range, *, anew: bool = False) -> None:
        """On both. anew: what was published before is taken back."""
        for source in self.sources:
            if anew:
                self.world.loop.call(source.engine.leases.revoke, request_id, "preempted")
            source.publish(request_id, blocks)

    def of_calls(self) -> list[Step]:
        return [step for address in SOURCES for step in self._calls(address)]

    def _calls(self, address: str) -> list[Step]:
        return [step for call in self.world.calls if call._address == address for step in call.steps()]

    def is_there(self, blocks: range) -> bool:
        """Whether the reader has of each rank what is its own."""
        own = self.reader.memory.reshape(2, BLOCKS, SLOTS, 2, PIECE)[:, blocks.start : blocks.stop]
        theirs = [each.memory.reshape(2, BLOCKS, SLOTS, PIECE)[:, blocks.start : blocks.stop] for each in self.sources]
        return all(np.array_equal(own[:, :, :, rank], theirs[rank]) for rank in (0, 1))


@pytest.fixture
def two(world: World) -> Two:
    return Two(world)


def test_a_rank_that_has_forgotten_its_pairing_makes_another_though_a_rank_has_packed_all(two: Two) -> None:
    blocks, world = range(1), two.world
    two.publish("r", blocks)
    world.run()  # its announcements arrive
    two.sources[1].forget_pairings()
    transfer = two.receive("r", blocks, "staged")
    packed_all_of_rank_0(two)
    assert transfer.state is TransferState.READING
    world.run()
    assert transfer.problem is None and two.is_there(blocks)
    assert not any(len(source.engine.leases) for source in two.sources)


def packed_all_of_rank_0(two: Two) -> None:
    """Rank 1's daemon is not heard meanwhile. Rank 0 keeps the lease then: the attempt may fail."""

    def all_but_rank_1() -> list[Step]:
        copying = [each for copies in two.world.copies[::2] for each in list(copies.queue)[:1]]
        return [*two._calls(SOURCES[0]), *(each.step for each in [*two.world.flights(), *copying])]

    two.world.take_all(all_but_rank_1)
    assert two.sources[0].engine.leases.get("r") is not None


def test_a_peer_that_is_forgotten_in_the_turn_in_which_it_was_met_is_not_read_from(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forgotten by another handshake or a router, after the handshake has ended and before the transfer that
    began it goes on."""
    blocks, world, peers = range(4), two.world, two.reader.ferry.peers_known
    two.publish("r", blocks)
    world.run()
    (meeting,) = peers._of.values()
    world.loop.call(meeting.forget, two.peer)
    world.run()
    transfer = two.receive("r", blocks, "staged")
    met: list[PeerEngine] = []

    keep = meeting._keep

    def forget_soon(number: int) -> None:
        keep(number)
        met.append(meeting._met[number])
        asyncio.get_running_loop().call_soon(meeting.forget, met[0])

    monkeypatch.setattr(meeting, "_keep", forget_soon)
    two.world.take_all(two.of_calls, until=lambda: bool(met))
    assert not met[0].users
    monkeypatch.undo()
    world.run()
    assert transfer.problem is None and two.is_there(blocks)
    assert not met[0].loaded


@pytest.mark.parametrize("failing", ["close_reading", "leave", "release", "tell", "on_end", "on_quiet"])
@pytest.mark.parametrize("done", [True, False])
def test_an_end_whose_step_fails_does_all_others(
    two: Two, monkeypatch: pytest.MonkeyPatch, failing: str, *, done: bool
) -> None:
    blocks, world = range(1), two.world
    transfer = two.receive("r", blocks, "direct")
    world.run()
    left = two.reader.ferry.jobs.left
    owner = {
        "close_reading": ReaderStream, "leave": Meeting, "release": Claims, "tell": type(two.reader.engine.session),
        "on_end": transfer.work._around, "on_quiet": transfer.work._around,
    }[failing]  # fmt: skip
    whole, calls = getattr(owner, failing), []

    def broken(*args: Any, **more: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return whole(*args, **more)

    if isinstance(owner, type):
        monkeypatch.setattr(owner, failing, broken)
    else:
        transfer.work._around = dataclasses.replace(owner, **{failing: broken})
    if done:
        two.publish("r", blocks)
    else:
        world.loop.call(transfer.stop, TransferState.ABORTED, Conflict("aborted", "by the test"))
    world.run()
    assert calls and transfer.ended.is_set() and transfer.quiet.is_set()
    assert transfer.state is (TransferState.DONE if done else TransferState.ABORTED)
    assert failing == "on_quiet" or two.reader.ferry.jobs.left == left - 1
    assert failing == "leave" or not two.peer.users
    assert failing in ("release", "on_quiet") or not two.reader.ferry.jobs.requests.sizes()["claims"]
    if done:
        held = [len(source.engine.leases) for source in two.sources]
        assert held == ([1, 0] if failing == "close_reading" else [0, 0])
    assert not world.loop.problems


def test_a_read_that_has_begun_is_known_of_where_the_next_one_cannot_begin(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are not safe before it is quiet."""
    blocks, world, agent = range(4), two.world, two.reader.engine.agent
    begin, begun = agent.read, []

    def only_one(*rows: Any) -> Read:
        if begun:
            raise MemoryError
        begun.append(begin(*rows))
        return begun[0]

    monkeypatch.setattr(agent, "read", only_one)
    transfer = two.receive("r", blocks, "direct")
    two.publish("r", blocks)
    two.world.take_all(two.of_calls)
    assert transfer.state is TransferState.FAILED and begun[0].abandoned
    assert not transfer.quiet.is_set() and len(world.flights()) == 1
    world.run()
    assert transfer.quiet.is_set() and begun[0].quiet.done()


def test_a_deadline_says_at_which_sources_the_proof_is_awaited(two: Two) -> None:
    transfer = two.receive("r", range(1), "direct")
    two.publish("r", range(1))
    two.world.take_all(two.world.pending, lambda: transfer.state is TransferState.VERIFYING)
    two.world.loop.pass_time(61)
    assert transfer.problem is not None and transfer.problem.code == "deadline"
    assert f"while reading at {', '.join(SOURCES)} whether the lease held" in transfer.problem.message


def test_readers_of_one_shape_share_a_plan_and_each_pairs_once(world: World) -> None:
    """More of them than a daemon keeps plans."""
    source = Daemon(world, SOURCES[0], manifest_of("prefill", heads=2), {0: SOURCES[0]}, way="staged")
    readers = []
    for number in range(PAIRINGS + 1):
        address = f"127.0.0.1:{7101 + number}"
        manifest = manifest_of(f"decode-{number}", heads=2)
        readers.append(Daemon(world, address, manifest, {0: address}, way="staged"))
    for turn in range(2):
        for number, reader in enumerate(readers):
            request_id = f"r-{turn}-{number}"
            source.publish(request_id, range(2))
            transfer = reader.receive(request_id, 1, [0, 1], Order("prefill", SOURCES[0], way="staged"))
            world.run()
            assert transfer.problem is None
    assert world.asked["Pair"] == len(readers)
    assert len(source.engine.pairings) == 1
