"""Engines that come and go."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from fleet import TIMEOUT_S
from ranks import Kv, Rank, Shape, TestEngine

from kvferry.engine import Lease
from kvferry.memory.fences import Fences
from kvferry.router import RouterClient
from kvferry.v1 import engine_pb2
from kvferryd.demo.fleet import DaemonService

TP1 = Shape.tp(1, num_blocks=16)
KILLABLE = Path(__file__).parent / "engine_process.py"


async def engine_on(
    stack: AsyncExitStack, engine_id: str, daemon: DaemonService, shape: Shape = TP1
) -> tuple[TestEngine, RouterClient]:
    router = await stack.enter_async_context(RouterClient(daemon.url))
    engine = await TestEngine.start(engine_id, [daemon], shape)
    stack.push_async_callback(engine.close)
    return engine, router


@asynccontextmanager
async def killable(
    daemon: DaemonService, engine_id: str, what: str, request_id: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, KILLABLE, str(daemon.socket), engine_id, f"epoch of {engine_id}", what, request_id, stdout=-1
    )
    assert process.stdout
    try:
        assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def published(engine: TestEngine, request_id: str, **more: float) -> tuple[Kv, list]:  # type: ignore[type-arg]
    kv, blocks = engine.filled(50)
    return kv, await engine.publish(request_id, blocks, 50, **more)


async def reads_from(reader: TestEngine, source: TestEngine, request_id: str) -> list[Lease]:
    """The KV of a request that the source publishes: every byte comes. The source knows so once its leases end."""
    kv, leases = await published(source, request_id)
    await reader.gets(request_id, kv, source=source.source())
    return leases


async def fences_of(rank: Rank) -> Fences:
    """As `open_fences`, which refuses host memory: here the test is the stream that writes it."""
    client, fences = rank.client, Fences()
    ticket = await client._session.hand_over([fences.file.fileno()])
    opened = await client._session.call(
        client._session.stub.OpenFences, engine_pb2.OpenFencesRequest(session=client._session.id, ticket=ticket)
    )
    assert opened.words == 512
    fences.handed()
    return fences


async def never_written(engine: TestEngine, request_id: str) -> None:
    """A publish behind a fence that nobody reaches."""
    fences, blocks = await fences_of(engine.ranks[0]), engine.take(50)
    await engine.publish(request_id, blocks, 50, after=fences.take())
    fences.close()
