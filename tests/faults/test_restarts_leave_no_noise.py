"""Sources that die under load leave their reader's log clean: every task and stream of theirs has an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from contextlib import AsyncExitStack

import pytest
from fleet import TIMEOUT_S, Daemons, ended
from lives import engine_on
from ranks import Kv, Shape, TestEngine

from kvferry.errors import KvferryError
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
RESTARTS, READERS = 2, 6
NOISE = ("Task was destroyed", "Traceback", "was never", "asynchronous generator", "exception in")
"""Words of asyncio and the collector on a task, a future or a generator that was not ended."""


async def reads_until_it_fails(source: TestEngine, reader: TestEngine, name: str) -> None:
    """Publish and receive, one request after another."""
    number = 0
    while True:
        blocks, number = source.take(16), number + 1
        source.write(Kv.random(16), blocks)
        try:
            await source.publish(f"{name}-{number}", blocks, 16)
            await reader.receive(f"{name}-{number}", reader.take(16), source=source.source())
        except KvferryError:
            return


async def test_a_source_that_dies_under_load(daemons: Daemons, stack: AsyncExitStack) -> None:
    (ours,) = await daemons.start("noise-reader")
    reader, _ = await engine_on(stack, "noise-reader", ours)
    for number in range(RESTARTS):
        (theirs,) = await daemons.start(f"noise-source-{number}")
        async with AsyncExitStack() as life:
            source, _ = await engine_on(life, f"noise-source-{number}", theirs)
            reading = [
                asyncio.create_task(reads_until_it_fails(source, reader, f"{number}-{i}")) for i in range(READERS)
            ]
            lease = await source.publish(f"first-{number}", source.take(16), 16)
            await reader.receive(f"first-{number}", reader.take(16), source=source.source())
            assert lease
            await ended(theirs, signal.SIGKILL)
            await asyncio.wait(reading, timeout=TIMEOUT_S)
            assert all(task.done() for task in reading)
    await leaves_quietly(ours)


@pytest.mark.slow
async def test_a_seed_that_ends_before_the_ranks_that_have_joined_it(daemons: Daemons) -> None:
    seed, *others = await daemons.start("noise-seed", 3)
    engine = await TestEngine.start("noise-seed", [seed, *others], Shape.tp(3, num_blocks=16))
    await leaves_quietly(seed)
    with contextlib.suppress(KvferryError):  # its first session has gone with its daemon
        await engine.close()


async def leaves_quietly(daemon: DaemonService) -> None:
    """Late destructors have run by then."""
    assert await ended(daemon, signal.SIGTERM) == 0
    lines = daemon.log.read_text().splitlines()
    assert [line for line in lines if any(noise in line for noise in NOISE)] == []
    ours = [record for record in map(json.loads, lines) if record["logger"] not in ("nixl", "ucx")]  # a peer has died
    assert [record for record in ours if record["level"] in ("error", "critical")] == []
