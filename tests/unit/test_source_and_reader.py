"""A source and its reader, each a whole daemon, one step at a time (stepwise.py): what one does between two steps of
the other, and what is kept of a transfer that is over."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import weakref
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepped import BLOCKS, SLOTS, Daemon, manifest_of, stepping
from stepwise import Copies, World

from kvferry.errors import Internal
from kvferry.file import File
from kvferry.memory import CudaRegion, cuda
from kvferry.schemas import Awaited, TransferState
from kvferry.tables import BlockTable
from kvferry.v1 import engine_pb2, peer_pb2
from kvferryd.api.callers import Callers
from kvferryd.api.node import NodeSocket
from kvferryd.api.peer import PeerService
from kvferryd.memory import Probe, Region
from kvferryd.memory.node import SOCKET, NodeDir
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.record import record_of
from kvferryd.transfers.transfer import Transfer
from kvferryd.transport.read import Span

SOURCE, READER = "127.0.0.1:7001", "127.0.0.1:7002"


class Pair:
    """They have not met."""

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

    def receive(
        self,
        blocks: range,
        way: str,
        *,
        tokens: tuple[int, int] | None = None,
        epoch: bool = False,
        deadline_s: float | None = None,
    ) -> Transfer:
        """tokens: those that are wanted; None for all of the blocks."""
        order = Order("prefill", SOURCE, self.source.engine.epoch if epoch else "", deadline_s=deadline_s, way=way)
        self.attempt += 1
        return self.reader.receive("r", self.attempt, blocks, order, tokens or (0, SLOTS * len(blocks)))

    def order(self, blocks: list[int], order_id: str = "") -> tuple[Transfer, weakref.ref[BlockTable]]:
        """A router orders it and names the blocks; the world runs until nothing goes on."""
        table = BlockTable.of(blocks)
        brought = {0: Reservation({"full": table}, None)}
        jobs, engine = self.reader.ferry.jobs, self.reader.engine
        transfer, _ = self.reader.at(jobs.order, engine, "r", Order("prefill", SOURCE), brought, order_id=order_id)
        self.world.run()
        return transfer, weakref.ref(table)

    def break_streams(self) -> None:
        """Both sides see it."""
        for stream in self.world.streams():
            stream.break_down()
            while steps := stream.steps():
                steps[0]()
                self.world.loop.settle()

    def is_there(self, blocks: range) -> bool:
        return np.array_equal(*(each.memory.reshape(2, BLOCKS, -1)[:, blocks] for each in (self.source, self.reader)))


@pytest.fixture
def pair(world: World) -> Pair:
    return Pair(world)


# ---- the source's daemon dies ----


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("epoch", [False, True], ids=["any epoch", "the epoch that is ordered"])
def test_a_stream_is_for_the_daemon_that_was_met(pair: Pair, way: str, *, epoch: bool) -> None:
    """It dies after it has answered and before the stream is opened. The engine has attached to the next daemon at its
    address by then, in the same epoch. The next daemon refuses the stream by name, and is met within the same
    request."""
    blocks, world = range(4), pair.world
    transfer = pair.receive(blocks, way, epoch=epoch)
    while not world.asked["Pair"]:  # the last that is asked before the stream
        assert world.step(0)
    assert not pair.source.engine.leases.inbound()
    pair.restart()
    pair.source.publish("r", blocks)
    world.run()
    assert transfer.state is TransferState.DONE and transfer.problem is None and pair.is_there(blocks)


def test_a_deadline_that_passes_while_a_lost_source_is_looked_for_ends_the_transfer(pair: Pair) -> None:
    """The source has said that nothing is published yet. Then its stream breaks, and the reader shakes hands again."""
    transfer = pair.receive(range(1), "direct", deadline_s=5.0)
    pair.world.run()
    assert transfer.waits_for is Awaited.PUBLISH
    pair.break_streams()
    pair.world.loop.pass_time(6.0)
    assert transfer.problem is not None and transfer.problem.code == "deadline"


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_an_engine_is_told_which_tokens_have_come(pair: Pair, way: str) -> None:
    """It has the first one already."""
    pair.source.publish("r", range(2))
    tokens = [it.memory.reshape(2, BLOCKS * SLOTS, -1) for it in (pair.source, pair.reader)]
    before = tokens[1].copy()
    pair.receive(range(2), way, tokens=(1, 4))
    pair.world.run()
    told = pair.reader.engine.session.events.pop().transfer_ended
    assert (told.state, told.tokens.start, told.tokens.stop) == (TransferState.DONE, 1, 4)
    assert told.nbytes == tokens[0][:, 1:4].nbytes
    assert np.array_equal(tokens[0][:, 1:4], tokens[1][:, 1:4])
    assert np.array_equal(np.delete(before, [1, 2, 3], 1), np.delete(tokens[1], [1, 2, 3], 1))


def test_slots_that_are_mapped_are_scattered_from_where_they_are(pair: Pair) -> None:
    """No READ of a slot, and the source has it back only when the copy is over."""
    world, source, blocks = pair.world, pair.source.engine, range(8)
    world.maps_slots = True
    pair.source.publish("r", blocks)
    transfer = pair.receive(blocks, "staged")
    arena, scatters = source.arena, pair.reader.engine.arena
    assert arena is not None and scatters is not None and isinstance(scatters.copies, Copies)
    slots, copied = range(arena.span.address, arena.span.address + arena.span.nbytes), 0
    while world.step(0):
        assert not [flight for flight in world.flights() for address, *_ in flight.read.remote if int(address) in slots]
        copied = max(copied, len(scatters.copies.queue))
        assert arena.used_nbytes >= len(scatters.copies.queue) * arena.slot_nbytes
    told = record_of(transfer)
    assert (told.state, told.path, told.transport) == (TransferState.DONE, "staged", "cuda_ipc")
    assert copied and pair.is_there(blocks) and not arena.used_nbytes and not scatters.used_nbytes


@pytest.mark.parametrize("strict", ["", "the source", "the reader"])
def test_slots_are_handed_over_as_a_cache_is_to_readers_of_the_node_alone(
    pair: Pair, tmp_path: Path, strict: str
) -> None:
    """Memory of cuMemCreate, as far as messages tell: a file, and a probe."""
    source, node = pair.source, NodeDir(tmp_path)
    arena = source.engine.arena
    assert arena is not None
    with ExitStack() as undo:
        arena.region, cache = (of_files(span, undo) for span in (arena.span, source.engine.session.regions[0].span))
        source.engine.session.regions[0] = cache
        config = source.ferry.config.model_copy(update={"strict": strict == "the source"})
        source.ferry.node, source.ferry.config = node, config
        source.process.service = PeerService(
            source.ferry, Callers(source.ferry.config.allow_peers, None), NodeSocket(node, "GPU-0")
        )
        for its, offered in ((node.id, True), ("1" * 32, False), ("", False)):
            with pair.world.within(pair.reader.process):
                asked = peer_pb2.MapRequest(
                    engine_id="prefill", epoch=source.engine.epoch, node=its, strict=strict == "the reader"
                )
                call: Any = pair.reader.ferry.peers_known.channels.open(SOURCE).stub.Map(asked)
                reading = pair.world.loop.create_task(call.__anext__())
            pair.world.run()
            reply = reading.result()
            assert (f"{strict} is strict" in reply.refusal) is bool(strict) and len(reply.regions) == (not strict)
            for each in (reply.slots, *reply.regions):
                assert bool(each.shared.ticket) is offered and ("node_dir" in each.refusal) is not offered
            assert bool(re.fullmatch(SOCKET, reply.socket)) is offered
            call.cancel()
            pair.world.run()


class Gpu:
    """The reader's, played: what it maps are addresses, and its probe of the source's memory holds or not."""

    def __init__(self, *, probe: bool) -> None:
        self.probe, self.mapped = probe, list[CudaRegion]()

    async def open(self, allocation: cuda.Exported, nbytes: int, probe: Probe) -> CudaRegion:
        if not self.probe:
            raise Internal("probe_failed", "the mapped memory is not what the source has there")
        self.mapped.append(CudaRegion(0, "cuda", nbytes, allocation.offset, "cuda:0", Any))
        return self.mapped[-1]

    async def unmap(self, regions: Sequence[CudaRegion]) -> None:
        for each in regions:
            self.mapped.remove(each)


@pytest.mark.parametrize("held", [True, False])
def test_a_peers_ways_tell_of_slots_whose_probe_does_not_hold(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, held: bool
) -> None:
    source, reader = pair.source, pair.reader
    assert source.engine.arena is not None
    given = engine_pb2.CudaAllocation(handle=b"slots", allocation_nbytes=source.engine.arena.span.nbytes)
    told = engine_pb2.Memory(nbytes=given.allocation_nbytes, cuda=given)
    source.engine.arena.region = Region(
        source.engine.arena.span, True, told, ExitStack(), probe=lambda: Probe(0, b"there")
    )
    gpu = Gpu(probe=held)
    pair.receive(range(1), "staged")
    pair.world.run()
    (peer,) = reader.ferry.peers_known
    monkeypatch.setattr(reader.engine, "runner", gpu)
    monkeypatch.setattr(reader.engine, "strict", True)
    mapped = peer.ranks[0].mapped
    with pair.world.within(reader.process):
        mapping = pair.world.loop.create_task(mapped.map(reader.engine, 5.0, None))
        pair.world.loop.settle()
    pair.world.run()
    mapping.result()
    assert (bool(mapped.slots), len(gpu.mapped)) == (held, held)
    (record,) = reader.ferry.peers().peers
    assert ("probe_failed" in record.ways.get("mapped slots", "")) is not held


def of_files(span: Span, undo: ExitStack) -> Region:
    file = undo.enter_context(File(os.memfd_create("memory")))
    told = engine_pb2.Memory(nbytes=span.nbytes, vmm=engine_pb2.CudaAllocations(nbytes=[span.nbytes]))
    return Region(span, True, told, ExitStack(), probe=lambda: Probe(0, b"there"), files=(file,))


# ---- a copy out of the reader's arena ----


@pytest.fixture
def scattering(pair: Pair) -> tuple[Pair, Transfer, Copies]:
    """A token, which is one chunk, has been packed and read, and waits to be scattered."""
    pair.source.publish("r", range(1))
    transfer, arena = pair.receive(range(1), "staged", tokens=(0, 1), deadline_s=5.0), pair.reader.engine.arena
    assert arena is not None
    scatters = arena.copies
    assert isinstance(scatters, Copies)
    while not scatters.queue:
        assert pair.world.step(0)
    return pair, transfer, scatters


def test_a_scatter_that_hangs_does_not_keep_its_transfer_past_the_deadline(
    scattering: tuple[Pair, Transfer, Copies],
) -> None:
    """Its blocks stay claimed, and its slot lent, until the copy has ended."""
    pair, transfer, _ = scattering
    arena, requests = pair.reader.engine.arena, pair.reader.ferry.jobs.requests
    pair.world.loop.pass_time(6.0)
    assert transfer.problem is not None and transfer.problem.code == "deadline"
    assert requests.sizes()["claims"] and transfer.quarantined_nbytes and arena is not None and arena.used_nbytes
    pair.world.run()
    assert transfer.quiet.is_set() and not arena.used_nbytes and not requests.sizes()["claims"]


def test_what_has_been_read_is_scattered_though_the_source_is_gone(scattering: tuple[Pair, Transfer, Copies]) -> None:
    pair, transfer, scatters = scattering
    pair.break_streams()
    while scatters.queue:
        scatters.queue[0].step()
        pair.world.loop.settle()
    pair.world.run()
    assert transfer.state is TransferState.DONE
    assert np.array_equal(*(it.memory.reshape(2, BLOCKS, SLOTS, -1)[:, 0, 0] for it in (pair.source, pair.reader)))


def test_blocks_are_not_quiet_because_a_wait_for_them_was_cut_off(pair: Pair) -> None:
    """A read goes on landing though the transfer has gone back to the source for another lease; the deadline ends the
    wait for its end."""
    blocks, world = range(1), pair.world
    pair.source.publish("r", blocks)
    pair.receive(blocks, "direct")
    world.run()
    pair.source.publish("r", blocks)
    world.run()  # it is announced
    transfer = pair.receive(blocks, "direct", deadline_s=5.0)
    (flight,) = world.flights()
    flight.step()
    world.loop.call(pair.source.engine.leases.revoke, "r", "preempted")
    flight.fail()
    world.loop.settle()
    world.loop.pass_time(6.0)
    assert transfer.ended.is_set() and not transfer.quiet.is_set()
    assert pair.reader.ferry.jobs.requests.sizes()["claims"]
    world.run()
    assert transfer.quiet.is_set() and not pair.reader.ferry.jobs.requests.sizes()["claims"]


# ---- what is kept of a transfer that is over ----


@pytest.mark.parametrize("end", [TransferState.DONE, TransferState.ABORTED])
def test_the_blocks_of_a_transfer_that_is_over_are_not_kept(pair: Pair, end: TransferState) -> None:
    """1.6 MiB of ids for 200,000 tokens in blocks of one, a thousand times over."""
    if end is TransferState.DONE:
        pair.source.publish("r", range(2))
    transfer, table = pair.order([4, 5])
    if end is TransferState.ABORTED:
        pair.world.loop.call(pair.reader.ferry.abort_here, pair.reader.engine, "r", "a test")
        pair.world.run()
    assert transfer.state is end and transfer.quiet.is_set()
    told = record_of(transfer)
    gc.collect()
    assert table() is None, gc.get_referrers(table())
    assert record_of(transfer) == told


# ---- the source drains ----


def test_a_wait_for_a_drain_is_answered_when_the_drain_was_cancelled(pair: Pair) -> None:
    pair.source.publish("r", range(1))
    ferry, loop = pair.source.ferry, pair.world.loop
    with pair.world.within(pair.source.process):
        draining = loop.create_task(ferry.drain(60.0, "a test"))
        loop.settle()
        loop.call(ferry.cancel_drain, "a test")
        loop.call(pair.source.engine.leases.revoke, "r", "a test")
    assert draining.done() and not draining.result().draining


LEASES, ENDS, WAITERS = 300, 40, 4


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_end_during_a_drain_starts_no_work_for_what_is_left(cancelled: bool) -> None:
    """Waiting costs as much for each end as one end does."""
    with stepping() as world:
        daemon = Daemon(world, "10.0.0.1:1", manifest_of("drained", heads=1), {0: "10.0.0.1:1"})
        loop, ferry, leases = world.loop, daemon.ferry, daemon.engine.leases
        for number in range(LEASES):
            daemon.publish(f"r{number}", range(1, 3))
        begun = 0

        def counted(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
            nonlocal begun
            begun += 1
            return asyncio.Task(work, loop=loop, **more)

        async def wait() -> bool:
            return (await ferry.drain(1000.0, "a test")).drained

        waiting = [loop.call(asyncio.ensure_future, wait()) for _ in range(WAITERS)]
        loop.settle()
        loop.set_task_factory(counted)
        for number in range(ENDS):
            loop.call(leases.revoke, f"r{number}", "a test")
            loop.settle()
        assert begun < ENDS * (WAITERS + 4), "work for every lease that is left"
        assert not any(each.done() for each in waiting)
        if cancelled:
            loop.call(ferry.cancel_drain, "a test")
        else:
            for number in range(ENDS, LEASES):
                loop.call(leases.revoke, f"r{number}", "a test")
        loop.settle()
        assert [each.result() for each in waiting] == [not cancelled] * WAITERS
