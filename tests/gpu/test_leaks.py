"""Leftovers on the GPUs: none, after many transfers and after every kind of death in the middle."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from needs import GPUS

# isort: split
import torch
import traffic
from fleet import open_files, until
from gpu_daemons import daemon
from traffic import CASE, COUNT, EARLY, SAME

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.bench.gpu_cases import POISON, Cache
from kvferryd.bench.gpu_engines import Engine
from kvferryd.bench.gpu_measure import measure, publish, receive
from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
WAY = "mapped"
MIB = 1 << 20
POOL, SLACK, KILLED_SLACK = 256 * MIB, 24 * MIB, 64 * MIB
"""An engine's pool, and what the driver itself, UCX and torch take and return: no pool can hide in that."""
TRANSFERS, WARM_UP = 1000, 100
LIMIT_S = 60.0
NEAR, FAR = 0, len(GPUS) - 1


@pytest.fixture(scope="module")
async def pair(fleet: Fleet) -> tuple[DaemonService, DaemonService]:
    """The daemons that live through every test: of the source, of the reader. Both have moved something."""
    near, far = await asyncio.gather(daemon(fleet, "source", NEAR), daemon(fleet, "reader", FAR, "--way", WAY))
    async with source_on(near) as source, reader_on(far) as reader:
        await moves(source, reader)
    return near, far


@asynccontextmanager
async def engine(engine_id: str, beside: DaemonService, caches: list[Cache], gpu: int) -> AsyncIterator[Engine]:
    opened = await Engine.open(engine_id, [beside], caches, [] if gpu < 0 else [gpu], False)
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def source_on(beside: DaemonService, engine_id: str = "source") -> AsyncIterator[Engine]:
    async with engine(engine_id, beside, CASE.pair.sources(), NEAR) as opened:
        opened.fill(CASE.pair.sources())
        yield opened


@asynccontextmanager
async def reader_on(beside: DaemonService, engine_id: str = "reader") -> AsyncIterator[Engine]:
    async with engine(engine_id, beside, CASE.pair.destinations(), FAR) as opened:
        yield opened


@asynccontextmanager
async def running(role: str, beside: DaemonService, gpu: int, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The engine "victim" as a process of its own, ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, traffic.__file__, role, str(beside.socket), "victim", str(gpu), *more, stdin=-1, stdout=-1
    )
    try:
        await says(process, b"ready\n")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def says(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), LIMIT_S) == line


async def moves(source: Engine, reader: Engine) -> None:
    """The two still do what they are for: every size, every word compared, and the way that is meant."""
    for case in SAME:
        row = await measure(case, WAY, source, reader, repeats=1, warm_up=0)
        assert WAY in (row.path, "auto")


async def read(
    reader: Engine, prefix: str, source: SourceBody, kill: Callable[[], None]
) -> tuple[int, KvferryError | None]:
    """Receive one request after another and kill while one is under way. How many arrived, and why the next did not."""
    async with asyncio.timeout(LIMIT_S):
        for number in range(COUNT):
            reading = asyncio.create_task(traffic.receive(reader, prefix, number, source))
            if number == EARLY:
                await asyncio.sleep(0)  # the order leaves
                kill()
            try:
                await reading
            except KvferryError as why:
                return number, why
    return COUNT, None


def free() -> list[int]:
    gc.collect()
    if GPUS:
        torch.cuda.empty_cache()
    return [gpu.memory()[0] for gpu in GPUS]


async def back_to(before: list[int], slack: int, what: str) -> None:
    async def is_back() -> bool:
        return all(now >= then - slack for now, then in zip(free(), before, strict=True))

    await until(is_back, f"memory is back {what}; it was {before}, before this wait it is {free()}")


def driver_mappings(of: DaemonService) -> int:
    """Mappings that the process has of the driver."""
    return Path(f"/proc/{of.process.pid}/maps").read_text().count("/dev/nvidia")


async def has_no(engine_id: str, at: DaemonService) -> None:
    async with RouterClient(at.url) as router:

        async def gone() -> bool:
            return engine_id not in [engine.engine_id for engine in await router.engines()]

        await until(gone, f"{at.name} has retired {engine_id}")


async def test_a_thousand_transfers_leave_nothing(pair) -> None:
    near, far = pair
    async with source_on(near) as source, reader_on(far) as reader:
        await moves(source, reader)
        tables = [[[{"full": BlockTable.of(blocks)} for blocks in side] for side in case.ids()] for case in SAME]
        for number in range(TRANSFERS):
            if number == WARM_UP:
                before, files = free(), [open_files(each) for each in pair]
                mapped = [driver_mappings(each) for each in pair]
            case, (given, taken) = SAME[number % len(SAME)], tables[number % len(SAME)]
            await receive(case, source, reader, await publish(case, source, given), taken)
        await moves(source, reader)
        await back_to(before, SLACK, f"after {TRANSFERS - WARM_UP} transfers")

        async def as_many() -> bool:
            return all(open_files(each) <= then for each, then in zip(pair, files, strict=True))

        await until(as_many, f"there are {[open_files(each) for each in pair]} files open, there were {files}")
        assert all(driver_mappings(each) <= then for each, then in zip(pair, mapped, strict=True))


