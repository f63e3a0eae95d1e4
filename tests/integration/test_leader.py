"""Rank 0 leads, and what one rank is told or says of itself reaches all ranks of its engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from fleet import Daemons, retired, until
from pair import Pair
from ranks import Shape, TestEngine

from kvferry.router import DaemonError, RouterClient
from kvferry.schemas import PeerRequest
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
TWO = Shape.tp(2, num_blocks=16)


@dataclass
class Led:
    """An engine of two ranks, which reads."""

    engine: TestEngine
    routers: list[RouterClient]
    """Of its daemons, by rank."""


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

        async def whole() -> bool:
            return (await first.ready()).ready and (await second.ready()).ready

        await until(whole, "both ranks have joined")
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
