"""Host memory and way = auto: an arena is made when a peer's runs are short, and for nobody else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
from fleet import Daemons, until
from lives import engine_on
from pair import MANY
from ranks import HND, Shape, TestEngine
from slots import gauge

from kvferry.router import RouterClient
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
ARENA = 16 << 20
"""As the fleet's daemons have it."""
LARGE = {"num_blocks": 400, "block_size": 16}


async def arenas(daemons: list[DaemonService]) -> list[float]:
    async with httpx.AsyncClient(trust_env=False) as http:
        return [await gauge(http, daemon, "kvferry_staging_bytes") for daemon in daemons]


async def moves(source: TestEngine, reader: TestEngine, router: RouterClient, request_id: str, tokens: int) -> str:
    """Publish, receive, compare every byte; the way it went."""
    kv, published = source.filled(tokens)
    await source.publish(request_id, published, tokens)
    await reader.gets(request_id, kv, source=source.source())
    (record,) = await router.transfers(request_id)
    return record.path


@pytest.fixture(scope="module")
async def three(shared_daemons: Daemons) -> list[DaemonService]:
    """Two of one source, one reader's."""
    p, d = await asyncio.gather(shared_daemons.start("need-p", 2), shared_daemons.start("need-d"))
    return p + d


async def test_short_runs_make_an_arena_on_both_sides_and_it_goes_with_the_engine(
    three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    source = await TestEngine.start("need-prefill", three[:2], Shape.tp(2, **LARGE))
    stack.push_async_callback(source.close)
    reader, router = await engine_on(stack, "need-decode", three[2], Shape(axes=HND, **LARGE))
    assert await arenas(three) == [0, 0, 0]

    assert await moves(source, reader, router, request_id, MANY) == "staged"
    assert await arenas(three) == [ARENA] * 3
    assert await moves(source, reader, router, f"{request_id}-few", 1) == "direct"  # a slot would cost more
    ways = [peer.ways for peer in await router.peers()]
    assert [(each["staged"], each["direct"]) for each in ways] == [("", "")] * 2

    await asyncio.gather(reader.close(), source.close())

    async def freed() -> bool:
        return await arenas(three) == [0, 0, 0]

    await until(freed, "each arena goes with its engine")


async def test_long_runs_and_a_source_that_may_not_stage_cost_nobody_an_arena(
    daemons: Daemons, three: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> None:
    (none,), (plain, _, reads) = await daemons.start("none", 1, "--arena-mb", "0"), three
    wide = Shape(num_blocks=40, block_size=256)  # a run is 24 KiB
    same, _ = await engine_on(stack, "long-prefill", plain, wide)
    other, _ = await engine_on(stack, "long-none", none, Shape(axes=HND, **LARGE))
    reader, router = await engine_on(stack, "long-decode", reads, wide)
    assert await moves(same, reader, router, request_id, MANY) == "direct"
    assert await moves(other, reader, router, f"{request_id}-none", 999) == "direct"
    assert await arenas([plain, none, reads]) == [0, 0, 0]
    assert any("no staging arena" in peer.ways["staged"] for peer in await router.peers())
