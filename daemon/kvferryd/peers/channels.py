"""Connections to other daemons: one gRPC channel per address, open for as long as it has users."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
from cachetools import LRUCache

from kvferry.errors import Full
from kvferry.rpc import PEER_OPTIONS
from kvferry.v1 import peer_pb2_grpc
from kvferryd.aio import Tasks
from kvferryd.config import Config
from kvferryd.observe import logs
from kvferryd.peers import allow
from kvferryd.peers.certificates import Certificates, Identity
from kvferryd.peers.contact import Contact, asking

log = logs.get(__name__)
MAX_CHANNELS = 2048
"""Open at once: ranks of peer engines and of our own. Addresses come from request bodies, and each costs a socket."""
CONTACTS = 4096
"""Daemons of which it is remembered whether they answer."""


class Channel:
    """A user's hold on the channel to an address. `close` it: with the last one the connection ends."""

    def __init__(self, shared: _Shared) -> None:
        self._shared, self.contact, self.stub = shared, shared.contact, shared.stub
        self._closed = False
        shared.users += 1

    @property
    def address(self) -> str:
        return self.contact.address

    def close(self) -> None:
        """Idempotent. Our calls have ended: where other users are left they would go on."""
        if not self._closed:
            self._closed = True
            self._shared.users -= 1
            if not self._shared.users:
                self._shared.end()


class Channels:
    """The channels to other daemons, which are closed here and nowhere else. Channels dialled after a change of the
    certificates' files use the new ones."""

    def __init__(self, config: Config, certificates: Certificates | None = None) -> None:
        self._config, self._certificates = config, certificates
        self._open: set[_Shared] = set()
        self._newest: dict[tuple[str, Identity | None], _Shared] = {}
        """The open one that the next user gets."""
        self._contacts: LRUCache[str, Contact] = LRUCache(CONTACTS)
        self._closing = Tasks()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, address: str) -> Channel:
        """Raises KvferryError (`address_not_allowed`, `malformed_address`, `too_many_peers`)."""
        allow.check(address, self._config.allow_peers)
        identity = self._certificates.current() if self._certificates else None
        shared = self._newest.get((address, identity))
        if shared is None or shared.waits:
            if len(self._open) >= MAX_CHANNELS:
                raise Full(
                    "too_many_peers", f"this daemon is connected with {len(self._open)} others", field="address",
                    value=address, remedy="try again; DELETE /v1/peers/ENGINE_ID forgets an engine",
                )  # fmt: skip
            shared = _Shared(address, identity, self.contact(address), self._end)
            self._open.add(shared)
            self._newest[address, identity] = shared
        return Channel(shared)

    def _end(self, shared: _Shared) -> None:
        if shared in self._open:
            self._open.remove(shared)
            self._closing.spawn(shared.close())
        where = shared.address, shared.identity
        if self._newest.get(where) is shared:
            del self._newest[where]
            # A held one may be back by now: the next user dials only if it still waits.
            held = next((other for other in self._open if (other.address, other.identity) == where), None)
            if held is not None:
                self._newest[where] = held

    def contact(self, address: str) -> Contact:
        """The contact with the daemon there."""
        contact: Contact = self._contacts.setdefault(address, Contact(address))
        return contact

    def in_trouble(self) -> list[Contact]:
        """The daemons that do not answer, or cannot be read."""
        return [contact for contact in self._contacts.values() if contact.trouble]

    @contextlib.asynccontextmanager
    async def calling(self, address: str) -> AsyncIterator[peer_pb2_grpc.PeerAsyncStub]:
        """The peer service at `address` for the calls made inside; what gRPC raises becomes a KvferryError."""
        channel = self.open(address)
        try:
            async with asking(channel.contact):
                yield channel.stub
        finally:
            channel.close()

    async def recheck(self) -> None:
        """Dial everybody again whose connection was made by an older certificate. If that fails the old one is ended
        too."""
        assert self._certificates is not None
        now = self._certificates.current()
        await asyncio.gather(*(self._recheck(shared, now) for shared in list(self._open) if shared.identity != now))

    async def _recheck(self, shared: _Shared, now: Identity) -> None:
        trying = _dial(shared.address, now)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await trying.channel_ready()
        except TimeoutError:
            if shared.users:
                log.warning("connection ended: the peer does not prove itself any more", address=shared.address)
            shared.end()
        finally:
            await trying.close()

    async def close(self) -> None:
        for shared in list(self._open):
            shared.end()
        if self._closing:
            await asyncio.wait(self._closing)


class _Shared:
    """The channel that users of an address have in common. on_end: called when it is to be closed."""

    def __init__(
        self, address: str, identity: Identity | None, contact: Contact, on_end: Callable[[_Shared], None]
    ) -> None:
        self.address, self.identity, self.contact, self.users = address, identity, contact, 0
        contact.expected = (identity.name or allow.split(address)[0]) if identity else ""
        self._on_end = on_end
        self._channel = _dial(address, identity)
        self.stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(self._channel)

    @property
    def waits(self) -> bool:
        """Whether the peer was not there, and gRPC lets seconds pass before it dials again: calls fail until then, even
        if the peer has come back. Another channel dials at once; this one's users keep it."""
        return self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def end(self) -> None:
        """Idempotent."""
        self._on_end(self)

    async def close(self) -> None:
        await self._channel.close()


def _dial(address: str, identity: Identity | None) -> grpc.aio.Channel:
    options: list[tuple[str, int | str]] = [
        *PEER_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),  # http_proxy is not for daemons, of which a proxy knows nothing
        ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits connection and backoff of a closed one
    ]
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    if identity.name:
        options.append(("grpc.ssl_target_name_override", identity.name))
    return grpc.aio.secure_channel(address, identity.for_dialling(), options=options)
