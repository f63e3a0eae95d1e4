"""The peers that the settings name, where they do not answer, and where their names cannot be looked up."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import grpc
import pytest
from test_channels_of_ranks import first_of

from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import known as known_peers
from kvferryd.peers.known import KnownPeers
from kvferryd.peers.peers import Peers

pytestmark = pytest.mark.anyio


class Answering(peer_pb2_grpc.PeerServicer):
    """Refuses each handshake by its number: the first when `may_answer`."""

    def __init__(self) -> None:
        self.asked, self.may_answer, self.times = asyncio.Event(), asyncio.Event(), 0

    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: Any) -> peer_pb2.HandshakeReply:
        self.times = number = self.times + 1
        self.asked.set()
        await self.may_answer.wait()
        await context.abort(grpc.StatusCode.NOT_FOUND, f"handshake {number}")


async def test_an_order_that_joins_a_known_peers_handshake_begins_its_own_where_that_fails() -> None:
    """It may have come as the other's time was over, and to it an engine's id passes that was only presumed."""
    answering, server = Answering(), grpc.aio.server()
    peer_pb2_grpc.add_PeerServicer_to_server(answering, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    engine, peers = first_of(address), Peers(Config(), Metrics())
    async with asyncio.timeout(60):
        met = asyncio.create_task(peers.get(engine, "far", address, ordered=False))
        await answering.asked.wait()
        ordered = [asyncio.create_task(peers.get(engine, "far", address)) for _ in range(2)]
        await asyncio.sleep(0)  # they have joined it
        answering.may_answer.set()
        await asyncio.wait([met, *ordered])
    said = [str(each.exception()) for each in (met, *ordered)]
    assert ["handshake 1" in said[0], *("handshake 2" in each for each in said[1:])] == [True, True, True], said
    await asyncio.gather(peers.close(), server.stop(0))


async def test_a_name_whose_lookup_hangs_takes_one_thread_and_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, others = threading.Event(), threading.Semaphore(0)
    hanging: list[str] = []

    def looked_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host == "pod-silent":
            hanging.append(host)
            answered.wait()
        others.release()
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(known_peers, "SOON_S", 0.01)
    config = Config(known_peers=("pod-silent:7411", "pod-0:7411"), allow_peers=("pod-*",))
    peers = Peers(config, Metrics())
    known = KnownPeers(config, peers, list)
    running = asyncio.create_task(known.run())
    try:
        for _ in range(2 * known_peers.LOOKUPS):
            assert await asyncio.to_thread(others.acquire, timeout=60)
            known.look()
        assert len(hanging) == 1
    finally:
        answered.set()
        running.cancel()
        await asyncio.wait([running])
        await peers.close()


async def test_names_that_cannot_be_looked_up_keep_no_other_work_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Semaphore(0), threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        asked.release()
        answered.wait()
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    config = Config(known_peers=tuple(f"pod-{number}:7411" for number in range(64)), allow_peers=("pod-*",))
    peers = Peers(config, Metrics())
    running = asyncio.create_task(KnownPeers(config, peers, list).run())
    try:
        async with asyncio.timeout(60):
            while not asked.acquire(blocking=False):  # noqa: ASYNC110  a thread tells
                await asyncio.sleep(0.01)
            await asyncio.to_thread(int)
    finally:
        answered.set()
        running.cancel()
        await asyncio.wait([running])
        await peers.close()


async def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)

    def fails(*_: Any, **__: Any) -> list[Any]:
        asked.release()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    config = Config(known_peers=("pod:7411",), allow_peers=("pod",))
    peers = Peers(config, Metrics())
    known = KnownPeers(config, peers, list)
    running = asyncio.create_task(known.run())
    try:
        for _ in range(2):
            known.look()
            assert await asyncio.to_thread(asked.acquire, timeout=60)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await peers.close()
