"""The end of a session is not the end of its engine: nobody reads blocks that a living engine is about to reuse."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import numpy as np
import pytest
from engine_process import lose_session
from fleet import TIMEOUT_S, Daemons, ended, memory_files, until
from lives import TP1, engine_on, killable, published
from ranks import Kv, TestEngine, describe
from wire import TOKENS, tcp_pair

from kvferry import engine as engine_module
from kvferry.blocking import BlockingEngineClient
from kvferry.engine import EngineClient, TransferFailed, Unsettled
from kvferry.errors import KvferryError
from kvferry.memory import SharedRegion, memfd_region
from kvferry.router import RouterClient
from kvferry.rpc import MAX_MESSAGE
from kvferry.schemas import SourceBody
from kvferryd.demo.fleet import DaemonService
from stopping import stopped
from support import refused

pytestmark = pytest.mark.anyio
ENDED = {"lease_ended", "unknown_engine", "stale_epoch", "peer_lost", "torn"}


@pytest.fixture(scope="module")
async def two(daemons: Daemons) -> list[DaemonService]:
    """A source's daemon and a reader's: the sessions of their engines end, they go on."""
    (source,), (reader,) = await asyncio.gather(daemons.start("source"), daemons.start("reader"))
    return [source, reader]


@pytest.fixture
async def both(two: list[DaemonService], stack: AsyncExitStack, request_id: str) -> tuple[TestEngine, TestEngine]:
    """An engine at each, in this process."""
    source, _ = await engine_on(stack, f"source-{request_id[-8:]}", two[0])
    reader, _ = await engine_on(stack, f"reader-{request_id[-8:]}", two[1])
    return source, reader


async def test_blocks_that_a_living_engine_reuses_are_not_read(
    both: tuple[TestEngine, TestEngine], request_id: str
) -> None:
    source, reader = both
    _, (lease,) = await published(source, request_id)
    await asyncio.wait_for(lose_session(source.ranks[0].client), TIMEOUT_S)
    with pytest.raises(KvferryError):
        await asyncio.wait_for(lease.ended(), TIMEOUT_S)
    source.ranks[0].memory[:] = 0xAB  # the blocks are the engine's again
    with pytest.raises(TransferFailed) as failed:
        await reader.receive(request_id, reader.take(50), source=source.source())
    assert failed.value.code in ENDED


@pytest.mark.slow
async def test_a_publish_whose_session_ends_before_its_answer_may_be_read_until_it_is_settled(
    both: tuple[TestEngine, TestEngine], request_id: str
) -> None:
    source, reader = both
    client, blocks = source.ranks[0].client, source.take(50)
    source.write(Kv.random(50), blocks)
    with stopped(source.daemons[0].process.pid):
        publishing = asyncio.create_task(client.publish(request_id, blocks.tables(), 50))
        await asyncio.sleep(0)
        await asyncio.wait_for(lose_session(client), TIMEOUT_S)
        with pytest.raises(Unsettled) as unsettled:
            await publishing
        settled = asyncio.create_task(unsettled.value.quiesced())
        await asyncio.sleep(0.2)  # nothing happens: there is no event to wait for
        assert not settled.done(), "a daemon that says nothing confirms nothing"
    await asyncio.wait_for(settled, TIMEOUT_S)
    with pytest.raises(TransferFailed):
        await reader.receive(request_id, reader.take(50), source=source.source())


async def test_a_silent_daemon_confirms_nothing_and_a_dead_one_everything(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("mortal")
    source, _ = await engine_on(stack, "source", daemon)
    client = source.ranks[0].client
    _, (lease,) = await published(source, request_id)
    ended = asyncio.create_task(lease.ended())
    with stopped(daemon.process.pid):
        await asyncio.wait_for(lose_session(client), TIMEOUT_S)
        await asyncio.sleep(0.2)  # nothing happens: there is no event to wait for
        assert not ended.done()
        assert not client.over.is_set()
        with pytest.raises(KvferryError):
            await client.publish("another", source.take(50).tables(), 50)
        daemon.signal(signal.SIGKILL)
        with pytest.raises(KvferryError) as gone:
            await asyncio.wait_for(ended, TIMEOUT_S)
    assert gone.value.code == "daemon_gone"


@pytest.mark.slow
async def test_a_read_under_way_when_the_session_ends_is_over_when_the_engine_is_told(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    pair = await stack.enter_async_context(tcp_pair(daemons, "lost"))
    blocks = pair.reader.take(TOKENS)

    def receive(published: str) -> Coroutine[Any, Any, object]:
        return pair.reader.receive(published, blocks, source=pair.source.source())

    async with pair.stopped_in_mid_read(request_id, receive) as read:
        await asyncio.wait_for(lose_session(pair.reader.ranks[0].client), TIMEOUT_S)
        with pytest.raises(TransferFailed) as failed:
            await asyncio.wait_for(read.receiving, TIMEOUT_S)
        await asyncio.wait_for(failed.value.quiesced(), TIMEOUT_S)
        pair.reader.ranks[0].memory[:] = 0xAB  # the blocks are the engine's again

    async def gone_on() -> bool:
        """UCX may abort a source whose reader goes away while it stands still; then it has sent nothing."""
        return await pair.source_router.healthy() or pair.source_daemon.process.poll() is not None

    await until(gone_on, "the source has gone on")
    assert np.all(pair.reader.ranks[0].memory == 0xAB)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the daemon's", "the engine's", "the daemon's, at the second try"])
async def test_an_engine_takes_up_its_memory_and_its_epoch_again(
    daemons: Daemons,
    two: list[DaemonService],
    stack: AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
    request_id: str,
    whose: str,
) -> None:
    (daemon,) = await daemons.start(request_id[-8:])
    reader, _ = await engine_on(stack, "reader", two[1])
    said: queue.Queue[str] = queue.Queue()

    def start() -> tuple[BlockingEngineClient, SharedRegion]:
        client = BlockingEngineClient.connect(str(daemon.socket), engine_id="again", epoch="1", say=said.put)
        if whose == "the engine's":
            region = memfd_region(TP1.nbytes(0))
            client.adopt(region)
        else:
            allocated = client.allocate(TP1.nbytes(0))
            assert isinstance(allocated, SharedRegion)
            region = allocated
        client.register(describe("again", "1", TP1, 0, region))
        return client, region

    client, region = await asyncio.to_thread(start)
    stack.push_async_callback(asyncio.to_thread, client.close)
    files = memory_files(daemon)
    source = SourceBody(engine_id="again", address=daemon.peer, epoch="1")
    for attempt in range(3):
        kv, blocks = Kv.random(50), reader.take(50)
        TP1.write(0, region.array(), kv, blocks, (0, 50), True)
        lease = await asyncio.to_thread(client.publish, f"{request_id}-{attempt}", blocks.tables(), 50)
        await reader.gets(f"{request_id}-{attempt}", kv, source=source)
        assert (await asyncio.wait_for(asyncio.wrap_future(lease.ended), TIMEOUT_S)).ended
        lost, held = client.client, memory_files(daemon)
        if "second try" in whose:
            fails(monkeypatch, EngineClient, "register", [True])
        await asyncio.wrap_future(client.start(lose_session(lost)))
        assert "has gone" in await asyncio.to_thread(said.get, timeout=TIMEOUT_S)
        assert "there again" in await asyncio.to_thread(said.get, timeout=TIMEOUT_S)
        assert client.client.resumed
        assert lost.over.is_set()
        assert held & memory_files(daemon) == files, "the reader may have met it again, and an arena been made for that"


@pytest.mark.slow
async def test_an_engine_gives_all_its_memory_to_the_next_daemon_though_a_part_of_it_fails_once(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, request_id: str
) -> None:
    (daemon,) = await daemons.start(request_id[-8:])
    said: queue.Queue[str] = queue.Queue()

    def start() -> BlockingEngineClient:
        client = BlockingEngineClient.connect(str(daemon.socket), engine_id="again", epoch="1", say=said.put)
        client.allocate(4096, 1)
        region = client.allocate(TP1.nbytes(0))
        assert isinstance(region, SharedRegion)
        client.register(describe("again", "1", TP1, 0, region))
        return client

    client = await asyncio.to_thread(start)
    stack.push_async_callback(asyncio.to_thread, client.close)
    fails(monkeypatch, EngineClient, "adopt", [False, True])
    await ended(daemon, signal.SIGKILL)
    await daemons.fleet.ready(daemons.fleet.again(daemon), timeout_s=TIMEOUT_S)
    while "there again" not in (words := await asyncio.to_thread(said.get, timeout=TIMEOUT_S)):
        assert "region" not in words, words
    assert not client.client.resumed


async def test_memory_that_is_mapped_for_nobody_is_unmapped(
    two: list[DaemonService], monkeypatch: pytest.MonkeyPatch, request_id: str
) -> None:
    """Its caller is cancelled while it is being mapped."""
    before, maps, mapped, may_end = open_memory(), engine_module._map, threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        region = maps(*given)
        mapped.set()
        may_end.wait(TIMEOUT_S)
        return region

    async def unmapped() -> bool:
        return not open_memory() - before

    monkeypatch.setattr(engine_module, "_map", slowly)
    async with await EngineClient.connect(str(two[0].socket), engine_id=request_id, epoch="1") as client:
        allocating = asyncio.create_task(client.allocate(1 << 20))
        assert await asyncio.to_thread(mapped.wait, TIMEOUT_S)
        assert not await unmapped()
        allocating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await allocating
        may_end.set()
        await until(unmapped, "nobody has it open")


def open_memory() -> set[int]:
    """Inodes of the shared memory that this process has open."""
    inodes = set()
    for each in os.listdir("/proc/self/fd"):
        file = f"/proc/self/fd/{each}"
        with suppress(OSError):
            if "memfd:" in os.readlink(file):
                inodes.add(os.stat(file).st_ino)
    return inodes


def fails(monkeypatch: pytest.MonkeyPatch, holder: type, name: str, when: list[bool]) -> None:
    """The first calls of it, as where this process has no descriptor left for a moment."""
    call, failures = getattr(holder, name), iter(when)

    async def called(*given: Any, **named: Any) -> Any:
        if next(failures, False):
            raise OSError("no descriptor is left")
        return await call(*given, **named)

    monkeypatch.setattr(holder, name, called)


@pytest.mark.slow
async def test_memory_that_waits_for_its_engine_goes_with_the_engines_process(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("waiting")
    router = await stack.enter_async_context(RouterClient(daemon.url))
    async with killable(daemon, "lost", "lose-session", request_id) as process:

        async def withdrawn() -> bool:
            return not await router.engines()

        await until(withdrawn, "the session is over")
        assert await router.leases() == []
        assert memory_files(daemon), "the engine lives, and may attach again"
        process.kill()

        async def gone() -> bool:
            return not memory_files(daemon)

        await until(gone, "the memory is given back")


@pytest.mark.parametrize(
    ("field", "large"),
    [
        ("publish.metadata", {"metadata": bytes(MAX_MESSAGE)}),
        ("publish.tables", {"block_ids": np.full(MAX_MESSAGE // 8 + 1, 1 << 60)}),
    ],
)
async def test_a_message_that_is_too_large_is_refused_and_the_session_goes_on(
    both: tuple[TestEngine, TestEngine], request_id: str, field: str, large: dict[str, Any]
) -> None:
    source, reader = both
    client, blocks = source.ranks[0].client, source.take(50)
    tables = blocks.tables()
    if "block_ids" in large:
        tables = {**tables, "full": type(tables["full"])(large.pop("block_ids"))}
    with refused("message_too_large") as caught:
        await client.publish(request_id, tables, 50, **large)
    assert caught.value.field == field
    assert caught.value.remedy
    kv = Kv.random(50)
    source.write(kv, blocks)
    await source.publish(request_id, blocks, 50)
    assert await reader.receive(request_id, reader.take(50), source=source.source())
    assert not client.closed.is_set()
