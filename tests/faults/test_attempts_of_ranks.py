"""Ranks whose daemons die, and are started anew: what has ended on one rank never answers for another attempt."""

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

from kvferry.engine import Lease, TransferFailed
from kvferry.errors import KvferryError
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import DestinationBody, LeaseState, OrderBody, TransferState
from kvferryd.demo.fleet import DaemonService

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

    async def published(self, request_id: str) -> tuple[Kv, Lease]:
        kv, blocks = self.source.filled(TOKENS)
        (lease,) = await self.source.publish(request_id, blocks, TOKENS)
        return kv, lease

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


async def released(lease: Lease) -> bool:
    """Whether all readers have told the source that they have read: what a daemon that dies had not told yet, nobody
    tells."""
    async with asyncio.timeout(TIMEOUT_S):
        return await lease.ended() is LeaseState.RELEASED


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


async def ordered_and_done(scene: Scene, order: OrderBody, blocks: Blocks, *, reserves: bool) -> Lease:
    """Published, and moved into these blocks. reserves: the engine does; otherwise the order brings them."""
    kv, lease = await scene.published(order.request_id)
    expected = scene.reader.expecting(kv, blocks)
    async with RouterClient(scene.daemons[0].url) as router:
        ordered = await router.order(order)
        if reserves:
            await scene.reader.receive(order.request_id, blocks)
        record = await router.wait(ordered.transfer_id, timeout_s=TIMEOUT_S)
    assert record.state is TransferState.DONE, record
    assert scene.reader.differences(expected) == ""
    return lease


@pytest.mark.parametrize("reserves", [False, True], ids=["tables in the order", "engines reserve"])
async def test_a_daemon_that_was_started_anew_is_not_answered_by_what_was_done_before(
    scene: Scene, request_id: str, reserves: bool
) -> None:
    """It knows nothing of the first attempt; the daemons of the other ranks have it still."""
    blocks = scene.reader.take(TOKENS)
    destination = None if reserves else DestinationBody(tables=blocks.json())
    order = OrderBody(request_id=request_id, source=scene.source.source(), destination=destination)
    for again in (False, True):
        if again:
            await scene.restart(0)
        assert await released(await ordered_and_done(scene, order, blocks, reserves=reserves))


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
        with pytest.raises(DaemonError) as unknown:  # rank 0 kept it, and has lost it
            await other.transfer(ordered.transfer_id)
        assert unknown.value.code == "unknown_transfer"
    if receiving is not None:
        for outcome in await receiving:
            assert isinstance(outcome, TransferFailed), outcome
    await source.publish(request_id, given, TOKENS)
    await source.ranks[0].client.abort(request_id)
    await ordered_and_done(scene, order, blocks, reserves=reserves)


async def test_a_late_order_of_an_attempt_that_has_ended_takes_no_newer_reservation(
    scene: Scene, stack: AsyncExitStack, request_id: str
) -> None:
    source, daemon = scene.source, scene.daemons[0]
    await scene.reader.close()
    await retired(daemon)
    reader = await TestEngine.start(f"alone-{request_id[-8:]}", [daemon], ONE)
    stack.push_async_callback(reader.close)
    blocks = reader.take(TOKENS)
    await scene.published(request_id)
    async with RouterClient(reader.daemons[0].url) as router:
        first = OrderBody(request_id=request_id, source=source.source(), attempt=1)
        ordered = await router.order(first)
        await router.abort_transfer(ordered.transfer_id)
        receiving = asyncio.create_task(reader.receive(request_id, blocks, attempt=2))
        await until(lambda: is_in(router, request_id, TransferState.WAITING), "the engine has reserved")
        with pytest.raises(KvferryError, match="in attempt 2 by now"):
            await router.order(first)
        await source.ranks[0].client.abort(request_id)
        (kv, _), expected = await scene.published(request_id), reader.snapshot()
        reader.write_into(expected, kv, blocks)
        await router.order(OrderBody(request_id=request_id, source=source.source(), attempt=2))
        await asyncio.wait_for(receiving, TIMEOUT_S)
    assert reader.differences(expected) == ""


@pytest.mark.parametrize("first", [0, 2])
async def test_daemons_that_were_started_anew_take_part_in_the_next_attempt_whoever_is_first(
    scene: Scene, request_id: str, first: int
) -> None:
    """Two know of nothing, and the third remembers the attempt before."""
    reader, blocks = scene.reader, scene.reader.take(TOKENS)
    for again in (False, True):
        if again:
            await scene.restart(0)
            await scene.restart(2)
        said = {"source": scene.source.source(), "attempt": reader.next_attempt()}
        (kv, lease), expected = await scene.published(request_id), reader.snapshot()
        reader.write_into(expected, kv, blocks)
        clients = [reader.ranks[(first + n) % 3].client for n in range(3)]
        async with RouterClient(scene.daemons[first].url) as router:
            before = len(await router.transfers(request_id))
            ahead = asyncio.create_task(clients[0].receive(request_id, blocks.tables(), **said))

            async def begun(router: RouterClient = router, before: int = before) -> bool:
                return len(await router.transfers(request_id)) > before

            await until(begun, "it has begun")
            await asyncio.gather(ahead, *(each.receive(request_id, blocks.tables(), **said) for each in clients[1:]))
        assert reader.differences(expected) == ""
        assert await released(lease)


async def test_an_attempt_that_one_rank_gave_up_alone_has_no_part_in_the_next(scene: Scene, request_id: str) -> None:
    """The other ranks do not know of it: their first is rank 0's second, and has the number of that."""
    first, *others = (rank.client for rank in scene.reader.ranks)
    blocks, said = scene.reader.take(TOKENS), {"source": scene.source.source(), "attempt": 2}
    given_up = asyncio.create_task(first.receive(request_id, blocks.tables(), attempt=1))
    async with RouterClient(scene.daemons[0].url) as router, RouterClient(scene.daemons[1].url) as other:
        await until(lambda: is_in(router, request_id, TransferState.WAITING), "it waits for its order")
        await first.abort(request_id)
        with pytest.raises(TransferFailed):
            await given_up
        (kv, lease), expected = await scene.published(request_id), scene.reader.snapshot()
        scene.reader.write_into(expected, kv, blocks)
        ahead = [asyncio.create_task(each.receive(request_id, blocks.tables(), **said)) for each in others]
        await until(lambda: is_in(other, request_id, *TransferState), "the other ranks have begun")
        await asyncio.gather(*ahead, first.receive(request_id, blocks.tables(), **said))
    assert scene.reader.differences(expected) == ""
    assert await released(lease)
