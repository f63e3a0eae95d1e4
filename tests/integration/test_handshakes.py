"""The knowledge that a daemon keeps of its peers, and when it asks them again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, until
from lives import engine_on
from pair import Pair, is_in, meets
from ranks import TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import PeerRequest, TransferState
from kvferryd.demo.fleet import DaemonService
from stopping import stopped
from support import refused

pytestmark = pytest.mark.anyio
HALF, ALL = 16, 32


async def two(
    far: DaemonService, near: DaemonService, stack: AsyncExitStack, name: str
) -> tuple[TestEngine, TestEngine, RouterClient]:
    """A source there, a reader here, and the reader's router: engines of this test alone."""
    source, _ = await engine_on(stack, f"{name}-source", far)
    reader, router = await engine_on(stack, f"{name}-reader", near)
    return source, reader, router


async def moved(source: TestEngine, reader: TestEngine, request_id: str) -> None:
    _, blocks = source.filled(ALL)
    await source.publish(request_id, blocks, ALL)
    await reader.receive(request_id, reader.take(ALL), source=source.source())


async def test_a_peer_forgotten_while_it_is_read_is_unloaded_when_nobody_reads_it(
    far: DaemonService, near: DaemonService, stack: AsyncExitStack
) -> None:
    source, reader, router = await two(far, near, stack, "forgotten")
    _, blocks = source.filled(ALL)
    await source.publish("slow", blocks, HALF, more=True)
    slow = asyncio.create_task(reader.receive("slow", reader.take(ALL), source=source.source()))
    await until(lambda: is_in(router, "slow", TransferState.READING), "it reads")
    await router.forget_peer(source.engine_id)
    await moved(source, reader, "other")  # shakes hands anew: the same NIXL agent
    await source.publish("slow", blocks, ALL)
    await slow
    await moved(source, reader, "later")


async def test_a_handshake_that_fails_leaves_the_connection_to_others(
    daemons: Daemons, far: DaemonService, stack: AsyncExitStack
) -> None:
    (impatient,) = await daemons.start("impatient", 1, "--connect-timeout-s", "1")  # its keepalive notices after 2.5 s
    source, reader, router = await two(far, impatient, stack, "impatient")
    await meets(router, source)
    _, blocks = source.filled(ALL)
    await source.publish("open", blocks, HALF, more=True)
    receiving = asyncio.create_task(reader.receive("open", reader.take(ALL), source=source.source()))
    await until(lambda: is_in(router, "open", TransferState.READING), "it reads")
    with stopped(source.daemons[0].process.pid), refused("peer_unreachable"):
        await router.prewarm(PeerRequest(engine_id="another", address=source.address))
    await source.publish("open", blocks, ALL)
    await receiving
    await moved(source, reader, "later")


async def test_an_order_that_names_another_address_is_read_from_there(
    pair: Pair, far: DaemonService, near: DaemonService, stack: AsyncExitStack
) -> None:
    source, reader, _ = await two(far, near, stack, "moved")
    await moved(source, reader, "first")
    with stopped(source.daemons[0].process.pid):  # its node is gone, and nobody said so
        replica = await TestEngine.start(source.engine_id, pair.prefill.daemons[:1], source.shape)
        await moved(replica, reader, "second")
        await replica.close()


async def test_daemons_dial_each_other_past_a_proxy_for_http(
    daemons: Daemons, far: DaemonService, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as proxied:
        proxied.setenv("http_proxy", "http://127.0.0.1:9")
        proxied.delenv("no_proxy", raising=False)
        (near,) = await daemons.start("proxied")
    source, reader, _ = await two(far, near, stack, "proxied")
    await moved(source, reader, "r")
