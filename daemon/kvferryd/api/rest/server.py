"""The server of the application: uvicorn, with a bound on its connections, over mutual TLS where it is set."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from typing import cast

import uvicorn
from uvicorn.server import ServerState

from kvferry import listening
from kvferry.listening import HeaderInTime
from kvferryd.aio import Tasks
from kvferryd.api.rest.app import create_app
from kvferryd.config.types import split_address
from kvferryd.ferry import Ferry
from kvferryd.observe import logs

log = logs.get(__name__)
UNREAD_S = 30.0
"""How long a client may leave what is sent to it unread."""
MAX_CONNECTIONS = 1024
"""At most, and at most a quarter of the descriptors that this process may have."""
BACKLOG, BREATH_S = 128, 0.1


class Connection(HeaderInTime):
    """It has its place from when it is accepted, before TLS."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self.connections.add(self)
        self._beginning = asyncio.current_task()  # until it is made
        self.waiting_since = time.monotonic()
        """When it was accepted, or its last request came or was answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # asyncio says BaseTransport
        super().connection_made(transport)
        self._beginning = None

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self.waiting_since = time.monotonic()

    def on_response_complete(self) -> None:
        self.waiting_since = time.monotonic()
        super().on_response_complete()

    @property
    def keeps_us_waiting(self) -> bool:
        """For its TLS, a request, the rest of one, or to read an answer."""
        if not self.answering or self.cycle.more_body:
            return True
        return self.transport.get_write_buffer_size() > 0

    def end(self) -> None:
        """At once. Its place is free."""
        self.connections.discard(self)
        if self._beginning is not None:
            self._beginning.cancel()
        else:
            super().end()


class RestServer(uvicorn.Server):
    """Serves REST. Its owner awaits `listen()`, which raises OSError where it cannot, then `serve()`, and ends it with
    `should_exit`: long polls that are open then are cut after two seconds.

    It accepts by itself: asyncio's servers have no bound, and write thousands of lines when descriptors run out. At the
    limit the connection that has kept us waiting for the longest is ended; where none does the new one is.
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
            timeout_keep_alive=ferry.config.keep_alive_s,
            timeout_graceful_shutdown=2,
        )
        config.load()
        super().__init__(config)
        self._certificates = ferry.certificates if ferry.config.rest_tls else None
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
        if host in listening.EVERYWHERE:
            bound = listening.everywhere(port)
            servers = [loop.create_server(asyncio.Protocol, sock=each, start_serving=False) for each in bound]
        else:
            servers = [loop.create_server(asyncio.Protocol, host, port, start_serving=False)]
        self.servers = [await server for server in servers]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for bound in (each for server in self.servers for each in server.sockets):
            listener = bound.dup()
            # Its connections inherit it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_S))
            listener.listen(BACKLOG)
            self._accepting.append(asyncio.create_task(self._accept(listener), name="rest-accept"))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [*self._accepting, *self._beginning]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._spare is not None:
            os.close(self._spare)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listener)
                except OSError as error:
                    await self._find_descriptor(error)
                    continue
                if self._spare is None:
                    self._spare = _spare()
                if len(self.server_state.connections) >= self._limit and not self._end_longest():
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
        """End the connection that has kept us waiting for the longest."""
        connections = cast("set[Connection]", self.server_state.connections)
        waiting = (each for each in connections if each.keeps_us_waiting)
        longest = min(waiting, key=lambda each: each.waiting_since, default=None)
        if longest is not None:
            longest.end()
        return longest is not None

    async def _begin(self, accepted: socket.socket) -> None:
        """Over TLS by what the files hold now: a context of its own knows no session of one before, so nobody resumes
        what an authority proved that is not trusted any more."""
        connection = Connection(self.config, self.server_state)
        tls = self._certificates.current().context if self._certificates else None
        timeout_s = listening.HEADER_S if tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=timeout_s, ssl_shutdown_timeout=timeout_s
            )
        except (OSError, TimeoutError, asyncio.CancelledError):  # ssl.SSLError is one: it was no client of ours
            self.server_state.connections.discard(connection)
            accepted.close()


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
