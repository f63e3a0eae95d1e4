"""Connections to other daemons: one gRPC channel per address, open for as long as it has users."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

import grpc

from kvferry.errors import Full, Kind, KvferryError, PeerFailed
from kvferry.rpc import PEER_OPTIONS, SILENT, UNREACHABLE, error_of
from kvferry.v1 import peer_pb2_grpc
from kvferryd.certificates import Certificates, Identity
from kvferryd.config import Config
from kvferryd.peers import allow

MAX_CHANNELS = 2048
"""Open at once: ranks of peer engines and of our own. Addresses come from request bodies, and each costs a socket."""


class Channel:
    """One user's hold on the channel to an address. `close` it: with the last one the connection ends."""

    def __init__(self, shared: _Shared, address: str) -> None:
        self._shared, self.address, self.stub = shared, address, shared.stub
        self._closed = False
        shared.users += 1

    async def close(self) -> None:
        """Idempotent. Our calls have ended: where other users are left they would go on."""
        if not self._closed:
            self._closed = True
            await self._shared.leave()


class Channels:
    """The channels to other daemons. Those dialled after a change of the certificates' files use the new ones."""

    def __init__(self, config: Config, certificates: Certificates | None = None) -> None:
        self._config, self._certificates = config, certificates
        self._open: dict[tuple[str, Identity | None], _Shared] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, address: str) -> Channel:
        """Raises KvferryError (`address_not_allowed`, `malformed_address`, `too_many_peers`)."""
        allow.check(address, self._config.allow_peers)
        identity = self._certificates.current() if self._certificates else None
        shared = self._open.get((address, identity))
        if shared is None:
            if len(self._open) >= MAX_CHANNELS:
                raise Full(
                    "too_many_peers", f"this daemon is connected with {len(self._open)} others", field="address",
                    value=address, remedy="try again; DELETE /v1/peers/ENGINE_ID forgets an engine",
                )  # fmt: skip
            shared = self._open[address, identity] = _Shared(self._open, (address, identity))
        return Channel(shared, address)

    @contextlib.asynccontextmanager
    async def calling(self, address: str) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
        """The peer service at `address` for the calls made inside; what gRPC raises becomes a KvferryError."""
        channel = self.open(address)
        try:
            async with asking(address):
                yield channel.stub
        finally:
            await channel.close()

    async def close(self) -> None:
        await asyncio.gather(*(shared.close() for shared in list(self._open.values())))


class _Shared:
    """The channel that all users of an address have in common."""

    def __init__(self, among: dict[tuple[str, Identity | None], _Shared], key: tuple[str, Identity | None]) -> None:
        self._among, self._key, self.users = among, key, 0
        self._channel = _dial(*key)
        self.stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(self._channel)

    async def leave(self) -> None:
        self.users -= 1
        if not self.users:
            await self.close()

    async def close(self) -> None:
        if self._among.get(self._key) is self:
            del self._among[self._key]
        await self._channel.close()


def _dial(address: str, identity: Identity | None) -> grpc.aio.Channel:
    options: list[tuple[str, int | str]] = [
        *PEER_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits connection and backoff of a closed one
    ]
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    if identity.name:
        options.append(("grpc.ssl_target_name_override", identity.name))
    return grpc.aio.secure_channel(address, identity.for_dialling(), options=options)


def of_peer(problem: KvferryError) -> KvferryError:
    """A problem as a peer told it. What went wrong inside the peer, or has no name, is no fault of this daemon's."""
    if problem.kind is not Kind.INTERNAL and problem.code != "internal":
        return problem
    return PeerFailed("peer_failed", f"the peer failed: {problem.message}", remedy="see the log of its daemon")


class asking:  # noqa: N801  used like a function
    """Turn what gRPC raises inside into a KvferryError about this peer; `ended` as for `error_of`."""

    def __init__(self, address: str, ended: KvferryError | None = None) -> None:
        self._address, self._ended = address, ended

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, (grpc.aio.UsageError, grpc.aio.AioRpcError)):
            # Its frames hold the call, and as long as the call lives a closed channel goes on dialling. An error may be
            # kept for long, so it must not hold those frames.
            error.__traceback__ = None
            del traceback
            raise self._problem(error) from None

    def _problem(self, error: grpc.aio.UsageError | grpc.aio.AioRpcError) -> KvferryError:
        address = self._address
        if isinstance(error, grpc.aio.UsageError):  # what a call on a closed channel raises
            return PeerFailed("peer_lost", f"the connection to {address} is closed", field="address", value=address)
        problem = error_of(error, f"peer {address}", self._ended)
        if problem.code not in (UNREACHABLE, SILENT):
            return of_peer(problem)
        return PeerFailed(
            "peer_unreachable", problem.message, field=problem.field, value=problem.value, remedy=problem.remedy
        )
