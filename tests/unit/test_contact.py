"""Calls to another daemon: what is kept of a call that fails, and how a call ends when its channel is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest

from kvferry.errors import KvferryError
from kvferry.rpc import PEER_OPTIONS
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.peers.channels import Channels

pytestmark = pytest.mark.anyio
NOBODY = "127.0.0.1:1"


class Silent(peer_pb2_grpc.PeerServicer):
    """Takes calls, and answers none."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Handshake(self, request: Any, context: Any) -> peer_pb2.HandshakeReply:
        self.called.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def Order(self, request: Any, context: Any) -> AsyncIterator[peer_pb2.RankTransfer]:
        yield peer_pb2.RankTransfer(state="reading")
        self.called.set()
        await asyncio.Event().wait()


@pytest.fixture
async def silent() -> AsyncIterator[tuple[Silent, str]]:
    server, service = grpc.aio.server(options=PEER_OPTIONS), Silent()
    peer_pb2_grpc.add_PeerServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield service, address
    await server.stop(0)


async def asked(channels: Channels, address: str) -> None:
    async with channels.calling(address) as stub:
        await stub.Handshake(peer_pb2.HandshakeRequest())


async def followed(channels: Channels, address: str) -> None:
    async with channels.calling(address) as stub:
        async for _ in stub.Order([peer_pb2.OrderRequest()]):
            pass


@pytest.mark.parametrize("calling", [asked, followed])
async def test_a_call_whose_channel_is_closed_has_lost_its_peer(
    silent: tuple[Silent, str], calling: Callable[[Channels, str], Coroutine[None, None, None]]
) -> None:
    """It raises an error of the peer, not CancelledError: the caller would take that for its own cancellation."""
    service, address = silent
    channels = Channels(Config())
    asking = asyncio.create_task(calling(channels, address))
    async with asyncio.timeout(60):
        await service.called.wait()
        await channels.close()
        with pytest.raises(KvferryError) as caught:
            await asking
    assert caught.value.code == "peer_lost"


async def test_a_call_that_is_cancelled_says_nothing_of_its_peer(silent: tuple[Silent, str]) -> None:
    service, address = silent
    channels = Channels(Config())
    asking = asyncio.create_task(asked(channels, address))
    async with asyncio.timeout(60):
        await service.called.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert not channels.contact(address).failures


async def test_what_a_daemon_failed_with_is_kept_without_what_was_under_way() -> None:
    """A call that lives goes on dialling, though its channel is closed."""
    channels = Channels(Config())
    with pytest.raises(KvferryError):
        await asked(channels, NOBODY)
    error = channels.contact(NOBODY).error
    assert error is not None and error.code == "peer_unreachable"
    assert error.__traceback__ is error.__context__ is error.__cause__ is None
