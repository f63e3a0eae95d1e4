"""Sockets of every interface of a host, whichever families of addresses it has."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

EVERYWHERE = ("*", "::")
"""Hosts to listen on that mean every interface, of IPv4 and of IPv6. 0.0.0.0 is IPv4 alone."""
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


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
