"""An engine of many peers is retired as fast as one of a few: its streams to them end together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from caches import attention, cache
from test_channels_of_ranks import first_of

from kvferry.rpc import PEER_OPTIONS
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import reader_stream
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.peers.peers import Peers
from kvferryd.plan import plan

pytestmark = pytest.mark.anyio
PEERS = 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
    for name in map(str, range(PEERS)):
        manifest = cache(*attention(), engine=name)
        rank = PeerRank(peers.channels.open(address), manifest, 1, "", "a", b"", {}, peer_pb2.ReadOpening())
        own_plan = plan([manifest], manifest)
        peers._known[engine, name] = PeerEngine(name, "1", {0: rank}, own_plan, engine, {address}, defaultdict(float))
        assert not rank.stream.over
    async with asyncio.timeout(60):
        async with sources.changed:
            await sources.changed.wait_for(lambda: sources.read == PEERS)
        await peers.forget_engine(engine)
    assert not len(peers.channels)
    await asyncio.gather(peers.close(), server.stop(0))
