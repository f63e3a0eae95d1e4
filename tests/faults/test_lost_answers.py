"""A call that repeats one whose answer was lost is given what the daemon did for that, and nobody else is."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fleet import TIMEOUT_S, Daemons, owned_regions, refusal, until
from ranks import Blocks, Shape, describe

from kvferry.engine import EngineClient
from kvferry.errors import KvferryError
from kvferry.memory import SharedRegion, memfd_region
from kvferry.memory.handover import SUFFIX
from kvferry.v1 import engine_pb2
from kvferry.wire import manifest_to_proto
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
T = TypeVar("T")
SHAPE = Shape.tp(1, num_blocks=16)
NBYTES = SHAPE.nbytes(0)
OBEYS_S = 5.0
"""Enough for a daemon that gets no processor for a while: a call that ends before its turn is not obeyed."""


class Between:
    """Stands between an engine and its daemon. While `passes` is not set no answer comes through."""

    def __init__(self, daemon: DaemonService, folder: Path) -> None:
        self.path, self._daemon = str(folder / "engine.sock"), daemon
        self.passes = asyncio.Event()
        self.passes.set()
        self._writers: list[asyncio.StreamWriter] = []
        Path(self.path + SUFFIX).symlink_to(f"{daemon.socket}{SUFFIX}")

    async def serve(self, stack: AsyncExitStack) -> None:
        server = await asyncio.start_unix_server(self._between, self.path)
        stack.callback(server.close)
        stack.callback(self.cut)

    async def _between(self, commands: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        events, said = await asyncio.open_unix_connection(str(self._daemon.socket))
        self._writers += [answers, said]
        always = asyncio.Event()
        always.set()
        try:
            await asyncio.gather(self._pass(commands, said, always), self._pass(events, answers, self.passes))
        except OSError:
            self.cut()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
        while some := await reader.read(1 << 16):
            await passes.wait()
            writer.write(some)
            await writer.drain()
        writer.close()

    def cut(self) -> None:
        """End the connections that there are."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()


@pytest.fixture(scope="module")
async def daemon(daemons: Daemons) -> DaemonService:
    return (await daemons.start("lossy"))[0]


@pytest.fixture
async def between(daemon: DaemonService, tmp_path: Path, stack: AsyncExitStack) -> Between:
    between = Between(daemon, tmp_path)
    await between.serve(stack)
    return between


async def repeated(between: Between, client: EngineClient, call: Callable[[], Awaitable[T]], waits_s: float = 1) -> T:
    """Its result the second time; the first time it is answered too late. waits_s: for the daemon to obey meanwhile."""
    patience_s, client._session.call_timeout_s = client._session.call_timeout_s, waits_s
    between.passes.clear()
    assert (await refusal(call())).code == "deadline"
    between.passes.set()
    client._session.call_timeout_s = patience_s
    return await call()


async def test_a_call_that_repeats_one_is_answered_as_that_was(
    daemon: DaemonService, between: Between, request_id: str
) -> None:
    before = owned_regions(daemon)
    async with await EngineClient.connect(between.path, engine_id="lossy", epoch=request_id) as client:
        region = await repeated(between, client, lambda: client.allocate(NBYTES))
        assert isinstance(region, SharedRegion)
        own = memfd_region(NBYTES, 1)
        await repeated(between, client, lambda: client.adopt(own))
        assert owned_regions(daemon) == before + 1
        manifest = describe("lossy", request_id, SHAPE, 0, region)
        notes = await repeated(between, client, lambda: client.register(manifest))
        await client.publish(request_id, Blocks((3, 1, 4, 15), 9).tables(), 50)
        for call, code in (
            (client.allocate(NBYTES), "region_taken"),
            (client.adopt(own), "region_taken"),
            (client.register(manifest), "already_registered"),
        ):
            assert (await refusal(call)).code == code, "the first of them was answered"
        assert notes == ()
        own.close()
        region.close()


async def test_a_call_that_asks_for_another_size_than_the_lost_one_names_both(
    between: Between, request_id: str
) -> None:
    """The first one can still be repeated."""
    async with await EngineClient.connect(between.path, engine_id="sizes", epoch=request_id) as client:

        async def another() -> SharedRegion:
            for nbytes in (2 * NBYTES, 3 * NBYTES):
                with refused("region_taken") as caught:
                    await client.allocate(nbytes)
                assert f"has {NBYTES} bytes" in caught.value.message
                assert "same size" in caught.value.remedy
            region = await client.allocate(NBYTES)
            assert isinstance(region, SharedRegion)
            return region

        calls = iter((lambda: client.allocate(NBYTES), another))
        (await repeated(between, client, lambda: next(calls)(), OBEYS_S)).close()


