"""A daemon that ends and comes back: its engine attaches again with the memory that it still maps."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import signal
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fleet import TIMEOUT_S, Daemons
from ranks import NHD, Blocks, Kv, Shape, describe

from kvferry.blocking import BlockingEngineClient
from kvferry.engine import EngineClient, Lease, TransferFailed
from kvferry.errors import KvferryError
from kvferry.manifest import Manifest
from kvferry.memory import SharedRegion
from kvferry.schemas import SourceBody
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
SHAPE = Shape(axes=NHD, num_blocks=16)
BLOCKS = Blocks((3, 1, 4), 5)


@dataclass
class Engine:
    """With one rank. `said`: what it was told about its daemon."""

    name: str
    daemon: DaemonService
    client: BlockingEngineClient
    region: SharedRegion
    said: queue.Queue[str]

    @classmethod
    def start(cls, name: str, daemon: DaemonService, epoch: str) -> Engine:
        said: queue.Queue[str] = queue.Queue()
        client = BlockingEngineClient.connect(
            str(daemon.socket), engine_id=name, epoch=epoch, timeout_s=TIMEOUT_S, say=said.put
        )
        region = client.allocate(SHAPE.nbytes(0))
        assert isinstance(region, SharedRegion)
        client.register(describe(name, epoch, SHAPE, 0, region))
        return cls(name, daemon, client, region, said)

    def publish(self, request_id: str, kv: Kv) -> None:
        SHAPE.write(0, self.region.array(), kv, BLOCKS, (0, kv.tokens), True)
        self.client.publish(request_id, BLOCKS.tables(), kv.tokens)

    def receive(self, request_id: str, source: Engine) -> None:
        named = SourceBody(engine_id=source.name, address=source.daemon.peer)
        self.client.receive(request_id, BLOCKS.tables(), source=named).result(TIMEOUT_S)

    def has(self, kv: Kv) -> bool:
        """This, and nothing else."""
        wanted = np.zeros_like(self.region.array())
        SHAPE.write(0, wanted, kv, BLOCKS, (0, kv.tokens), True)
        return bool(np.array_equal(wanted, self.region.array()))

    async def hears(self, *words: str) -> None:
        for word in words:
            assert word in await asyncio.to_thread(self.said.get, timeout=TIMEOUT_S)

    async def loses_its_daemon(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.daemon.signal(number)
        await self.hears("has gone")
        await asyncio.to_thread(self.daemon.process.wait, TIMEOUT_S)

    async def gets_another(self, daemons: Daemons) -> None:
        self.daemon = daemons.fleet.again(self.daemon)
        await self.hears("there again")


@pytest.fixture(scope="module")
async def two(shared_daemons: Daemons) -> list[DaemonService]:
    """As the last test left them, one of them perhaps dead."""
    flags = ("--connect-timeout-s", "20")  # the daemon that is asked may just have been started
    started = await asyncio.gather(*(shared_daemons.start(side, 1, *flags) for side in ("source", "destination")))
    return [daemon for (daemon,) in started]


@pytest.fixture
async def both(
    shared_daemons: Daemons, two: list[DaemonService], stack: AsyncExitStack, request_id: str
) -> AsyncIterator[tuple[Engine, Engine]]:
    fleet, engines = shared_daemons.fleet, []
    for daemon in [fleet.again(daemon) if daemon.process.poll() is not None else daemon for daemon in two]:
        await fleet.ready(daemon, timeout_s=TIMEOUT_S)
        engine = await asyncio.to_thread(Engine.start, f"{daemon.name}-{request_id[-8:]}", daemon, request_id)
        stack.push_async_callback(asyncio.to_thread, engine.client.close)
        engines.append(engine)
    yield engines[0], engines[1]
    two[:] = [engine.daemon for engine in engines]


def exchanged(source: Engine, destination: Engine, request_id: str) -> bool:
    """Whether what the one publishes is what the other receives."""
    kv = Kv.random(40)
    destination.region.array()[:] = 0
    source.publish(request_id, kv)
    destination.receive(request_id, source)
    return destination.has(kv)


@pytest.mark.parametrize(
    ("side", "number"),
    [
        pytest.param(0, signal.SIGKILL, id="source-killed"),
        pytest.param(1, signal.SIGTERM, id="destination-stopped"),
        pytest.param(0, signal.SIGTERM, id="source-stopped", marks=pytest.mark.long),
        pytest.param(1, signal.SIGKILL, id="destination-killed", marks=pytest.mark.long),
    ],
)
async def test_an_engine_attaches_again_when_its_daemon_is_back(
    shared_daemons: Daemons, both: tuple[Engine, Engine], side: int, number: signal.Signals
) -> None:
    assert await asyncio.to_thread(exchanged, *both, "before")
    engine = both[side]
    await engine.loses_its_daemon(number)
    with pytest.raises(KvferryError, match=r"ended the session|does not answer"):
        await asyncio.to_thread(engine.publish, "meanwhile", Kv.random(40))
    await engine.gets_another(shared_daemons)
    assert await asyncio.to_thread(exchanged, *both, "after")


async def test_weights_that_are_replaced_while_no_daemon_is_there_have_their_name_afterwards(
    shared_daemons: Daemons, both: tuple[Engine, Engine]
) -> None:
    source, destination = both
    await source.loses_its_daemon()
    await asyncio.to_thread(source.client.replace_weights, "B")
    await source.gets_another(shared_daemons)
    with refused("other_weights", TransferFailed):
        await asyncio.to_thread(exchanged, source, destination, "by others")
    await asyncio.to_thread(destination.client.replace_weights, "B")
    assert await asyncio.to_thread(exchanged, source, destination, "by the same")


async def test_memory_that_was_handed_over_again_outlives_its_engine_as_before(
    shared_daemons: Daemons, both: tuple[Engine, Engine]
) -> None:
    source, destination = both
    kv = Kv.random(40)
    await source.loses_its_daemon()
    await source.gets_another(shared_daemons)
    await asyncio.to_thread(source.publish, "left behind", kv)
    await asyncio.to_thread(source.client.close)
    await asyncio.to_thread(destination.receive, "left behind", source)
    assert destination.has(kv)


async def test_a_reader_of_what_was_lost_is_refused_and_does_not_wait(
    shared_daemons: Daemons, both: tuple[Engine, Engine]
) -> None:
    source, destination = both
    await asyncio.to_thread(source.publish, "lost", Kv.random(40))
    await source.loses_its_daemon()
    with pytest.raises(KvferryError, match=r"ended the session|does not answer"):
        await asyncio.to_thread(source.publish, "meanwhile", Kv.random(40))
    await source.gets_another(shared_daemons)
    for request_id in ("lost", "meanwhile"):
        with refused("lease_ended", TransferFailed):
            await asyncio.to_thread(destination.receive, request_id, source)
        assert await asyncio.to_thread(exchanged, *both, request_id)  # under the same name


async def test_what_is_published_while_the_engine_registers_again_is_read(
    shared_daemons: Daemons, both: tuple[Engine, Engine]
) -> None:
    source, destination = both
    kv, attach, published = Kv.random(40), source.client._attach, queue.Queue[Future[Lease]]()
    SHAPE.write(0, source.region.array(), kv, BLOCKS, (0, kv.tokens), True)

    async def attached(**named: Any) -> EngineClient:
        client = await attach(**named)
        register = client.register

        async def registered(manifest: Manifest) -> tuple[str, ...]:
            registering = asyncio.create_task(register(manifest))
            await asyncio.sleep(0)  # it has begun
            published.put(source.client.start(source.client.client.publish("early", BLOCKS.tables(), kv.tokens)))
            return await registering

        client.register = registered  # type: ignore[method-assign]
        return client

    source.client._attach = attached
    await source.loses_its_daemon()
    await source.gets_another(shared_daemons)
    early = await asyncio.to_thread(published.get, timeout=TIMEOUT_S)
    await asyncio.to_thread(early.result, TIMEOUT_S)
    await asyncio.to_thread(destination.receive, "early", source)
    assert destination.has(kv)


async def test_an_engine_that_lacks_a_descriptor_tries_again(
    shared_daemons: Daemons, both: tuple[Engine, Engine]
) -> None:
    source, _ = both
    attach = source.client._attach

    async def without_descriptor(**_: Any) -> EngineClient:
        source.client._attach = attach
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    source.client._attach = without_descriptor
    await source.loses_its_daemon()
    await source.gets_another(shared_daemons)
    assert await asyncio.to_thread(exchanged, *both, "after")


async def test_an_engine_that_is_refused_says_why_and_tries_again(
    shared_daemons: Daemons, both: tuple[Engine, Engine]
) -> None:
    """Readers were told another address than the daemon has now."""
    engine = both[0]
    await engine.loses_its_daemon()
    engine.client._address = "127.0.0.1:1"
    engine.daemon = shared_daemons.fleet.again(engine.daemon)
    await engine.hears("address")
    engine.client._address = engine.daemon.peer
    await engine.hears("there again")


async def test_closing_does_not_wait_for_a_daemon(both: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = both[0]
    for bound in ("blocking.END_S", "blocking.AGAIN_S", "session.ASK_S", "session.CLOSE_S"):
        monkeypatch.setattr(f"kvferry.{bound}", TIMEOUT_S)  # any that might wait there
    await engine.loses_its_daemon()
    async with asyncio.timeout(TIMEOUT_S / 3):
        await asyncio.to_thread(engine.client.close)


class Stream:
    """As much of torch.cuda.Stream as is asked for where there is no GPU."""

    device = type("Device", (), {"index": 0})
    synchronized = False

    def synchronize(self) -> None:
        self.synchronized = True


async def test_where_no_fence_can_be_had_the_stream_is_waited_for(both: tuple[Engine, Engine]) -> None:
    stream = Stream()
    after = await asyncio.to_thread(both[0].client.written, stream)  # type: ignore[arg-type]
    assert after is None
    assert stream.synchronized
