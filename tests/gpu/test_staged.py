"""Staged transfers between daemons beside the first and the last GPU, every byte compared, and strict exposure there.

The arenas are so small (four slots of 256 KiB, three for one direction) that most transfers take many chunks.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from needs import GPUS

# isort: split
import numpy as np
import torch
from fleet import SPOKEN, peer_stub
from gpu_daemons import daemon
from gpu_engine import SHAPES, GpuEngine
from hog import hog
from ranks import HND, Kv, Shape
from slots import Outcomes, failed, idle, reading

from kvferry.memory import cuda
from kvferry.router import RouterClient
from kvferry.schemas import LeaseState, TransferRecord
from kvferry.v1 import peer_pb2
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.memory.cuda import read as read_gpu
from kvferryd.transport.agent import Agent
from kvferryd.transport.metadata import parse
from kvferryd.transport.read import Span, TransportError

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
FAR = len(GPUS) - 1
TOKENS, MANY = 300, 5000
MARK = 0xA5
STAGED = ("--way", "staged", "--arena-mb", "1")
STRICT = ("--strict", "--arena-mb", "1", "--ucx", "TLS=all")
BIG = Shape(num_blocks=640)


@pytest.fixture(scope="module")
async def near(fleet: Fleet) -> DaemonService:
    return await daemon(fleet, "near", 0, *STAGED)


@pytest.fixture(scope="module")
async def far(fleet: Fleet) -> DaemonService:
    return await daemon(fleet, "far", FAR, *STAGED)


@asynccontextmanager
async def engines(
    near: Sequence[DaemonService],
    far: Sequence[DaemonService],
    *shapes: Shape,
    adopted: bool = False,
    arena_mb: int = 1,
) -> AsyncIterator[tuple[GpuEngine, GpuEngine]]:
    """A source (two ranks lie on the first and the last GPU) and a destination on the last; all slots come back."""
    source = await GpuEngine.on("source", near, [0, FAR][: len(near)], shapes[0], adopted=adopted)
    try:
        destination = await GpuEngine.on("destination", far, [FAR] * len(far), shapes[1], adopted=adopted)
        try:
            yield source, destination
            await idle([*near, *far], arena_mb << 20)
        finally:
            await destination.close()
    finally:
        await source.close()


async def moved(source: GpuEngine, destination: GpuEngine, tokens: int = TOKENS, way: str = "staged") -> TransferRecord:
    """A request, prefilled and received; everything else on the destination stays as it is."""
    request_id = uuid.uuid4().hex
    kv, given, taken = Kv.random(tokens), source.take(tokens), destination.take(tokens)
    source.write(kv, given)
    expected = destination.snapshot()
    destination.write_into(expected, kv, taken)
    leases = await source.publish(request_id, given, tokens)
    received = await destination.receive(request_id, taken, source=source.source())
    assert destination.differences(expected) == ""
    assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * len(leases)
    async with RouterClient(destination.daemons[0].url) as router:
        record = await router.transfer(received[0].transfer_id)
    assert record.path == way, record
    return record


@pytest.mark.parametrize("adopted", [False, True], ids=["owned", "adopted"])
@pytest.mark.parametrize(("source_shape", "shape"), SHAPES.values(), ids=SHAPES)
async def test_every_layout_arrives_staged(near, far, source_shape: Shape, shape: Shape, adopted: bool) -> None:
    async with engines([near], [far], source_shape, shape, adopted=adopted) as (source, destination):
        for _ in range(3):
            await moved(source, destination)


@pytest.mark.parametrize("tokens", [1, MANY])
async def test_few_slots_carry_many_chunks(near, far, tokens: int) -> None:
    shape = Shape(axes=HND, block_size=24, num_blocks=480)
    async with engines([near], [far], BIG, shape) as (source, destination):
        record = await moved(source, destination, tokens)
        assert record.descriptors == 1 if tokens == 1 else record.descriptors > 8


async def test_chunks_of_megabytes(fleet) -> None:
    flags = ("--way", "staged", "--arena-mb", "64")
    near, far = await daemon(fleet, "wide", 0, *flags), await daemon(fleet, "wide", FAR, *flags)
    shapes = Shape(num_blocks=4096), Shape(axes=HND, block_size=64, num_blocks=1024)
    async with engines([near], [far], *shapes, arena_mb=64) as (source, destination):
        for _ in range(2):
            assert (await moved(source, destination, 60_000)).descriptors > 2


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "shape", [Shape.tp(2, num_blocks=640), Shape(((0, 6), (0, 6)), num_blocks=640)], ids=["halves", "replicas, as MLA"]
)
async def test_two_ranks_become_one(fleet, far, shape: Shape) -> None:
    first = await daemon(fleet, "tp", 0, *STAGED)
    second = await daemon(fleet, "tp", FAR, *STAGED, roster=first)
    into = Shape(axes=HND, block_size=64, num_blocks=160)
    async with engines([first, second], [far], shape, into) as (source, destination):
        for tokens in (TOKENS, MANY):
            await moved(source, destination, tokens)


async def test_two_engines_that_read_from_each_other_share_few_slots(near, far) -> None:
    async with engines([near], [far], BIG, Shape(axes=HND, num_blocks=640)) as (one, other):
        written = []
        for n in range(12):
            source, reader = (one, other) if n % 2 else (other, one)
            tokens = 700 - 20 * n
            kv, published, reserved = Kv.random(tokens), source.take(tokens), reader.take(tokens)
            source.write(kv, published)
            written.append((source, reader, kv, published, reserved, uuid.uuid4().hex))
        expected = {id(engine): engine.snapshot() for engine in (one, other)}
        for _, reader, kv, _, reserved, _ in written:
            reader.write_into(expected[id(reader)], kv, reserved)
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(source.publish(name, published, kv.tokens) for source, _, kv, published, _, name in written),
                *(
                    reader.receive(name, reserved, source=source.source())
                    for source, reader, _, _, reserved, name in written
                ),
            )
        for engine in (one, other):
            assert engine.differences(expected[id(engine)]) == ""


async def test_an_abort_in_flight_gives_every_slot_back(near, far) -> None:
    async with engines([near], [far], BIG, BIG) as (source, destination):
        await moved(source, destination)
        async with (
            hog(source, destination.ranks[0].manifest, uuid.uuid4().hex, TOKENS) as greedy,
            greedy.holding(),
            RouterClient(far.url) as router,
        ):
            kv, given = Kv.random(MANY), source.take(MANY)
            source.write(kv, given)
            await source.publish("stuck", given, MANY)
            receiving: asyncio.Task[Outcomes] = asyncio.create_task(
                destination.outcomes("stuck", destination.take(MANY), source=source.source())
            )
            await reading(router, "stuck")
            await router.abort_request("stuck")
            await failed(receiving, {"aborted"})
        await idle([near, far])
        await moved(source, destination, MANY)


async def test_blocks_that_were_packed_for_a_reader_that_fails_are_packed_again_for_the_next(near, far) -> None:
    async with engines([near], [far], BIG, BIG) as (source, destination):
        request_id = uuid.uuid4().hex
        async with hog(source, destination.ranks[0].manifest, request_id, 20) as slow:
            async with slow.holding(slow.opening.chunks):
                """All is packed, and nothing is read."""
            await destination.receive(request_id, destination.take(20), source=source.source())


async def test_auto_maps_where_every_way_can_be_taken(fleet) -> None:
    arena = ("--arena-mb", "64")
    near, far = await daemon(fleet, "auto", 0, *arena), await daemon(fleet, "auto", FAR, *arena)
    async with engines([near], [far], Shape(), Shape(axes=HND), arena_mb=64) as (source, destination):
        await moved(source, destination, way="mapped")
        async with RouterClient(far.url) as router:
            (peer,) = await router.peers()
        assert peer.ways == {"mapped": "", "staged": "", "direct": ""}


async def test_strict_daemons_stage_and_expose_slots_only(fleet) -> None:
    near, far = await daemon(fleet, "strict", 0, *STRICT), await daemon(fleet, "strict", FAR, *STRICT)
    async with engines([near], [far], Shape(), Shape(axes=HND)) as (source, destination):
        assert (await moved(source, destination)).transport == "cuda_ipc"
        async with RouterClient(far.url) as router:
            (peer,) = await router.peers()
        assert peer.ways["staged"] == ""
        assert "strict" in peer.ways["direct"] and "strict" in peer.ways["mapped"]
        async with peer_stub(near) as stub:
            said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=source.engine_id))
            mapping = stub.Map(peer_pb2.MapRequest(engine_id=source.engine_id, epoch=source.epoch))
            mappable = await mapping.read()
            assert not mappable.regions and "strict" in mappable.refusal
            assert (
                mappable.slots.allocation.allocation_nbytes - said.staging.nbytes <= cuda.GRANULE
            )  # and nothing beside them
            mapping.cancel()
        assert not said.regions
        source.ranks[0].tensor.fill_(MARK)
        torch.cuda.synchronize(0)
        async with spy() as (agent, landing):
            metadata = parse(said.agent_name, said.agent_metadata)
            await agent.add_peer(metadata)
            said.agent_name = metadata.alias
            await read(agent, said.agent_name, landing, said.staging.address)
            # The cache was allocated before the arena: somewhere around it, as are 2 MiB of the agent's own.
            for granules in (*range(-64, 0), *range(1, 64)):
                try:
                    got = await read(agent, said.agent_name, landing, said.staging.address + granules * cuda.GRANULE)
                except TransportError:
                    continue
                assert got.count(MARK) < len(got)
        assert near.process.poll() is None


async def test_of_an_open_daemon_the_very_same_read_of_the_cache_succeeds(fleet) -> None:
    near = await daemon(fleet, "open", 0)
    source = await GpuEngine.on("source", [near], [0], Shape(), adopted=False)
    async with peer_stub(near) as stub:
        said = await stub.Handshake(peer_pb2.HandshakeRequest(**SPOKEN, engine_id=source.engine_id))
    source.ranks[0].tensor.fill_(MARK)
    torch.cuda.synchronize(0)
    async with spy() as (agent, landing):
        metadata = parse(said.agent_name, said.agent_metadata)
        await agent.add_peer(metadata)
        said.agent_name = metadata.alias
        got = await read(agent, said.agent_name, landing, said.regions[0].address)
    assert got.count(MARK) == len(got)
    await source.close()


@asynccontextmanager
async def spy() -> AsyncIterator[tuple[Agent, Span]]:
    """A NIXL agent on the last GPU, and memory of it to read into."""
    gpu = GPUS[FAR]
    agent = Agent(f"spy-{uuid.uuid4().hex}", device=gpu)
    await agent.start()
    landing = Span(gpu.alloc(cuda.GRANULE), cuda.GRANULE, "cuda", gpu.index)
    try:
        await agent.register(landing)
        yield agent, landing
    finally:
        assert await agent.close()
        gpu.free(landing.address)


async def read(agent: Agent, peer: str, landing: Span, address: int) -> bytes:
    """4 KiB of the first GPU's memory in the peer's process."""
    own = np.array([(landing.address, 4096, landing.device)], dtype=np.uint64)
    far = np.array([(address, 4096, 0)], dtype=np.uint64)
    async with asyncio.timeout(10):
        await agent.read(peer, own, far, "VRAM", "VRAM").done
    return read_gpu(GPUS[FAR], landing.address, 4096)
