"""Engines that die, and what becomes of what they published, received and held."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import TIMEOUT_S, Daemons, owned_regions, retired, until
from lives import TP1, engine_on, killable, published
from pair import Pair, all_read, is_in
from ranks import Kv, TestEngine

from kvferry.engine import TransferFailed
from kvferry.protocol.session_events import Rank
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import OrderBody, SourceBody, TransferState
from kvferryd.config import Config
from kvferryd.demo.fleet import DaemonService
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics
from kvferryd.transport.agent import Agent
from kvferryd.transport.read import Span
from support import refused

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from caches import NHD, array, cache

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def shared_daemon(shared_daemons: Daemons) -> DaemonService:
    (daemon,) = await shared_daemons.start("survivor")
    return daemon


@pytest.fixture
async def daemon(shared_daemon: DaemonService) -> DaemonService:
    """Without any engine."""
    await retired(shared_daemon)
    return shared_daemon


async def test_what_a_killed_engine_published_stays_readable_and_then_its_memory_goes(
    pair: Pair, daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    router = await stack.enter_async_context(RouterClient(daemon.url))
    async with killable(daemon, "mortal-a", "publish", request_id) as process:
        process.kill()

    async def detached() -> bool:
        return not any(engine.attached for engine in await router.engines())

    await until(detached, "the daemon sees the engine's death")
    assert [lease.request_id for lease in await router.leases()] == [request_id]
    assert not (await router.ready()).ready
    source = SourceBody(engine_id="mortal-a", address=daemon.peer)
    await pair.decode.gets(request_id, Kv.random(50, seed=1), source=source)

    async def retired() -> bool:
        return not await router.engines() and not owned_regions(daemon)

    await until(retired, "engine and memory are gone")
    assert await router.healthy()


async def test_a_reader_is_told_at_once_when_an_engine_dies_in_the_middle_of_its_prefill(
    pair: Pair, daemon: DaemonService, request_id: str
) -> None:
    unborn = f"{request_id}-unborn"
    async with killable(daemon, "mortal-b", "publish-partly", request_id) as process:
        source = SourceBody(engine_id="mortal-b", address=daemon.peer)
        reading = asyncio.create_task(pair.decode.outcomes(request_id, pair.decode.take(50), source=source))
        waiting = asyncio.create_task(pair.decode.outcomes(unborn, pair.decode.take(50), source=source))
        await all_read(pair.routers[0], request_id)
        await until(lambda: is_in(pair.routers[0], unborn, TransferState.CONNECTING), "all ranks wait for the other")
        process.kill()
        async with asyncio.timeout(TIMEOUT_S):
            outcomes = [*await reading, *await waiting]
    codes = {outcome.code for outcome in outcomes if isinstance(outcome, TransferFailed)}
    assert len([outcome for outcome in outcomes if isinstance(outcome, TransferFailed)]) == 6
    assert "lease_ended" in codes
    assert codes <= {"lease_ended", "rank_failed", "aborted", "torn", "unknown_engine", "stale_epoch"}


async def test_what_a_killed_engine_was_to_receive_is_ended(
    daemon: DaemonService, stack: AsyncExitStack, pair: Pair, request_id: str
) -> None:
    router = await stack.enter_async_context(RouterClient(daemon.url))
    async with killable(daemon, "mortal-c", "receive", request_id) as process:

        async def reserved() -> object:
            return await router.transfers(request_id)

        await until(reserved, "the reservation arrives")
        process.kill()
        (record,) = await router.transfers(request_id, wait_s=TIMEOUT_S)
    assert record.state is TransferState.FAILED
    assert record.error
    assert record.error.code == "engine_gone"
    with refused("unknown_engine", DaemonError):
        await router.order(OrderBody(request_id="another", source=pair.prefill.source()))


async def test_an_engine_that_dies_while_it_registers_leaves_nothing(
    daemon: DaemonService, stack: AsyncExitStack
) -> None:
    _, router = await engine_on(stack, "cradle", daemon)
    idle = owned_regions(daemon)
    for _ in range(3):
        starting = asyncio.create_task(TestEngine.start("stillborn", [daemon], TP1))

        async def allocated() -> bool:
            return owned_regions(daemon) > idle

        await until(allocated, "it has memory and registers")
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():  # it was quicker than this look at it
            await starting.result().close()

        async def gone() -> bool:
            return owned_regions(daemon) == idle and len(await router.engines()) == 1

        await until(gone, "nothing is left of it")


async def test_a_dead_engines_leases_outlive_it_only_as_long_as_their_ttl(
    daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> None:
    engine, router = await engine_on(stack, "mourner", daemon)
    await published(engine, request_id, ttl_s=0.3)
    await engine.close()

    async def gone() -> bool:
        return not await router.leases() and not await router.engines()

    await until(gone, "lease and engine are gone")


async def test_memory_stays_until_what_registers_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is over meanwhile: nothing is unmapped under NIXL."""
    arrays = (array(name, region=n, order=NHD, block=4, slot=4, head=2, dim=8) for n, name in enumerate("kv"))
    manifest = cache(*arrays, engine="e")
    ferry = Ferry(Config(), Metrics())
    session = await ferry.registry.attach(Rank("e", "e-1", 0, 1))
    regions = [
        await session.add(each.id, each.nbytes, lambda n=each.nbytes: ferry.memory.allocate(n))
        for each in manifest.regions
    ]
    register, ending = Agent.register, asyncio.create_task(asyncio.sleep(0))

    async def registers(agent: Agent, *spans: Span) -> bytes:
        nonlocal ending
        if regions[0].span in spans:
            ending = asyncio.create_task(ferry.registry.end(session.id, leave=True))
            await asyncio.wait([ending], timeout=0.3)
            assert list(session.regions.values()) == regions
        return await register(agent, *spans)

    monkeypatch.setattr(Agent, "register", registers)
    with refused("session_closed"):
        await ferry.registry.register(session, manifest)
    async with asyncio.timeout(60):
        await ending
    assert not session.regions
    assert session.engine is None
    await ferry.close()
