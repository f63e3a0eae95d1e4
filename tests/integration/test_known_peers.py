"""Peers are met before anybody waits: those of the settings, and those of orders that wait for reservations."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, until
from lives import engine_on, published, reads_from
from ranks import Shape, TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, PeerRequest, SourceBody
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
LOOPBACK = "127.0.0.0/8,::1"
"""Not the name localhost: it stands for the addresses that it has."""


async def peers(router: RouterClient) -> dict[str, str]:
    """Epochs of the engines that the daemon knows."""
    return {peer.engine_id: peer.epoch for peer in await router.peers()}


async def met(router: RouterClient, engine: TestEngine) -> None:
    async def known() -> bool:
        return (await peers(router)).get(engine.engine_id) == engine.epoch

    await until(known, f"{engine.engine_id} is met")


@pytest.fixture(scope="module")
async def far(shared_daemons: Daemons) -> DaemonService:
    """Only engines of these tests: a known peer is met where it has one."""
    (daemon,) = await shared_daemons.start("known")
    return daemon


@pytest.fixture(scope="module")
async def knowing(shared_daemons: Daemons, far: DaemonService) -> DaemonService:
    """Knows `far` by a name that it does not admit, which stands for addresses that it does: its own among them."""
    names = f"localhost:{far.peer.rpartition(':')[2]},no.such.name:1"
    (daemon,) = await shared_daemons.start("knowing", 1, "--allow-peers", LOOPBACK, "--known-peers", names)
    return daemon


async def test_a_known_peer_is_met_before_any_order_and_again_in_a_new_epoch(
    far: DaemonService, knowing: DaemonService, stack: AsyncExitStack
) -> None:
    reader, router = await engine_on(stack, "known-reader", knowing)
    source, _ = await engine_on(stack, "known-source", far)  # it comes later
    await met(router, source)
    await reads_from(reader, source, "first")
    await source.close()
    again, _ = await engine_on(stack, "known-source", far)
    await met(router, again)
    await reads_from(reader, again, "second")


async def test_ranks_of_one_engine_that_are_known_to_each_other_do_not_meet(
    daemons: Daemons, far: DaemonService, stack: AsyncExitStack
) -> None:
    """As with a headless service that all pods have as their known peers."""
    (first,) = await daemons.start("ranks-first", 1, "--known-peers", far.peer)
    second = await daemons.start_rank("ranks-second", first, "--known-peers", f"{first.peer},{far.peer}")
    source, _ = await engine_on(stack, "ranks-source", far)
    reader = await TestEngine.start("ranks-reader", [first, second], Shape.tp(2))
    stack.push_async_callback(reader.close)
    for daemon in (first, second):
        router = await stack.enter_async_context(RouterClient(daemon.url))
        await met(router, source)
        assert set(await peers(router)) == {"ranks-source"}


async def test_an_order_that_waits_for_its_reservation_shakes_hands_meanwhile(
    far: DaemonService, near: DaemonService, stack: AsyncExitStack
) -> None:
    reader, router = await engine_on(stack, "ahead-reader", near)
    source, _ = await engine_on(stack, "ahead-source", far)
    kv, _ = await published(source, "ahead")
    ordered = await router.order(OrderBody(request_id="ahead", source=source.source()))
    await met(router, source)
    assert (await router.transfer(ordered.transfer_id)).waits_for is Awaited.RESERVATION
    await reader.gets("ahead", kv, source=source.source())


async def test_what_an_order_names_owns_an_engine_id_that_a_known_peer_only_claimed(
    daemons: Daemons, far: DaemonService, knowing: DaemonService, stack: AsyncExitStack
) -> None:
    liar = knowing
    (asked,) = await daemons.start("asked", 1, "--known-peers", liar.peer)
    claimed, _ = await engine_on(stack, "claimed", liar)
    real, _ = await engine_on(stack, "claimed", far)
    reader, router = await engine_on(stack, "claimed-reader", asked)
    await met(router, claimed)
    await published(claimed, "r")
    await reads_from(reader, real, "r")
    with refused("engine_taken"):  # from now on nobody else is
        await router.prewarm(PeerRequest(engine_id="claimed", address=claimed.address))
    assert await peers(router) == {"claimed": real.epoch}


async def test_a_known_peer_that_serves_two_engines_is_left_to_orders(
    far: DaemonService, knowing: DaemonService, stack: AsyncExitStack
) -> None:
    first, _ = await engine_on(stack, "two-first", far)
    await engine_on(stack, "two-second", far)
    reader, router = await engine_on(stack, "two-reader", knowing)
    kv, _ = await published(first, "two")
    await reader.gets("two", kv, source=SourceBody(engine_id=first.engine_id, address=first.address))
    assert "two-second" not in await peers(router)
