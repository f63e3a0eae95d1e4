"""The knowledge that a daemon keeps of its peers, and when it asks them again."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, until
from lives import engine_on
from pair import Pair, is_in
from ranks import Kv, TestEngine

from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import PeerRequest, TransferState
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
HALF, ALL = 16, 32


async def two(
    far: DaemonService, near: DaemonService, stack: AsyncExitStack, name: str
) -> tuple[TestEngine, TestEngine, RouterClient]:
    """A source there, a reader here, and the reader's router: engines of this test alone."""
    source, _ = await engine_on(stack, f"{name}-source", far)
    reader, router = await engine_on(stack, f"{name}-reader", near)
    return source, reader, router


async def published(source: TestEngine, request_id: str) -> None:
    blocks = source.take(ALL)
    source.write(Kv.random(ALL), blocks)
    await source.publish(request_id, blocks, ALL)


async def test_a_peer_forgotten_while_it_is_read_is_unloaded_when_nobody_reads_it(
    far: DaemonService, near: DaemonService, stack: AsyncExitStack
) -> None:
    source, reader, router = await two(far, near, stack, "forgotten")
    blocks = source.take(ALL)
    source.write(Kv.random(ALL), blocks)
    await source.publish("slow", blocks, HALF, more=True)
    slow = asyncio.create_task(reader.receive("slow", reader.take(ALL), source=source.source()))
    await until(lambda: is_in(router, "slow", TransferState.READING), "it reads")
    await router.forget_peer(source.engine_id)
    await published(source, "other")
    await reader.receive("other", reader.take(ALL), source=source.source())  # shakes hands anew: the same NIXL agent
    await source.publish("slow", blocks, ALL)
    await slow
    await published(source, "later")
    await reader.receive("later", reader.take(ALL), source=source.source())


async def test_a_handshake_that_fails_leaves_the_connection_to_others(
    daemons: Daemons, far: DaemonService, stack: AsyncExitStack
) -> None:
    (impatient,) = await daemons.start("impatient", 1, "--connect-timeout-s", "2")
    source, reader, router = await two(far, impatient, stack, "impatient")
    blocks = source.take(ALL)
    source.write(Kv.random(ALL), blocks)
    await source.publish("open", blocks, HALF, more=True)
    receiving = asyncio.create_task(reader.receive("open", reader.take(ALL), source=source.source()))
    await until(lambda: is_in(router, "open", TransferState.READING), "it reads")
    source.daemons[0].signal(signal.SIGSTOP)
    try:
        with pytest.raises(KvferryError) as refused:
            await router.prewarm(PeerRequest(engine_id="another", address=source.address))
    finally:
        source.daemons[0].signal(signal.SIGCONT)
    assert refused.value.code == "peer_unreachable"
    await source.publish("open", blocks, ALL)
    await receiving
    await published(source, "later")
    await reader.receive("later", reader.take(ALL), source=source.source())


async def test_an_order_that_names_another_address_is_read_from_there(
    pair: Pair, far: DaemonService, near: DaemonService, stack: AsyncExitStack
) -> None:
    source, reader, _ = await two(far, near, stack, "moved")
    await published(source, "first")
    await reader.receive("first", reader.take(ALL), source=source.source())
    source.daemons[0].signal(signal.SIGSTOP)  # its node is gone, and nobody said so
    try:
        replica = await TestEngine.start(source.engine_id, pair.prefill.daemons[:1], source.shape)
        await published(replica, "second")
        await reader.receive("second", reader.take(ALL), source=replica.source())
        await replica.close()
    finally:
        source.daemons[0].signal(signal.SIGCONT)


async def test_daemons_dial_each_other_past_a_proxy_for_http(
    daemons: Daemons, far: DaemonService, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as proxied:
        proxied.setenv("http_proxy", "http://127.0.0.1:9")
        proxied.delenv("no_proxy", raising=False)
        (near,) = await daemons.start("proxied")
    source, reader, _ = await two(far, near, stack, "proxied")
    await published(source, "r")
    await reader.receive("r", reader.take(ALL), source=source.source())
