"""Rank 0 leads, and what one rank is told or says of itself reaches all ranks of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from fleet import TIMEOUT_S, Daemons, Tap, retired, tap, until
from pair import TOKENS, Pair, all_in, is_in, prefilled
from ranks import Kv, Shape, TestEngine

from kvferry.engine import Received, TransferFailed
from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import OrderBody, PeerRequest, TransferRecord, TransferState
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
TWO = Shape.tp(2, num_blocks=16)


@dataclass
class Led:
    """An engine of two ranks, which reads."""

    engine: TestEngine
    routers: list[RouterClient]
    """Routers of its daemons, by rank."""


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


@dataclass
class Parted(Led):
    """As Led; what either rank's daemon says to the other passes one that can cut it off."""

    taps: list[Tap]
    """Before the daemons, by rank."""
    services: list[DaemonService]

    def heal(self) -> None:
        for tapping, service in zip(self.taps, self.services, strict=True):
            tapping.to = service.peer


@pytest.fixture(scope="module")
async def parted(shared_daemons: Daemons) -> AsyncIterator[Parted]:
    async with tap() as (before_first, first_address), tap() as (before_second, second_address):
        (first,) = await shared_daemons.start("parted", 1, "--advertise", first_address)
        before_first.to = first.peer
        seed = replace(first, peer=first_address)
        second = await shared_daemons.start_rank("parted-1", seed, "--advertise", second_address)
        before_second.to = second.peer
        engine = await TestEngine.start("parted", [first, second], TWO)
        async with RouterClient(first.url) as zero, RouterClient(second.url) as one:
            yield Parted(engine, [zero, one], [before_first, before_second], [first, second])
        await engine.close()


@pytest.fixture
async def whole(parted: Parted) -> AsyncIterator[Parted]:
    for router in parted.routers:
        await until(lambda router=router: is_ready(router), "both ranks have joined")
    yield parted
    parted.heal()


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
    with refused("address_not_allowed", DaemonError, status=403) as caught:
        await led.routers[rank].prewarm(PeerRequest(engine_id="prefill", address=named))
    assert (caught.value.field, caught.value.value) == ("rank", "1")
    assert f"rank 1 of engine led: this daemon may not speak to {named}" in caught.value.message


class Begun:
    """An attempt by a router's order, which both ranks read, and of which the first tokens are published."""

    def __init__(self, led: Led, source: TestEngine, request_id: str) -> None:
        self._source, self._request_id, self._led = source, request_id, led
        self._theirs, self._number = source.take(TOKENS), source.next_lease()
        self.blocks, self.expected = led.engine.take(TOKENS), led.engine.snapshot()
        self.transfer_id = ""
        self.receives: list[asyncio.Task[Received]] = []
        """By rank."""

    async def begin(self, deadline_ms: float) -> None:
        kv, engine = Kv.random(TOKENS), self._led.engine
        self._source.write(kv, self._theirs)
        engine.write_into(self.expected, kv, self.blocks)
        await self.publish(48)
        named = self._source.source(epoch=self._source.epoch).model_copy(update={"lease": self._number})
        order = OrderBody(request_id=self._request_id, source=named, deadline_ms=deadline_ms)
        self.transfer_id = (await self._led.routers[0].order(order)).transfer_id
        tables, attempt = self.blocks.tables(), engine.next_attempt()
        self.receives = [
            asyncio.create_task(rank.client.receive(self._request_id, tables, attempt=attempt)) for rank in engine.ranks
        ]
        await all_in(self._led.routers, self._request_id, TransferState.READING)

    async def publish(self, tokens: int, ranks: slice = slice(None)) -> None:
        tables, more = self._theirs.tables(), {"lease": self._number, "more": tokens < TOKENS}
        published = self._source.ranks[ranks]
        await asyncio.gather(*(each.client.publish(self._request_id, tables, tokens, **more) for each in published))

    async def ended(self) -> TransferRecord:
        """As rank 0 knows it."""
        return await self._led.routers[0].wait(self.transfer_id, timeout_s=TIMEOUT_S)


# drain