async def knows_no(engine_id: str, at: DaemonService) -> None:
    """Its peers tell a daemon that an engine is gone: what was mapped of it is unmapped."""
    async with RouterClient(at.url) as router:

        async def forgotten() -> bool:
            return engine_id not in [peer.engine_id for peer in await router.peers()]

        await until(forgotten, f"{at.name} has forgotten {engine_id}")


@pytest.mark.parametrize("memory", ["owned", "adopted"])
async def test_a_killed_engine_of_the_source(pair, memory: str) -> None:
    """Its leases in the daemon's memory stay readable to the last request; memory of its own goes at once."""
    near, far = pair
    before, prefix = free(), f"source-{memory}"
    async with reader_on(far) as reader, running("publish", near, NEAR, prefix, memory) as victim:
        reader.wipe(POISON)
        arrived, why = await read(reader, prefix, SourceBody(engine_id="victim", address=near.peer), victim.kill)
        if memory == "owned":
            assert (arrived, why) == (COUNT, None)
            reader.synchronize()
            CASE.check(CASE.ids(), 0, reader.ranks[0].pool)
        else:
            assert EARLY <= arrived < COUNT
            assert isinstance(why, TransferFailed)
            await asyncio.wait_for(why.quiesced(), LIMIT_S)
        await has_no("victim", near)
        await knows_no("victim", far)
    async with source_on(near) as source, reader_on(far) as reader:
        await moves(source, reader)
    await back_to(before, KILLED_SLACK, "after the source's engine was killed")


async def test_a_killed_daemon_of_the_source(fleet: Fleet, pair) -> None:
    near, far = pair
    before = free()
    victim = await daemon(fleet, "source-victim", NEAR)
    async with reader_on(far) as reader:
        async with source_on(victim) as source:
            await traffic.publish(source, "victim")
            arrived, why = await read(reader, "victim", source.source, lambda: victim.signal(signal.SIGKILL))
            assert EARLY <= arrived < COUNT
            assert isinstance(why, TransferFailed)
            await asyncio.wait_for(why.quiesced(), LIMIT_S)
            await asyncio.wait_for(source.ranks[0].client.closed.wait(), LIMIT_S)
        async with source_on(near) as other:
            await moves(other, reader)
    await back_to(before, KILLED_SLACK, "after the source's daemon was killed")


@pytest.mark.skipif(FAR == NEAR, reason="needs two GPUs: on one, UCX maps nothing here, and reads through host memory")
async def test_a_direct_reader_keeps_the_memory_of_a_killed_daemon(fleet: Fleet, pair) -> None:
    """UCX keeps what it has mapped until the reader's daemon ends."""
    near, _ = pair
    start = free()
    direct = await daemon(fleet, "direct-reader", FAR, "--way", "direct")
    async with reader_on(direct) as reader, source_on(near) as living:
        await traffic.publish(living, "warm")
        await traffic.receive(reader, "warm", 0, living.source)
        before = free()
        victim = await daemon(fleet, "source-victim", NEAR)
        async with source_on(victim, "victim") as source:
            await traffic.publish(source, "kept")
            await traffic.receive(reader, "kept", 0, source.source)
            victim.signal(signal.SIGKILL)
            await asyncio.wait_for(source.ranks[0].client.closed.wait(), LIMIT_S)
        await knows_no("victim", direct)
        assert before[NEAR] - free()[NEAR] > POOL - SLACK
    direct.signal(signal.SIGTERM)
    assert await asyncio.to_thread(direct.until_ended, LIMIT_S)
    await back_to(start, KILLED_SLACK, "after the daemon that read directly has ended")


async def test_a_killed_daemon_of_the_reader(fleet: Fleet, pair) -> None:
    near, far = pair
    before = free()
    victim = await daemon(fleet, "reader-victim", FAR, "--way", WAY)
    async with source_on(near) as source:
        async with reader_on(victim) as reader:
            await traffic.publish(source, "orphan")
            arrived, why = await read(reader, "orphan", source.source, lambda: victim.signal(signal.SIGKILL))
            assert EARLY <= arrived < COUNT
            assert why is not None and why.code in ("daemon_gone", "unreachable"), why
        async with reader_on(far) as other:
            await moves(source, other)
    await has_no("source", near)
    await back_to(before, KILLED_SLACK, "after the reader's daemon was killed")


async def test_a_killed_engine_of_the_reader(pair) -> None:
    near, far = pair
    before = free()
    async with source_on(near) as source:
        async with running("receive", far, FAR, "widow", source.engine_id, near.peer) as victim:
            await traffic.publish(source, "widow")
            assert victim.stdin is not None
            victim.stdin.write(b"go\n")
            await says(victim, b"reading\n")
            victim.kill()
            await victim.wait()
        await has_no("victim", far)
        async with reader_on(far) as other:
            await moves(source, other)
    await has_no("source", near)
    await back_to(before, KILLED_SLACK, "after the reader's engine was killed")
