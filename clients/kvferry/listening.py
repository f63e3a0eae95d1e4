"""For servers of HTTP: sockets of every interface of a host, and connections that end if no request comes."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack

from uvicorn.protocols.http.h11_impl import H11Protocol

EVERYWHERE = ("*", "::")
"""Hosts to listen on that mean every interface, of IPv4 and of IPv6. 0.0.0.0 is IPv4 alone."""
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
HEADER_S = 5.0
"""The longest that a TLS handshake, and then the header of a request, may take."""


class HeaderInTime(H11Protocol):
    """uvicorn's connection, ended when a header does not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # asyncio says BaseTransport
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._expect_nothing()
        elif self._deadline is None and not self.answering:
            self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def end(self) -> None:
        """At once."""
        self.transport.abort()

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_header(self) -> None:
        self._deadline = self.loop.call_later(HEADER_S, self.end)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def everywhere(port: int) -> list[socket.socket]:
    """Bound, and not listening yet: a socket for IPv4, and one for IPv6 where the host has it. Raises OSError.

    Two sockets, as one for both families would show IPv4 clients by addresses of IPv6. Port 0 takes one that both have.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(_bound(socket.AF_INET, "0.0.0.0", port))]
        try:
            sockets.append(stack.enter_context(_bound(socket.AF_INET6, "::", sockets[0].getsockname()[1])))
        except OSError as error:
            if error.errno not in NO_IPV6:
                raise
        stack.pop_all()
        return sockets


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    with ExitStack() as stack:
        made = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
        stack.pop_all()
        return made
