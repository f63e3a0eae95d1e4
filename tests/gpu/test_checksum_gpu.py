"""Checksums on GPUs: the same as the host's, on every path, and a byte that changed fails the transfer."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from needs import GPUS

# isort: split
import torch
from fleet import under_way, until
from gpu_daemons import daemon
from gpu_engine import GpuEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import HND, Blocks, Kv, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferryd.copy import cut, moves
from kvferryd.copy.chunks import ALIGN
from kvferryd.copy.sums import GpuSums, HostSums
from kvferryd.demo.fleet import Fleet
from kvferryd.plan import bind, plan

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from strategies import Case, cases
from test_copy_host import sources_of

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
GPU, FAR = GPUS[-1], len(GPUS) - 1
FIRST, ALL = 30, 300
WAYS = {"mapped": ("--way", "mapped"), "staged": ("--way", "staged", "--arena-mb", "1"), "direct": ("--way", "direct")}


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[GpuSums]:
    sums = GpuSums(GPU, 5)  # few programs, so that each goes round often
    yield sums
    sums.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(ALIGN, 3 * ALIGN), st.integers(0, 15))
def test_a_gpu_sums_as_the_host_does(on_gpu: GpuSums, case: Case, chunk_nbytes: int, shift: int) -> None:
    """The bytes may lie anywhere: a source and a reader seldom have the same alignment."""
    bound = bind(plan(case.sources, case.destination), case.source_tables, case.destination_tables, case.tokens)
    for rank, memory in sources_of(case).items():
        chunks = [chunk for chunk in cut(moves(bound), chunk_nbytes) if chunk.source_rank == rank]
        regions = {region: torch.from_numpy(held) for region, held in memory.arrays.items()}
        there = {
            region: torch.empty(len(held) + 32, dtype=torch.uint8, device=GPU.index) for region, held in regions.items()
        }
        for region, held in regions.items():
            there[region][shift : shift + len(held)] = held
        torch.cuda.synchronize(GPU.index)
        addresses = {region: held.data_ptr() + shift for region, held in there.items()}
        theirs = HostSums()(chunks, lambda chunk, at, memory=memory: chunk.gather(memory.addresses(), at))
        assert on_gpu(chunks, lambda chunk, at, addresses=addresses: chunk.gather(addresses, at)) == theirs


@dataclass
class Scene:
    source: TestEngine
    reader: GpuEngine
    router: RouterClient
    way: str


@pytest.fixture(scope="module", params=[*WAYS, "from host memory"])
async def scene(fleet: Fleet, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """From the first GPU (or the host) to the last, other blocks, other axes. Only the reader compares."""
    host = request.param not in WAYS
    way = "direct" if host else request.param
    theirs, ours = await asyncio.gather(
        daemon(fleet, "source", None if host else 0, *(WAYS["staged"] if way == "staged" else ())),
        daemon(fleet, "reader", FAR, *WAYS[way], "--checksum"),
    )
    if host:
        source = await TestEngine.start("source", [theirs], Shape())
    else:
        source = await GpuEngine.on("source", [theirs], [0], Shape(), adopted=False)
    reader = await GpuEngine.on("reader", [ours], [FAR], Shape(axes=HND, block_size=24), adopted=False)
    async with RouterClient(ours.url) as router:
        yield Scene(source, reader, router, way)
    await asyncio.gather(source.close(), reader.close())


def flip(engine: TestEngine, blocks: Blocks) -> None:
    """Flip a bit of the first token's block."""
    (rank,) = engine.ranks
    held = rank.memory
    before = held.copy()
    paged, _ = engine.shape.arrays(0, held)
    paged[0, 0, blocks.ids[0]].flat[0] ^= 1
    (at,) = np.flatnonzero(held != before)
    if isinstance(engine, GpuEngine):
        rank.tensor[int(at)] ^= 1  # type: ignore[attr-defined]
        torch.cuda.synchronize()


def written(engine: TestEngine) -> tuple[Kv, Blocks]:
    kv, blocks = Kv.random(ALL), engine.take(ALL)
    engine.write(kv, blocks)
    return kv, blocks


async def test_what_arrives_whole_is_done(scene: Scene) -> None:
    request_id = uuid.uuid4().hex
    kv, blocks = written(scene.source)
    leases = await scene.source.publish(request_id, blocks, ALL)
    reserved = scene.reader.take(ALL)
    expected = scene.reader.snapshot()
    scene.reader.write_into(expected, kv, reserved)
    (received,) = await scene.reader.receive(request_id, reserved, source=scene.source.source())
    assert not scene.reader.differences(expected)
    assert (await scene.router.transfer(received.transfer_id)).path == scene.way
    await asyncio.gather(*(lease.ended() for lease in leases))


@pytest.mark.parametrize("side", ["source", "destination"])
async def test_a_bit_that_changes_after_it_was_moved_fails_the_transfer(scene: Scene, side: str) -> None:
    """The first tokens are read while more are to come; then one of their bits changes, on either side."""
    request_id = uuid.uuid4().hex
    _, blocks = written(scene.source)
    reserved = scene.reader.take(ALL)
    await scene.source.publish(request_id, blocks, FIRST, more=True)

    async def first_part_is_there() -> bool:
        (record,) = await scene.router.transfers(request_id) or [None]
        return record is not None and len(record.ranks) > 0 and record.ranks[0].bytes > 0

    async with under_way(scene.reader.receive(request_id, reserved, source=scene.source.source())) as received:
        await until(first_part_is_there, "the first tokens are read")
        flip(scene.source, blocks) if side == "source" else flip(scene.reader, reserved)
        await scene.source.publish(request_id, blocks, ALL)
        with pytest.raises(TransferFailed) as failed:
            await received
    assert failed.value.code == "checksum_mismatch"
