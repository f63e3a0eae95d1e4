"""A source that is a pipeline: its stages publish at different times, and are read as one lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from fleet import TIMEOUT_S, Daemons, until
from lives import engine_on
from pair import TOKENS, waits_for
from ranks import Kv, Shape, TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import Awaited, LeaseState
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
ONE = Shape.tp(1, block_size=24, num_blocks=40)


@pytest.fixture(scope="module")
async def stages(shared_daemons: Daemons) -> AsyncIterator[TestEngine]:
    engine = await TestEngine.start("stages", await shared_daemons.start("stages", 2), Shape.pp(2, 1))
    yield engine
    await engine.close()


@pytest.fixture
async def reader(near: DaemonService, stack: AsyncExitStack) -> tuple[TestEngine, RouterClient]:
    return await engine_on(stack, "of-all-layers", near, ONE)


@pytest.mark.parametrize("ahead", [0, 1], ids=["the first stage ahead", "the last stage ahead"])
async def test_stages_that_publish_at_different_times_are_read_as_one_lease(
    stages: TestEngine, reader: tuple[TestEngine, RouterClient], request_id: str, ahead: int
) -> None:
    """Chunk by chunk; the other stage still has the request's lease of before, when it was prefilled the first time."""
    engine, router = reader
    await stages.publish(request_id, stages.take(TOKENS), TOKENS)
    kv, theirs, number = Kv.random(TOKENS), stages.take(TOKENS), stages.next_lease()
    stages.write(kv, theirs)
    quick, slow = (stages.ranks[rank].client for rank in (ahead, 1 - ahead))
    blocks, expected = engine.take(TOKENS), engine.snapshot()
    await quick.publish(request_id, theirs.tables(), 48, more=True, lease=number)
    receiving = asyncio.create_task(engine.receive(request_id, blocks, source=stages.source()))
    await until(lambda: waits_for(router, request_id, Awaited.PUBLISH), "the other stage is waited for")
    assert not engine.differences(expected), "nothing is read of the lease before"
    await slow.publish(request_id, theirs.tables(), 32, more=True, lease=number)
    leases = [await quick.publish(request_id, theirs.tables(), TOKENS, lease=number)]
    leases.append(await slow.publish(request_id, theirs.tables(), TOKENS, lease=number))
    engine.write_into(expected, kv, blocks)
    (received,) = await receiving
    assert received.lease == number
    assert not engine.differences(expected)
    async with asyncio.timeout(TIMEOUT_S):
        assert [await lease.ended() for lease in leases] == [LeaseState.RELEASED] * 2
