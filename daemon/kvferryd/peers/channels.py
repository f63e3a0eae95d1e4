"""One gRPC channel per peer address, with or without mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from kvferry.errors import KvferryError
from kvferry.rpc import PEER_OPTIONS, error_of
from kvferry.v1 import peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.peers import allow


class Channels:
    """Owns the channels to other daemons."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(self, address: str) -> peer_pb2_grpc.PeerAsyncStub:
        """The peer service at `address`. Raises KvferryError (`address_not_allowed`, `malformed_address`)."""
        allow.check(address, self._config.allow_peers)
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dial(address)
        return peer_pb2_grpc.PeerStub(channel)

    def _dial(self, address: str) -> grpc.aio.Channel:
        options = [*PEER_OPTIONS, ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]
        if not self._config.tls:
            return grpc.aio.insecure_channel(address, options=options)
        cert, key, ca = self._config.tls_cert, self._config.tls_key, self._config.tls_ca
        assert cert and key and ca
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
        return grpc.aio.secure_channel(address, credentials, options=options)

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))


@contextlib.asynccontextmanager
async def asking(address: str, ended: KvferryError | None = None) -> AsyncIterator[None]:
    """Turn what gRPC raises inside into a KvferryError about this peer; `ended` as for `error_of`."""
    try:
        yield
    except grpc.aio.UsageError:  # what a call on a closed channel raises
        raise KvferryError(
            "peer_lost", f"the connection to {address} is closed", field="address", value=address
        ) from None
    except grpc.aio.AioRpcError as error:
        raised = error_of(error, f"peer {address}", ended)
        if raised.code in ("unreachable", "deadline"):
            raised.code = "peer_unreachable"
        raise raised from None
