"""Which addresses may be dialled. An address comes from a request body: it is never dialled unless allowed."""

from __future__ import annotations

import fnmatch
import functools
import ipaddress

from kvferry.errors import Forbidden, Malformed
from kvferryd.config.types import Wrong, split_address


def split(address: str) -> tuple[str, int]:
    """host and port of `host:port` or `[v6]:port`. Raises KvferryError (`malformed_address`).

    Nothing else is an address: gRPC would take `dns://server/name:1` or `unix:/path:1` as the names of other places.
    """
    try:
        host, port = split_address(address)
    except Wrong:
        host, port = "", 0
    if not host or not port:
        raise Malformed(
            "malformed_address", "the address is not host:port", field="address", value=address,
            remedy="for example 10.0.0.7:7411 or [fd00::7]:7411",
        )  # fmt: skip
    return host, port


@functools.lru_cache(maxsize=4096)  # every order asks, and there are few addresses
def check(address: str, allowed: tuple[str, ...]) -> None:
    """Raise KvferryError (`address_not_allowed`) unless an entry (CIDR, IP, or host with wildcards) admits it.

    A literal IP is matched by CIDR and IP entries only, a name by name entries only: a name that resolves to an
    allowed IP is not thereby allowed, nor the other way round.
    """
    if not admits(split(address)[0], allowed):
        raise Forbidden(
            "address_not_allowed", f"this daemon may not speak to {address}", field="address", value=address,
            remedy="add it to allow_peers (CIDR, IP or host pattern) if it is a daemon of yours",
        )  # fmt: skip


def admits(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether an entry admits this host: as of `check`."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return any(fnmatch.fnmatchcase(host.lower(), entry.lower()) for entry in allowed if not _network(entry))
    return any(ip in network for entry in allowed if (network := _network(entry)))


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None
