"""GET /v1/plan: who reads what from whom, of all ranks of both engines."""

from __future__ import annotations

import asyncio

import pytest
from fleet import Daemons
from pair import Pair
from ranks import DIM, ITEM, LAYERS, Shape, TestEngine

from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import PeerRequest
from support import refused

pytestmark = pytest.mark.anyio


async def prewarmed(router: RouterClient, source: TestEngine) -> None:
    await router.prewarm(PeerRequest(engine_id=source.engine_id, address=source.address))


@pytest.mark.parametrize("rank", [0, 2])
async def test_the_daemon_of_any_rank_tells_what_all_ranks_read(pair: Pair, rank: int) -> None:
    await prewarmed(pair.routers[rank], pair.prefill)
    plan = await pair.routers[rank].plan("prefill")
    assert (plan.source_engine_id, plan.source_world_size) == ("prefill", 2)
    assert (plan.engine_id, plan.world_size, plan.missing) == ("decode", 3, {})
    keys_and_values = [read for read in plan.reads if read.components == ["k", "v"]]
    assert {(read.reader, read.source, read.start, read.stop) for read in keys_and_values} == {
        (0, 0, 0, 2), (1, 0, 2, 3), (1, 1, 3, 4), (2, 1, 4, 6),
    }  # fmt: skip
    for read in keys_and_values:
        assert (read.group, read.kind, read.layers) == ("full", "paged", list(range(LAYERS)))
        assert (read.axis, read.total) == ("head", 6)
        assert read.nbytes == 2 * LAYERS * (read.stop - read.start) * DIM * ITEM
    states = [read for read in plan.reads if read.kind == "state"]
    assert [(read.components, read.layers) for read in states] == [(["ssm"], [LAYERS])] * 4


async def test_a_rank_that_does_not_answer_is_missing_and_the_others_are_told(pair: Pair, daemons: Daemons) -> None:
    own = await daemons.start("half", 2)
    engine = await TestEngine.start("half", own, Shape.tp(2))
    async with RouterClient(own[0].url) as router:
        await prewarmed(router, pair.prefill)
        own[1].process.kill()
        await asyncio.to_thread(own[1].process.wait)
        plan = await router.plan("prefill", destination="half")
    assert {read.reader for read in plan.reads} == {0}
    assert list(plan.missing) == [1]
    await engine.ranks[0].client.close()


async def test_an_engine_that_nobody_has_shaken_hands_with_is_unknown(pair: Pair) -> None:
    for asked in (pair.routers[0].plan("nobody"), pair.routers[0].plan("prefill", destination="nobody")):
        with refused("unknown_peer", DaemonError, status=404):
            await asked
