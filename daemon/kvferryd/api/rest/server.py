"""What serves the application: uvicorn, behind a door that bounds its connections, over mutual TLS where it is set."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferryd import logs
from kvferryd.certificates import Certificates
from kvferryd.config import Config
from kvferryd.settings import split_address

log = logs.get(__name__)
HEADER_S = 5.0
"""The longest that a TLS handshake, and then the header of a request, may take."""
MAX_CONNECTIONS = 1024
"""At most, and at most a quarter of the descriptors that this process may have."""
BACKLOG, BREATH_S = 128, 0.1


def rest_server(app: FastAPI, config: Config, certificates: Certificates | None = None) -> RestServer:
    """A server for `config.rest`, not yet started. Its owner awaits `serve()` and ends it with `should_exit`.

    Lines go where `kvferryd.logs` sends them. Long polls that are open at the end are cut after two seconds. `serve`
    raises OSError where it cannot listen.
    """
    host, port = split_address(config.rest)
    settings = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,  # no header says which address the client has
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )
    settings.load()
    if config.rest_tls:
        assert certificates is not None
        settings.ssl = certificates.server_context()
    return RestServer(settings)


class RestServer(uvicorn.Server):
    """Accepts by itself: asyncio's servers have no bound, and write thousands of lines when descriptors run out."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connection() -> Connection:
            return Connection(self.config, self.server_state, {})

        listening = await _listening(self.config.host, self.config.port)
        connections = cast("set[Connection]", self.server_state.connections)
        self.servers = [cast(Any, Door(each, connections, connection, self.config.ssl)) for each in listening]
        self.started = True


class Connection(H11Protocol):
    """uvicorn's, ended when a header does not arrive in time."""

    waiting_since = 0.0
    """When it was last without a request to answer."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.answering:
            self.waiting_since = time.monotonic()
            self._expect_nothing()
        elif self._deadline is None:
            self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_header(self) -> None:
        self.waiting_since = time.monotonic()
        self._deadline = self.loop.call_later(HEADER_S, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Door:
    """Accepts connections for as long as there is room. At the limit the connection that has been without a
    request for the longest is ended; where all are being answered the new one is."""

    def __init__(
        self,
        listening: socket.socket,
        connections: set[Connection],
        connection: Callable[[], Connection],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sockets = (listening,)
        self._connections, self._connection, self._tls = connections, connection, tls
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._beginning: set[asyncio.Task[None]] = set()
        self._spare = _spare()
        """A descriptor for one more connection, a probe perhaps, when there is no other."""
        self._accepting = asyncio.create_task(self._accept(listening), name="rest-door")

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                await self._find_descriptor(error)
                continue
            if self._spare is None:
                self._spare = _spare()
            if len(self._connections) + len(self._beginning) >= self._limit and not self._end_longest():
                accepted.close()
                continue
            beginning = asyncio.create_task(self._begin(accepted))
            self._beginning.add(beginning)
            beginning.add_done_callback(self._beginning.discard)
            await asyncio.sleep(0)

    async def _find_descriptor(self, error: OSError) -> None:
        if self._spare is not None:
            log.warning("no descriptor for another connection", error=error.strerror)
            os.close(self._spare)
            self._spare = None
        elif not self._end_longest():
            await asyncio.sleep(BREATH_S)  # others have them all: there is no event to wait for
        await asyncio.sleep(0)

    def _end_longest(self) -> bool:
        """End the connection that has been without a request for the longest."""
        idle = (each for each in self._connections if not each.answering and not each.transport.is_closing())
        longest = min(idle, key=lambda each: each.waiting_since, default=None)
        if longest is not None:
            longest.transport.abort()
        return longest is not None

    async def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):  # ssl.SSLError is one: it was no client of ours
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection, accepted, ssl=self._tls, ssl_handshake_timeout=HEADER_S if self._tls else None
            )
            return
        accepted.close()

    def close(self) -> None:
        """Accept nobody from now on."""
        for task in (self._accepting, *self._beginning):
            task.cancel()
        self.sockets[0].close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def wait_closed(self) -> None:
        await asyncio.wait([self._accepting, *self._beginning])


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


async def _listening(host: str, port: int) -> list[socket.socket]:
    """A socket for every address of the host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as opened:
        sockets = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            each = opened.enter_context(socket.socket(family, kind, protocol))
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind(address)
            each.listen(BACKLOG)
            sockets.append(each)
        opened.pop_all()
    return sockets
