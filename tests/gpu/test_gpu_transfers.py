"""KV between daemons beside GPUs, each a process of its own: every way, every layout change, compared byte by byte."""

from __future__ import annotations

import asyncio
import uuid

import numpy as np
import pytest
from needs import GPUS

from support import refused

# isort: split

from gpu_daemons import daemon
from gpu_engine import SHAPES, GpuEngine
from ranks import DIM, HEADS, HND, LAYERS, STATE, Kv, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
FAR = len(GPUS) - 1
TOKENS = 300


@pytest.fixture(scope="module")
async def beside(fleet: Fleet) -> DaemonService:
    """A second daemon beside the first GPU."""
    return await daemon(fleet, "beside", 0)


@pytest.fixture(scope="module")
async def mapped(fleet: Fleet) -> DaemonService:
    return await daemon(fleet, "mapped", FAR, "--way", "mapped")


async def moved(source: TestEngine, destination: GpuEngine, way: str, tokens: int = TOKENS) -> None:
    """A request, prefilled and received; everything else on the destination stays as it is."""
    request_id = uuid.uuid4().hex
    kv, given, taken = Kv.random(tokens), source.take(tokens), destination.take(tokens)
    source.write(kv, given)
    expected = destination.snapshot()
    destination.write_into(expected, kv, taken)
    await source.publish(request_id, given, tokens)
    received = await destination.receive(request_id, taken, source=source.source())
    assert destination.differences(expected) == ""
    async with RouterClient(destination.daemons[0].url) as router:
        record = await router.transfer(received[0].transfer_id)
    assert record.path == way, (record, await peers(destination))
    assert record.transport == ("cuda_ipc" if way == "mapped" else "UCX")


async def peers(engine: TestEngine):
    async with RouterClient(engine.daemons[0].url) as router:
        return await router.peers()


@pytest.mark.parametrize("adopted", [False, True], ids=["owned", "adopted"])
@pytest.mark.parametrize(("source_shape", "shape"), SHAPES.values(), ids=SHAPES)
async def test_every_layout_arrives_mapped(near, far, source_shape: Shape, shape: Shape, adopted: bool) -> None:
    source = await GpuEngine.on("source", [near], [0], source_shape, adopted=adopted)
    destination = await GpuEngine.on("destination", [far], [FAR], shape, adopted=adopted)
    for _ in range(3):
        await moved(source, destination, "mapped")
    await asyncio.gather(source.close(), destination.close())


async def test_two_daemons_share_a_gpu(near, beside) -> None:
    source = await GpuEngine.on("source", [near], [0], Shape(), adopted=False)
    destination = await GpuEngine.on("destination", [beside], [0], Shape(axes=HND), adopted=False)
    await moved(source, destination, "mapped")
    await asyncio.gather(source.close(), destination.close())


@pytest.mark.parametrize("adopted", [False, True], ids=["owned", "adopted"])
async def test_direct_can_be_forced(near, direct, adopted: bool) -> None:
    source = await GpuEngine.on("source", [near], [0], Shape(), adopted=adopted)
    destination = await GpuEngine.on("destination", [direct], [FAR], Shape(axes=HND), adopted=False)
    await moved(source, destination, "direct")
    (peer,) = await peers(destination)
    assert peer.ways["mapped"] == "", "it could, it was told not to"
    await asyncio.gather(source.close(), destination.close())


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
async def test_two_ranks_on_two_gpus_become_one(fleet, near, far) -> None:
    first = await daemon(fleet, "tp", 0)
    second = await daemon(fleet, "tp", FAR, roster=first)
    source = await GpuEngine.on("source", [first, second], [0, FAR], Shape.tp(2), adopted=False)
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(axes=HND, block_size=64), adopted=False)
    for _ in range(2):
        await moved(source, destination, "mapped")
    await asyncio.gather(source.close(), destination.close())


async def test_what_cannot_be_mapped_goes_direct_and_says_why(fleet, far) -> None:
    host = await daemon(fleet, "host", None)
    source = await TestEngine.start("source", [host], Shape())
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(axes=HND), adopted=False)
    await moved(source, destination, "direct")
    (peer,) = await peers(destination)
    assert "host memory" in peer.ways["mapped"]
    await asyncio.gather(source.close(), destination.close())


async def test_a_forced_way_that_is_impossible_fails_and_says_why(fleet, mapped) -> None:
    host = await daemon(fleet, "host", None)
    source = await TestEngine.start("source", [host], Shape())
    destination = await GpuEngine.on("destination", [mapped], [FAR], Shape(), adopted=False)
    kv, given = Kv.random(50), source.take(50)
    source.write(kv, given)
    await source.publish("forced", given, 50)
    with refused("way_unavailable", TransferFailed, match="host memory") as caught:
        await destination.receive("forced", destination.take(50), source=source.source())
    assert caught.value.blocks_safe
    await asyncio.gather(source.close(), destination.close())


@pytest.mark.parametrize("way", ["mapped", "direct", "staged"])
async def test_what_the_tokens_leave_of_the_blocks_is_zero(near, far, way: str) -> None:
    """All of the cache is poisoned with NaN first."""
    source = await GpuEngine.on("source", [near], [0], Shape(), adopted=False)
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(axes=HND, block_size=64), adopted=False)
    for tokens in (5, 100, 300):
        request_id, room = uuid.uuid4().hex, -(-tokens // 64) * 64
        for rank in destination.ranks:
            rank.tensor.fill_(0xFF)
        kv, given, taken = Kv.random(tokens), source.take(tokens), destination.take(tokens)
        source.write(kv, given)
        expected = destination.snapshot()
        nothing = Kv(np.zeros((LAYERS, 2, room, HEADS, DIM), np.uint16), np.zeros((HEADS, STATE), np.uint16))
        destination.write_into(expected, nothing, taken, (3, room))
        destination.write_into(expected, kv, taken, (3, tokens))
        await source.publish(request_id, given, tokens)
        received = await destination.receive(request_id, taken, (3, tokens), source=source.source(), way=way, zero=True)
        assert destination.differences(expected) == ""
        async with RouterClient(destination.daemons[0].url) as router:
            assert (await router.transfer(received[0].transfer_id)).path == way
    await asyncio.gather(source.close(), destination.close())
