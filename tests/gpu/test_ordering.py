"""The promise of publish: a reader gets the KV that the engine's stream wrote, however late it wrote it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from needs import GPUS

from support import refused

# isort: split
import gpu_engine
import torch
from fleet import until
from gpu_daemons import daemon
from gpu_engine import GpuEngine
from ranks import HND, Blocks, Bytes, Kv, Shape

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.memory.fences import Fence
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
FAR = len(GPUS) - 1
TOKENS = 300
SECOND = 2_000_000_000
"""Cycles of a spinning kernel; H200s run at just below 2 GHz."""
SLACK = 24 << 20


@pytest.fixture(scope="module")
async def near(fleet: Fleet) -> DaemonService:
    return await daemon(fleet, "near", 0, "--fence-timeout-s", "5")


@dataclass
class Pair:
    """Warm: handshakes are done and kernels compiled. `stream` is the one on which the source writes."""

    source: GpuEngine
    destination: GpuEngine
    stream: torch.cuda.Stream
    way: str

    async def fence(self) -> Fence:
        return await self.source.ranks[0].client.fence(self.stream)

    def write_late(self, kv: Kv, blocks: Blocks, cycles: int) -> None:
        """On the stream: a long wait, and then the KV. Returns at once."""
        (wanted,) = self.source.snapshot()
        self.source.write_into([wanted], kv, blocks)
        (rank,) = self.source.ranks
        on_gpu = torch.from_numpy(wanted).to(rank.tensor.device)
        torch.cuda.synchronize(0)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
            rank.tensor.copy_(on_gpu)
        on_gpu.record_stream(self.stream)

    def expected(self, kv: Kv, blocks: Blocks) -> list[Bytes]:
        expected = self.destination.snapshot()
        self.destination.write_into(expected, kv, blocks)
        return expected

    async def receive(self, request_id: str, blocks: Blocks) -> None:
        (received,) = await self.destination.receive(request_id, blocks, source=self.source.source())
        async with RouterClient(self.destination.daemons[0].url) as router:
            assert (await router.transfer(received.transfer_id)).path == self.way


@pytest.fixture(scope="module", params=["mapped", "direct"])
async def pair(fleet: Fleet, near: DaemonService, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    far = await daemon(fleet, f"far-{request.param}", FAR, "--way", request.param)
    source = await GpuEngine.on(f"source-{request.param}", [near], [0], Shape(), adopted=False)
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(axes=HND), adopted=False)
    with torch.cuda.device(0):
        pair = Pair(source, destination, torch.cuda.Stream(), request.param)
    await source.ranks[0].client.open_fences()
    kv, given, taken = Kv.random(TOKENS), source.take(TOKENS), destination.take(TOKENS)
    source.write(kv, given)
    expected = pair.expected(kv, taken)
    await source.publish("warm", given, TOKENS)
    await pair.receive("warm", taken)
    assert destination.differences(expected) == ""
    yield pair
    await asyncio.gather(source.close(), destination.close())


async def test_the_race_is_real(pair: Pair) -> None:
    """The control: published without waiting in any way, the reader gets what lay in the blocks before."""
    if FAR == 0 and pair.way == "direct":
        pytest.skip("needs two GPUs: on one, UCX's copies may wait until the kernel that spins has ended")
    request_id = uuid.uuid4().hex
    old, new, given, taken = (
        Kv.random(TOKENS),
        Kv.random(TOKENS),
        pair.source.take(TOKENS),
        pair.destination.take(TOKENS),
    )
    pair.source.write(old, given)
    was, wanted = pair.expected(old, taken), pair.expected(new, taken)
    pair.write_late(new, given, SECOND)
    await pair.source.publish(request_id, given, TOKENS)
    await pair.receive(request_id, taken)
    assert not pair.stream.query(), "the stream was still to write"
    assert pair.destination.differences(was) == ""
    assert pair.destination.differences(wanted) != ""
    pair.stream.synchronize()


async def test_a_stream_that_is_synchronised_first_is_the_simple_way(pair: Pair) -> None:
    request_id = uuid.uuid4().hex
    kv, given, taken = Kv.random(TOKENS), pair.source.take(TOKENS), pair.destination.take(TOKENS)
    expected = pair.expected(kv, taken)
    pair.write_late(kv, given, SECOND // 10)
    await asyncio.to_thread(pair.stream.synchronize)
    await pair.source.publish(request_id, given, TOKENS)
    await pair.receive(request_id, taken)
    assert pair.destination.differences(expected) == ""


async def test_a_fence_orders_the_reader_behind_the_stream(pair: Pair) -> None:
    request_id = uuid.uuid4().hex
    old, new, given, taken = (
        Kv.random(TOKENS),
        Kv.random(TOKENS),
        pair.source.take(TOKENS),
        pair.destination.take(TOKENS),
    )
    pair.source.write(old, given)
    expected = pair.expected(new, taken)
    pair.write_late(new, given, SECOND // 4)
    fence = await pair.fence()
    (lease,) = await pair.source.publish(request_id, given, TOKENS, after=fence)
    assert not pair.stream.query(), "nobody has waited"
    await pair.receive(request_id, taken)
    assert pair.stream.query(), "the reader has"
    assert pair.destination.differences(expected) == ""
    await asyncio.wait_for(lease.ended(), 10)


async def test_a_racing_writer_is_never_seen_halfway(pair: Pair) -> None:
    """Requests one behind the other on the stream, read as soon as they can be."""
    count = 20
    wanted, receiving, taken = pair.destination.snapshot(), [], []
    for n in range(count):
        kv, given, blocks = Kv.random(40), pair.source.take(40), pair.destination.take(40)
        pair.destination.write_into(wanted, kv, blocks)
        taken.append((kv, given, blocks, f"race-{pair.way}-{n}"))
    (held,) = pair.source.snapshot()
    (rank,) = pair.source.ranks
    images = []
    for kv, given, _, _ in taken:
        pair.source.write_into([held], kv, given)
        images.append(torch.from_numpy(held).to(rank.tensor.device))
    torch.cuda.synchronize(0)
    for (_, given, blocks, request_id), image in zip(taken, images, strict=True):
        with torch.cuda.stream(pair.stream):
            torch.cuda._sleep(SECOND // 100)
            rank.tensor.copy_(image)
        await pair.source.publish(request_id, given, 40, after=await pair.fence())
        receiving.append(asyncio.create_task(pair.receive(request_id, blocks)))
    await asyncio.wait_for(asyncio.gather(*receiving), 60)
    assert pair.destination.differences(wanted) == ""


async def test_a_fence_that_is_never_reached_ends_the_lease(pair: Pair) -> None:
    request_id = uuid.uuid4().hex
    near = pair.source.daemons[0]
    kv, given, taken = Kv.random(TOKENS), pair.source.take(TOKENS), pair.destination.take(TOKENS)
    pair.write_late(kv, given, 10 * SECOND)
    (lease,) = await pair.source.publish(request_id, given, TOKENS, after=await pair.fence())
    (outcome,) = await pair.destination.outcomes(request_id, taken, source=pair.source.source(), deadline_s=30)
    assert isinstance(outcome, TransferFailed)
    assert outcome.code == "fence_timeout", outcome
    assert outcome.blocks_safe
    with refused("fence_timeout"):
        await asyncio.wait_for(lease.ended(), 10)
    async with RouterClient(near.url) as router:
        assert not [each for each in await router.leases() if each.request_id == request_id]
    await asyncio.to_thread(pair.stream.synchronize)
    again, expected = uuid.uuid4().hex, pair.expected(kv, taken)
    await pair.source.publish(again, given, TOKENS, after=await pair.fence())
    await pair.receive(again, taken)
    assert pair.destination.differences(expected) == "", "the next fence is reached"


async def test_a_stream_that_is_being_captured_has_no_fence(pair: Pair) -> None:
    client = pair.source.ranks[0].client
    assert client.fences is not None
    with torch.cuda.device(0):
        counter = torch.zeros(1, device="cuda:0")
        torch.cuda.synchronize(0)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            counter.add_(1)
            with pytest.raises(KvferryError) as refused:
                client.fences.after(stream)
    assert refused.value.code == "stream_capturing"
    assert client.fences.pending == []


async def test_an_engine_killed_while_a_fence_is_pending_leaves_nothing(pair: Pair) -> None:
    near, before = pair.source.daemons[0], [0] * len(GPUS)
    for n in range(2):
        engine_id, request_id = f"victim-{pair.way}-{n}", uuid.uuid4().hex
        command = [sys.executable, gpu_engine.__file__, str(near.socket), engine_id, request_id, "fenced"]
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  # killed below
        try:
            assert await asyncio.to_thread(victim.stdout.readline) == "published\n"
            source = SourceBody(engine_id=engine_id, address=near.peer)
            receiving = asyncio.create_task(
                pair.destination.outcomes(request_id, pair.destination.take(40), (0, 40), source=source)
            )
            await asyncio.sleep(1)
            assert not receiving.done()
        finally:
            victim.kill()
            victim.wait()
            victim.stdout.close()
        (outcome,) = await asyncio.wait_for(receiving, 30)
        assert isinstance(outcome, TransferFailed)
        assert outcome.blocks_safe

        async def gone() -> bool:
            gc.collect()
            async with RouterClient(near.url) as router:
                if [engine for engine in await router.engines() if engine.engine_id.startswith("victim")]:
                    return False
            return all(gpu.memory()[0] >= then - SLACK for gpu, then in zip(GPUS, before, strict=True))  # noqa: B023

        await until(gone, "the engine, its memory and its lease are gone")
        await asyncio.sleep(1)
        before = [gpu.memory()[0] for gpu in GPUS]
