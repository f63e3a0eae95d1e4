"""What serves the application: uvicorn, with a bound on its connections, over mutual TLS where it is set."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from typing import cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvferryd.aio import Tasks
from kvferryd.api.rest.app import create_app
from kvferryd.config.types import split_address
from kvferryd.ferry import Ferry
from kvferryd.observe import logs

log = logs.get(__name__)
HEADER_S = 5.0
"""The longest that a TLS handshake, and then the header of a request, may take."""
MAX_CONNECTIONS = 1024
"""At most, and at most a quarter of the descriptors that this process may have."""
BACKLOG, BREATH_S = 128, 0.1


class Connection(H11Protocol):
    """uvicorn's, ended when a header does not arrive in time."""

    waiting_since = 0.0
    """When it was last without a request to answer."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # asyncio says BaseTransport
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


class RestServer(uvicorn.Server):
    """Serves REST. Its owner awaits `listen()`, which raises OSError where it cannot, then `serve()`, and ends it with
    `should_exit`: long polls that are open then are cut after two seconds.

    It accepts by itself: asyncio's servers have no bound, and write thousands of lines when descriptors run out. At the
    limit the connection that has been without a request for the longest is ended; where all are being answered the new
    one is.
    """

    def __init__(self, ferry: Ferry) -> None:
        host, port = split_address(ferry.config.rest)
        config = uvicorn.Config(
            create_app(ferry),
            host=host,
            port=port,
            http=Connection,
            log_config=None,  # lines go where `kvferryd.observe.logs` sends them
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,  # no header says which address the client has
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
        )
        config.load()
        if ferry.config.rest_tls:
            assert ferry.certificates is not None
            config.ssl = ferry.certificates.server_context()
        super().__init__(config)
        self._limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._accepting: list[asyncio.Task[None]] = []
        self._beginning = Tasks()
        self._spare = _spare()
        """A descriptor for one more connection, a probe perhaps, when there is no other."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]  # uvicorn: Generator
        return contextlib.nullcontext()  # they are the process's

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.config.host, self.config.port
        self.servers = [await loop.create_server(asyncio.Protocol, host, port, start_serving=False)]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for bound in self.servers[0].sockets:
            listening = bound.dup()
            listening.listen(BACKLOG)
            self._accepting.append(asyncio.create_task(self._accept(listening), name="rest-accept"))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [*self._accepting, *self._beginning]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._spare is not None:
            os.close(self._spare)
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError as error:
                    await self._find_descriptor(error)
                    continue
                if self._spare is None:
                    self._spare = _spare()
                full = len(self.server_state.connections) + len(self._beginning) >= self._limit
                if full and not self._end_longest():
                    accepted.close()
                    continue
                self._beginning.spawn(self._begin(accepted))
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
        connections = cast("set[Connection]", self.server_state.connections)
        idle = (each for each in connections if not each.answering and not each.transport.is_closing())
        longest = min(idle, key=lambda each: each.waiting_since, default=None)
        if longest is not None:
            longest.transport.abort()
        return longest is not None

    async def _begin(self, accepted: socket.socket) -> None:
        tls = self.config.ssl
        with contextlib.suppress(OSError, TimeoutError):  # ssl.SSLError is one: it was no client of ours
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self.config, self.server_state, {}),
                accepted, ssl=tls, ssl_handshake_timeout=HEADER_S if tls else None,
            )  # fmt: skip
            return
        accepted.close()


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
