"""Real daemons for these tests, each a process of its own. The daemons of `pair` are shared: no test may harm them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from fleet import TIMEOUT_S, Daemons, open_files, peer_stub, refusal, until
from pair import Pair, a_pair
from ranks import TestEngine
from victim import OWN_FAULT, SHAPE, Victim, a_good_transfer

from kvferry.router import RouterClient
from kvferry.v1 import engine_pb2, engine_pb2_grpc, peer_pb2
from kvferryd.demo.fleet import DaemonService, Fleet


@pytest.fixture
def daemons(own_fleet: Fleet) -> Daemons:
    """Daemons of one test: they end with it."""
    return Daemons(own_fleet)


@pytest.fixture(scope="session")
async def shared_daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Daemons]:
    """Daemons that several tests share. Each of them costs the others CPU until the last test."""
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield Daemons(fleet)


@pytest.fixture(scope="session")
async def near(shared_daemons: Daemons) -> DaemonService:
    """A daemon of two that have no flags and no engine: each test brings its own, and takes it away."""
    (daemon,) = await shared_daemons.start("near")
    return daemon


@pytest.fixture(scope="session")
async def far(shared_daemons: Daemons) -> DaemonService:
    (daemon,) = await shared_daemons.start("far")
    return daemon


@pytest.fixture(scope="session")
async def shared_pair(shared_daemons: Daemons) -> AsyncIterator[Pair]:
    async with a_pair(shared_daemons) as pair:
        yield pair


@pytest.fixture
async def pair(shared_pair: Pair) -> AsyncIterator[Pair]:
    """Writes of a failed transfer are over before the next test takes blocks."""
    yield shared_pair
    books = [rank.client._book for rank in shared_pair.decode.ranks]
    unquiet = [each.said.call.quiet for book in books for each in book._unquiet.values()]
    if unquiet:
        await asyncio.wait(unquiet, timeout=TIMEOUT_S)


@pytest.fixture(scope="session")
async def victim(shared_daemons: Daemons, shared_pair: Pair) -> AsyncIterator[Victim]:
    """A daemon that everything bad is done to."""
    (daemon,) = await shared_daemons.start("victim")
    engine = await TestEngine.start("victim", [daemon], SHAPE)
    async with (
        RouterClient(daemon.url) as router,
        httpx.AsyncClient(base_url=daemon.url, trust_env=False) as http,
        grpc.aio.insecure_channel(f"unix:{daemon.socket}") as channel,
        peer_stub(daemon) as warm,
    ):
        door = engine_pb2_grpc.EngineStub(channel)
        victim = Victim(engine, daemon, router, http, door)
        await a_good_transfer(shared_pair, victim, "first")
        # Our own connections stay open: they are no leak.
        await asyncio.gather(
            router.healthy(),
            http.get("/healthz"),
            refusal(door.Register(engine_pb2.RegisterRequest())),
            refusal(warm.Handshake(peer_pb2.HandshakeRequest())),
        )
        victim.open_files = open_files(daemon)
        yield victim
    await engine.close()


@pytest.fixture
async def lives_on(victim: Victim) -> AsyncIterator[None]:
    """After each test the daemon is as it was: nothing is left over, and nothing went wrong inside it."""
    yield
    assert victim.daemon.process.poll() is None, victim.daemon.tail()
    assert await victim.router.leases() == []
    assert [record for record in await victim.router.transfers() if not record.state.ended] == []
    assert not [line for line in victim.daemon.log.read_text().splitlines() if OWN_FAULT.search(line)]


@pytest.fixture(scope="module")
async def unharmed(victim: Victim, shared_pair: Pair) -> AsyncIterator[None]:
    """After each module of bad deeds a good transfer works, and nothing has leaked."""
    yield
    await a_good_transfer(shared_pair, victim, f"good-{uuid.uuid4().hex}")

    async def as_before() -> bool:
        return open_files(victim.daemon) <= victim.open_files

    await until(as_before, f"{open_files(victim.daemon)} open files are {victim.open_files} again")
    assert [engine.engine_id for engine in await victim.router.engines()] == ["victim"]
