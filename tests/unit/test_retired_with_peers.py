"""An engine that is retired leaves nothing behind of its peers, however many they are, and whether they answer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from caches import attention, cache
from stepped import Daemon, manifest_of, stepping
from test_channels_of_ranks import first_of

from kvferry.errors import KvferryError
from kvferry.rpc import PEER_OPTIONS
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import reader_stream
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.peers.peers import Peers
from kvferryd.peers.roster import Roster, Seed
from kvferryd.plan import plan
from kvferryd.transport.read import TransportError

pytestmark = pytest.mark.anyio
PEERS = 3


class Sources(peer_pb2_grpc.PeerServicer):
    """No stream ends before every reader has ended its own."""

    def __init__(self) -> None:
        self.read = self.left = 0
        self.changed = asyncio.Condition()

    async def Read(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[peer_pb2.ReadReply]:
        self.read += 1
        async for _ in requests:
            async with self.changed:
                self.changed.notify_all()
        self.left += 1
        async with self.changed:
            self.changed.notify_all()
            await self.changed.wait_for(lambda: self.left == PEERS)
        if False:
            yield


async def test_streams_to_all_peers_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_stream, "CLOSE_S", 3600.0)
    server, sources = grpc.aio.server(options=PEER_OPTIONS), Sources()
    peer_pb2_grpc.add_PeerServicer_to_server(sources, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    peers, engine = Peers(Config(), Metrics()), first_of(address)

    async def shake(engine: Engine, name: str, address: str, *_: object) -> PeerEngine:
        manifest = cache(*attention(), engine=name)
        opening = peer_pb2.ReadOpening(reader=engine.as_reader(name))
        rank = PeerRank(peers.channels.open(address), manifest, 1, "", "a", b"", {}, opening)
        assert not rank.stream.over
        return PeerEngine(name, "1", {0: rank}, plan([manifest], manifest), engine, defaultdict(float))

    monkeypatch.setattr(peers._handshakes, "shake", shake)
    async with asyncio.timeout(60):
        for name in map(str, range(PEERS)):
            await peers.get(engine, name, address)
        async with sources.changed:
            await sources.changed.wait_for(lambda: sources.read == PEERS)
        await peers.forget_engine(engine)
    assert not len(peers.channels)
    await asyncio.gather(peers.close(), server.stop(0))


async def test_nothing_is_begun_with_peers_for_an_engine_that_retires() -> None:
    """Its peers may have been forgotten by then: nobody would end what begins now."""
    config, seed = Config(), Seed()
    peers, engine = Peers(config, Metrics()), first_of("127.0.0.1:1", "127.0.0.1:2")
    roster = Roster(config, peers.channels, seed, "instance", lambda engine: None)
    engine.session.retiring = True
    peers.want(engine, ("127.0.0.1:1",))
    roster.follow(engine)
    assert not of_meetings() and not roster._places
    with pytest.raises(KvferryError) as gone:
        await peers.get(engine, "far", "127.0.0.1:1")
    assert gone.value.code == "engine_gone"
    await peers.close()


class Silent(peer_pb2_grpc.PeerServicer):
    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)

    async def Handshake(self, request: Any, context: Any) -> peer_pb2.HandshakeReply:
        self.asked.release()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("end", ["retired", "closed"])
async def test_no_handshake_outlives_its_engine(end: str) -> None:
    """Nor does it keep anybody waiting: each caller is told at once."""
    server, silent = grpc.aio.server(options=PEER_OPTIONS), Silent()
    peer_pb2_grpc.add_PeerServicer_to_server(silent, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    peers, engine = Peers(Config(connect_timeout_s=600), Metrics()), first_of(address)
    try:
        async with asyncio.timeout(60):
            getting = [asyncio.create_task(peers.get(engine, name, address)) for name in ("far", "far", "farther")]
            peers.want(engine, (address,))
            for _ in range(3):
                await silent.asked.acquire()
            assert len(of_meetings()) == 3
            await (peers.forget_engine(engine) if end == "retired" else peers.close())
            assert not of_meetings() and not len(peers.channels)
            await asyncio.wait(getting)
        errors = [each.exception() for each in getting]
        assert [each.code for each in errors if isinstance(each, KvferryError)] == 3 * ["engine_gone"]
    finally:
        await asyncio.gather(peers.close(), server.stop(0))


def of_meetings() -> list[str]:
    """All that is under way for an engine, its callers aside."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return [name for name in names if name.startswith("Meeting.")]


@pytest.mark.parametrize("cut", ["stopped", "retired"])
def test_a_handshake_that_is_stopped_while_it_is_undone_leaves_nothing(cut: str) -> None:
    """Its bound passes, or its engine leaves, while NIXL takes its time over the first name."""
    with stepping() as world:
        homes = {0: "127.0.0.1:7001", 1: "127.0.0.1:7002"}
        for rank, address in homes.items():
            Daemon(world, address, manifest_of("prefill", rank=rank, of=2, heads=2), homes)
        reader = Daemon(world, own := "127.0.0.1:7003", manifest_of("decode", heads=2), {0: own})
        peers, agent = reader.ferry.peers_known, world.agents[reader.engine.agent.name]
        remove, unloading = agent.remove_peer, asyncio.Event()

        async def warm(peer: str, span: object) -> None:
            raise TransportError("transport_failed", "NIXL does not connect")

        async def remove_peer(alias: str) -> None:
            await unloading.wait()
            await remove(alias)

        agent.warm, agent.remove_peer = warm, remove_peer  # type: ignore[method-assign]
        with world.within(reader.process):
            asked = world.loop.create_task(peers.get(reader.engine, "prefill", homes[0]))
            world.loop.settle()
            world.run()
            assert len(agent._peers) == 2 and not asked.done()
            if cut == "stopped":
                world.loop.pass_time(peers._handshakes.within_s)
            else:
                world.loop.create_task(peers.forget_engine(reader.engine))
                world.loop.settle()
            assert isinstance(asked.exception(), KvferryError)
            world.loop.call(unloading.set)
            world.run()
        assert not agent._peers and not len(peers.channels)