async def test_memory_whose_answer_the_end_of_the_session_has_taken_is_had_in_the_next_one(
    daemon: DaemonService, between: Between, request_id: str
) -> None:
    before = owned_regions(daemon)

    async def allocated() -> bool:
        return owned_regions(daemon) == before + 1

    async with await EngineClient.connect(between.path, engine_id="cut", epoch=request_id) as client:
        between.passes.clear()
        allocating = asyncio.create_task(client.allocate(NBYTES))
        await until(allocated, "the daemon has allocated it")
        between.cut()
        with pytest.raises(KvferryError):
            await allocating
        between.passes.set()
        await asyncio.wait_for(client.over.wait(), TIMEOUT_S)
        async with await EngineClient.connect(
            between.path, engine_id="cut", epoch=request_id, resume=client, timeout_s=TIMEOUT_S
        ) as again:
            assert again.resumed
            region = await again.allocate(NBYTES)
            assert isinstance(region, SharedRegion) and not region.array().any()
            assert await allocated(), "there is one"
            region.close()


async def test_memory_that_could_not_be_fetched_is_fetched_by_the_next_call(
    daemon: DaemonService, between: Between, request_id: str
) -> None:
    async with await EngineClient.connect(between.path, engine_id="unfetched", epoch=request_id) as client:
        door = between.path + SUFFIX
        os.rename(door, door + ".away")
        assert (await refusal(client.allocate(NBYTES))).code == "handover_failed"
        os.rename(door + ".away", door)
        (await client.allocate(NBYTES)).close()


async def test_a_key_stands_for_one_call(daemon: DaemonService, request_id: str) -> None:
    """A call of another method, or with other arguments, that has the key of one that was obeyed is refused by name."""
    async with await EngineClient.connect(daemon.socket, engine_id="keys", epoch=request_id) as client:
        call, stub = client._session.call, client._session.stub
        asked = engine_pb2.AllocateRequest(session=client.session, nbytes=NBYTES, idempotency_key="k")
        first, again = await call(stub.Allocate, asked), await call(stub.Allocate, asked)
        first.handed.ticket = again.handed.ticket = ""
        assert first == again
        region, own = await client.allocate(NBYTES, region=1), memfd_region(NBYTES, 2)
        assert isinstance(region, SharedRegion)
        manifest = manifest_to_proto(describe("keys", request_id, SHAPE, 0, region))
        memory = await client._handed_over(own)
        asks: list[tuple[Any, Any, str, str]] = [
            (stub.Allocate, engine_pb2.AllocateRequest(region=2, nbytes=NBYTES), "k", "key_taken"),
            (stub.Allocate, engine_pb2.AllocateRequest(nbytes=2 * NBYTES), "k", "key_taken"),
            (stub.Adopt, engine_pb2.AdoptRequest(memory=memory), "k", "key_taken"),
            (stub.Register, engine_pb2.RegisterRequest(manifest=manifest), "k", "key_taken"),
            (stub.Allocate, engine_pb2.AllocateRequest(region=2, nbytes=NBYTES), "k" * 129, "malformed_key"),
        ]
        for method, request, key, code in asks:
            request.session, request.idempotency_key = client.session, key
            with refused(code, field="idempotency_key"):
                await call(method, request)
        own.close()
        region.close()


async def test_a_key_of_an_adoption_stands_for_that_memory(daemon: DaemonService, request_id: str) -> None:
    """All of it but the ticket, which is another each time."""
    async with await EngineClient.connect(daemon.socket, engine_id="adopts", epoch=request_id) as client:
        own = memfd_region(2 * mmap.PAGESIZE)

        async def adopt(offset: int = 0, *, again: bool = False) -> None:
            memory = await client._handed_over(own)
            memory.nbytes, memory.handed.offset, memory.again = mmap.PAGESIZE, offset, again
            request = engine_pb2.AdoptRequest(session=client.session, memory=memory, idempotency_key="k")
            await client._session.call(client._session.stub.Adopt, request)

        await adopt()
        await adopt()
        for another in (adopt(mmap.PAGESIZE), adopt(again=True)):
            assert (await refusal(another)).code == "key_taken"
        own.close()
