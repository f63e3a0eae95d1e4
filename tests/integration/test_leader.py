"""Rank 0 leads, and what one rank is told or says of itself reaches all ranks of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from fleet import TIMEOUT_S, Daemons, retired, until
from pair import TOKENS, Pair, is_in, prefilled
from ranks import Shape, TestEngine

from kvferry.errors import KvferryError
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import OrderBody, PeerRequest, TransferState
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
TWO = Shape.tp(2, num_blocks=16)


@dataclass
class Led:
    """An engine of two ranks, which reads."""

    engine: TestEngine
    routers: list[RouterClient]
    """Of its daemons, by rank."""


async def is_ready(router: RouterClient) -> bool:
    return (await router.ready()).ready


@pytest.fixture(scope="module")
async def services(shared_daemons: Daemons) -> list[DaemonService]:
    """Rank 1 may not speak to a name."""
    (first,) = await shared_daemons.start("led")
    return [first, await shared_daemons.start_rank("led-1", first, "--allow-peers", "127.0.0.0/8")]


@pytest.fixture
async def led(services: list[DaemonService]) -> AsyncIterator[Led]:
    await retired(*services)
    engine = await TestEngine.start("led", services, TWO)
    async with RouterClient(services[0].url) as first, RouterClient(services[1].url) as second:
        for router in (first, second):
            await until(lambda router=router: is_ready(router), "both ranks have joined")
        yield Led(engine, [first, second])
    await engine.close()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_prewarm_at_any_rank_reaches_all(led: Led, pair: Pair, rank: int) -> None:
    answered = await led.routers[rank].prewarm(PeerRequest(engine_id="prefill", address=pair.prefill.address))
    for router in led.routers:
        assert [(peer.engine_id, peer.rank) for peer in await router.peers()] == [("prefill", 0), ("prefill", 1)]
    assert [(peer.engine_id, peer.rank) for peer in answered] == [("prefill", 0), ("prefill", 1)]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_prewarm_names_the_rank_that_could_not(led: Led, pair: Pair, rank: int) -> None:
    """Rank 0 may speak to the source, and rank 1 may not."""
    named = f"localhost:{pair.prefill.address.rpartition(':')[2]}"
    with pytest.raises(DaemonError) as refused:
        await led.routers[rank].prewarm(PeerRequest(engine_id="prefill", address=named))
    assert (refused.value.code, refused.value.status) == ("address_not_allowed", 403)
    assert (refused.value.field, refused.value.value) == ("rank", "1")
    assert f"rank 1 of engine led: this daemon may not speak to {named}" in refused.value.message


# drain


@pytest.mark.parametrize("draining", [0, 1])
async def test_the_drain_of_one_rank_is_that_of_the_engine_and_can_be_taken_back(
    led: Led, pair: Pair, request_id: str, draining: int
) -> None:
    """What has begun goes on; what waits for its reservation is given back."""
    begun, waiting, source = f"{request_id}-begun", f"{request_id}-waiting", pair.prefill.source()
    router, others = led.routers[draining], led.routers
    kv, _ = await prefilled(pair, begun)
    blocks, expected = led.engine.take(TOKENS), led.engine.snapshot()
    led.engine.write_into(expected, kv, blocks)
    reserved = asyncio.create_task(led.engine.receive(begun, blocks))
    for each in led.routers:
        await until(lambda each=each: is_in(each, begun, TransferState.WAITING), "it has reserved")
    first = await others[1].order(OrderBody(request_id=begun, source=source, deadline_ms=1e3 * TIMEOUT_S))
    second = await others[1].order(OrderBody(request_id=waiting, source=source, deadline_ms=1e3 * TIMEOUT_S))
    await router.drain()
    record = await others[1].wait(second.transfer_id, timeout_s=TIMEOUT_S / 2)
    assert record.error is not None and (record.state, record.error.code) == (TransferState.FAILED, "draining")
    assert record.error.remedy == "send the request to another decode worker"
    for each in led.routers:
        with pytest.raises(DaemonError) as refused:
            await each.order(OrderBody(request_id=f"{request_id}-later", source=source))
        assert (refused.value.code, refused.value.status) == ("draining", 503)
        assert f"rank {draining} of engine led" in refused.value.message
        assert refused.value.remedy == "send the request to another decode worker"
        assert any("draining" in reason for reason in (await each.ready()).reasons)
    for rank in led.engine.ranks:
        own, tables = f"{request_id}-{rank.manifest.rank}", led.engine.take(16).tables()
        with pytest.raises(KvferryError) as not_received:
            await rank.client.receive(own, tables, source=source, attempt=led.engine.next_attempt())
        assert not_received.value.code == "draining"
    await reserved
    assert (await others[1].wait(first.transfer_id, timeout_s=TIMEOUT_S)).state is TransferState.DONE
    await router.cancel_drain()
    for each in led.routers:
        await until(lambda each=each: is_ready(each), "no rank is draining")
    kv, _ = await prefilled(pair, request_id)
    led.engine.write_into(expected, kv, blocks)
    await led.engine.receive(request_id, blocks, source=source)
    assert not led.engine.differences(expected)