@pytest.mark.parametrize("draining", [0, 1])
async def test_the_drain_of_one_rank_is_that_of_the_engine_and_can_be_taken_back(
    led: Led, pair: Pair, request_id: str, draining: int
) -> None:
    """A transfer that has begun goes on; an order that waits for its reservation is given back."""
    begun, waiting, source = f"{request_id}-begun", f"{request_id}-waiting", pair.prefill.source()
    router, others = led.routers[draining], led.routers
    kv, _ = await prefilled(pair, begun)
    blocks = led.engine.take(TOKENS)
    expected = led.engine.expecting(kv, blocks)
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
        with refused("draining", DaemonError, status=503) as caught:
            await each.order(OrderBody(request_id=f"{request_id}-later", source=source))
        assert f"rank {draining} of engine led" in caught.value.message
        assert caught.value.remedy == "send the request to another decode worker"
        assert any("draining" in reason for reason in (await each.ready()).reasons)
    for rank in led.engine.ranks:
        own, tables = f"{request_id}-{rank.manifest.rank}", led.engine.take(16).tables()
        with refused("draining"):
            await rank.client.receive(own, tables, source=source, attempt=led.engine.next_attempt())
    await reserved
    assert (await others[1].wait(first.transfer_id, timeout_s=TIMEOUT_S)).state is TransferState.DONE
    await router.cancel_drain()
    for each in led.routers:
        await until(lambda each=each: is_ready(each), "no rank is draining")
    kv, _ = await prefilled(pair, request_id)
    led.engine.write_into(expected, kv, blocks)
    await led.engine.receive(request_id, blocks, source=source)
    assert not led.engine.differences(expected)


async def test_a_drain_of_the_leader_waits_for_the_other_ranks(led: Led, pair: Pair, request_id: str) -> None:
    """It keeps the record, and a daemon that follows it ends what other ranks read by an order of the one before."""
    begun, (router, _) = Begun(led, pair.prefill, request_id), led.routers
    await begun.begin(1e3 * TIMEOUT_S)
    await begun.publish(TOKENS, slice(0, 1))
    await begun.receives[0]
    status = await router.drain()
    assert (status.transfers, status.drained) == (1, False), "rank 1 reads on"
    await begun.publish(TOKENS, slice(1, 2))
    assert (await router.drain(wait_s=TIMEOUT_S)).drained
    assert (await begun.ended()).state is TransferState.DONE
    await begun.receives[1]
    assert not led.engine.differences(begun.expected)
    await router.cancel_drain()
    for each in led.routers:
        await until(lambda each=each: is_ready(each), "no rank is draining")


# a leader that is parted from another rank


def is_lost(record: TransferRecord) -> None:
    (error,) = [share.error for share in record.ranks if share.rank == 1]
    assert error is not None and (error.code, error.field, error.value) == ("rank_lost", "rank", "1")
    assert record.state is TransferState.FAILED and record.error is not None and record.error.code == "rank_lost"


async def test_a_rank_that_is_parted_from_the_leader_goes_on_and_the_leader_is_never_done(
    whole: Parted, pair: Pair, request_id: str
) -> None:
    begun = Begun(whole, pair.prefill, request_id)
    await begun.begin(1e3 * TIMEOUT_S)
    for tapping in whole.taps:
        tapping.cut()
    is_lost(await begun.ended())
    with refused("rank_failed", TransferFailed):
        await begun.receives[0]
    assert await is_in(whole.routers[1], request_id, TransferState.READING)
    await begun.publish(TOKENS)
    assert (await begun.receives[1]).tokens == (0, TOKENS)
    whole.heal()
    for router in whole.routers:
        await until(lambda router=router: is_ready(router), "both ranks have joined again")
    is_lost(await begun.ended())
    again = Begun(whole, pair.prefill, f"{request_id}-again")
    await again.begin(1e3 * TIMEOUT_S)
    await again.publish(TOKENS)
    await asyncio.gather(*again.receives)
    assert (await again.ended()).state is TransferState.DONE
    assert not whole.engine.differences(again.expected)


async def test_a_rank_that_the_leader_reaches_again_in_time_is_done(whole: Parted, pair: Pair, request_id: str) -> None:
    begun = Begun(whole, pair.prefill, request_id)
    await begun.begin(1e3 * TIMEOUT_S)
    whole.taps[1].cut()
    await begun.publish(TOKENS)
    await asyncio.gather(*begun.receives)
    assert await is_in(whole.routers[0], request_id, TransferState.READING), "the leader has not heard of the end"
    whole.heal()
    record = await begun.ended()
    assert record.state is TransferState.DONE and {share.state for share in record.ranks} == {TransferState.DONE}
    assert not whole.engine.differences(begun.expected)
