"""A receive that is cancelled while a read is under way never passes for quiet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from fleet import TIMEOUT_S, Daemons
from ranks import describe
from wire import TCP, TOKENS, TcpPair, tcp_pair

from kvferry import engine as engine_module
from kvferry.blocking import BlockingEngineClient
from kvferry.engine import TransferFailed
from kvferry.router import RouterClient

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def pair(daemons: Daemons) -> AsyncIterator[TcpPair]:
    async with tcp_pair(daemons, "cancelled") as pair:
        yield pair


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LEAVE_S", 0.5)


@pytest.mark.usefixtures("impatient")
async def test_a_cancelled_receive_that_is_not_quiet_says_so(pair: TcpPair, request_id: str) -> None:
    client, tables = pair.reader.ranks[0].client, pair.reader.take(TOKENS).tables()

    def receive(published: str) -> Coroutine[Any, Any, object]:
        return client.receive(published, tables, source=pair.source.source())

    async with pair.stopped_in_mid_read(request_id, receive) as read:
        read.receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read.receiving
        quiesced = asyncio.create_task(client.quiesced(read.request_id))
        assert await pair.quarantined()
        assert not quiesced.done()
    await asyncio.wait_for(quiesced, TIMEOUT_S)
    assert not await pair.quarantined()


async def test_a_cancelled_receive_that_is_quiet_is_cancelled_and_nothing_else(pair: TcpPair, request_id: str) -> None:
    client, tables = pair.reader.ranks[0].client, pair.reader.take(TOKENS).tables()
    receiving = asyncio.create_task(client.receive(request_id, tables))
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert not client._book.left(request_id)


@pytest.mark.usefixtures("impatient")
async def test_a_future_that_is_cancelled_does_not_end_before_it_can_say_whether_its_blocks_are_quiet(
    daemons: Daemons, stack: AsyncExitStack, pair: TcpPair, request_id: str
) -> None:
    shape, name = pair.reader.shape, "blocking-reader"
    (daemon,) = await daemons.start(name, 1, *TCP)

    def start() -> BlockingEngineClient:
        client = BlockingEngineClient.connect(str(daemon.socket), engine_id=name, epoch="1")
        client.register(describe(name, "1", shape, 0, client.allocate(shape.nbytes(0))))  # type: ignore[arg-type]
        return client

    client = await asyncio.to_thread(start)
    stack.push_async_callback(asyncio.to_thread, client.close)
    source, tables = pair.source.source(), pair.reader.take(TOKENS).tables()
    reader = replace(pair, reader_router=await stack.enter_async_context(RouterClient(daemon.url)))
    receives = []

    async def receive(published: str) -> None:
        receives.append(client.receive(published, tables, source=source))
        await asyncio.gather(asyncio.wrap_future(receives[-1]), return_exceptions=True)

    async with reader.stopped_in_mid_read(request_id, receive):
        receiving = receives[-1]
        receiving.cancel()
        assert not receiving.done(), "nobody knows yet"
        with pytest.raises(TransferFailed) as failed:
            await asyncio.to_thread(receiving.result, TIMEOUT_S)
        assert failed.value.state == "aborted"
        assert not failed.value.blocks_safe
        quiesced = client.start(failed.value.quiesced())
        assert not quiesced.done()
    await asyncio.to_thread(quiesced.result, TIMEOUT_S)
