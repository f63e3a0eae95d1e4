"""A rank whose daemon dies, and is started anew: what it has led never answers for another attempt."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from fleet import TIMEOUT_S, Daemons, retired, until
from pair import is_in
from ranks import Blocks, Kv, Shape, TestEngine, start_rank

from kvferry.engine import TransferFailed
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import DestinationBody, OrderBody, TransferState
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
TOKENS = 40
ONE, THREE = Shape.tp(1, num_blocks=16), Shape.tp(3, num_blocks=16)


@dataclass
class Scene:
    source: TestEngine
    reader: TestEngine
    """With three ranks."""
    daemons: list[DaemonService]
    again: Callable[[DaemonService], DaemonService]

    async def restart(self, rank: int) -> None:
        """Its daemon is killed, and its engine attaches to the next one in the same epoch, with new memory."""
        before, reader = self.daemons[rank], self.reader
        before.signal(signal.SIGKILL)
        await asyncio.to_thread(before.process.wait, TIMEOUT_S)
        await reader.ranks[rank].client.close()
        self.daemons[rank] = daemon = self.again(before)
        async with AsyncExitStack() as stack:
            routers = [await stack.enter_async_context(RouterClient(each.url)) for each in self.daemons]
            await until(routers[rank].healthy, "it serves")
            reader.ranks[rank] = await start_rank(reader.engine_id, daemon.socket, THREE, rank, reader.epoch)
            for router in routers:
                await until(lambda router=router: is_ready(router), "all ranks have joined")


async def is_ready(router: RouterClient) -> bool:
    return (await router.ready()).ready


@pytest.fixture(scope="module")
async def shared(daemons: Daemons) -> tuple[DaemonService, list[DaemonService]]:
    """The source's daemon, and those of the reader's ranks: as the last test started them."""
    (ours,), theirs = await asyncio.gather(daemons.start("source"), daemons.start("reader", 3))
    return ours, theirs


@pytest.fixture
async def scene(
    daemons: Daemons, shared: tuple[DaemonService, list[DaemonService]], stack: AsyncExitStack, request_id: str
) -> Scene:
    ours, theirs = shared
    await retired(*theirs)
    source = await TestEngine.start(f"source-{request_id[-8:]}", [ours], ONE)
    reader = await TestEngine.start(f"reader-{request_id[-8:]}", theirs, THREE)
    for engine in (source, reader):
        stack.push_async_callback(engine.close)
    return Scene(source, reader, theirs, daemons.fleet.again)


async def ordered_and_done(scene: Scene, order: OrderBody, blocks: Blocks, *, reserves: bool) -> None:
    """Published, and moved into these blocks. reserves: the engine does; otherwise the order brings them."""
    kv, given = scene.source.filled(TOKENS)
    await scene.source.publish(order.request_id, given, TOKENS)
    expected = scene.reader.expecting(kv, blocks)
    async with RouterClient(scene.daemons[0].url) as router:
        ordered = await router.order(order)
        if reserves:
            await scene.reader.receive(order.request_id, blocks)
        record = await router.wait(ordered.transfer_id, timeout_s=TIMEOUT_S)
    assert record.state is TransferState.DONE, record
    assert scene.reader.differences(expected) == ""


@pytest.mark.parametrize("reserves", [False, True], ids=["tables in the order", "engines reserve"])
async def test_a_part_whose_leader_has_died_is_not_a_part_of_the_next_attempt(
    scene: Scene, request_id: str, reserves: bool
) -> None:
    """Rank 1 waits for the rest of a publish when rank 0, which has handed the order on, dies."""
    reader, source, blocks = scene.reader, scene.source, scene.reader.take(TOKENS)
    destination = None if reserves else DestinationBody(tables=blocks.json())
    order = OrderBody(
        request_id=request_id, source=source.source(), destination=destination, deadline_ms=4e3 * TIMEOUT_S
    )
    given = source.take(TOKENS)
    source.write(Kv.random(TOKENS), given)
    await source.publish(request_id, given, 16, more=True)
    receiving = asyncio.create_task(reader.outcomes(request_id, blocks)) if reserves else None
    async with RouterClient(scene.daemons[0].url) as router, RouterClient(scene.daemons[1].url) as other:
        ordered = await router.order(order)
        await until(lambda: is_in(other, request_id, TransferState.READING), "rank 1 reads")
        await scene.restart(0)
        await until(lambda: is_in(other, request_id, TransferState.FAILED), "rank 1 knows that rank 0 is gone")
        (record,) = await other.transfers(request_id)
        assert record.error is not None and (record.error.code, record.error.value) == ("rank_failed", "0")
        with refused("unknown_transfer", DaemonError):  # rank 0 kept it, and has lost it
            await other.transfer(ordered.transfer_id)
    if receiving is not None:
        for outcome in await receiving:
            assert isinstance(outcome, TransferFailed), outcome
    await source.publish(request_id, given, TOKENS)
    await source.ranks[0].client.abort(request_id)
    await ordered_and_done(scene, order, blocks, reserves=reserves)
