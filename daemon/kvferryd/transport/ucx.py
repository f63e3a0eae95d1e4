"""UCX's settings, of the whole process; and where it listens for TCP: it asks nobody who he is."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvferryd.config import Config
from kvferryd.config.types import is_loopback, is_wildcard, split_address
from kvferryd.observe import logs

log = logs.get(__name__)
PORTS = "17411-17999"
"""UCX takes one for each interface, engine and worker. If none is free it goes on looking for ever."""
SEGMENTS = "64"
"""The reads of host memory on this host (CMA) after which UCX looks at its other transports. With its own value, 1,
each read of 4 KiB costs a system call more, for TCP."""
SIOCGIFADDR = 0x8915
MOST = 64
"""Addresses of a peer that are looked at."""
UP, REJECT = 0x1, 0x200
"""RTF_UP and RTF_REJECT, of a route."""
UVERBS, SYSFS = Path("/dev/infiniband"), Path("/sys/class")
"""The places of RDMA devices for libibverbs: those that a container was given, and the names of all."""


def set_up(config: Config) -> Mapping[str, str]:
    """Set UCX_* for this process and its children, before NIXL is loaded. (NIXL's own `engine_config` ends a value at
    its first comma.)

    Unless an operator says otherwise, UCX listens in PORTS and on the interface of `peer`, and uses each port of an
    RDMA device. They are named, so that it touches no interface that appears later. `NET_DEVICES` chooses among
    these two kinds alone: shared memory, CMA and CUDA IPC stay in use. Returns where it listens; nothing without TCP.
    """
    os.environ.update({f"UCX_{name}": value for name, value in config.ucx.items()})
    os.environ.setdefault("UCX_CMA_TX_QUOTA", SEGMENTS)
    transports = os.environ.get("UCX_TLS", "all")
    if not any(each in transports for each in ("tcp", "all", "^")):
        return {}
    os.environ.setdefault("UCX_TCP_PORT_RANGE", PORTS)
    if "UCX_NET_DEVICES" not in os.environ:
        interfaces = _interfaces(config)
        os.environ["UCX_NET_DEVICES"] = ",".join([*interfaces, *_rdma_ports()]) if interfaces else "all"
    return {name: os.environ[name] for name in ("UCX_TCP_PORT_RANGE", "UCX_NET_DEVICES")}


def listens_at() -> list[str]:
    """The addresses at which UCX listens for TCP, each with its interface, once it is set up."""
    chosen = os.environ.get("UCX_NET_DEVICES", "").split(",") if "UCX_TCP_PORT_RANGE" in os.environ else []
    everywhere = chosen == ["all"]
    return [
        f"{address} ({name})"
        for name, held in sorted(_addresses().items()) if everywhere or name in chosen
        for address in sorted(held)
        if not address.startswith("fe80:")
    ]  # fmt: skip


def routed(addresses: Iterable[str]) -> bool:
    """Whether UCX's interfaces have a route to all of these: to an address without one it does not connect over TCP,
    not even where its owner has connected to it. A default route is one. Loopback, which every host has, counts where
    nothing else is told. Text that is no address is left out."""
    told = list[ipaddress.IPv4Address | ipaddress.IPv6Address]()
    for each in itertools.islice(addresses, MOST):
        with contextlib.suppress(ValueError):
            told.append(ipaddress.ip_address(each))
    chosen = os.environ.get("UCX_NET_DEVICES", "all").split(",")
    routes = [route for name, route in _routes() if chosen == ["all"] or name in chosen]
    told = [address for address in told if not address.is_loopback] or told
    return all(any(address in route for route in routes) for address in told)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _routes() -> Iterator[tuple[str, Network]]:
    """The interface and the destinations of each route, and of each address of our own."""
    for line in _lines("/proc/net/route")[1:]:
        name, to, _, flags, *_, mask = line.split()[:8]
        first, bits = (int.from_bytes(bytes.fromhex(each), "little") for each in (to, mask))
        if int(flags, 16) & (UP | REJECT) == UP:
            yield name, ipaddress.ip_network((first, bits.bit_count()))
    for line in _lines("/proc/net/ipv6_route"):
        to, prefix, *_, flags, name = line.split()
        if int(flags, 16) & (UP | REJECT) == UP:
            yield name, ipaddress.ip_network((bytes.fromhex(to), int(prefix, 16)))
    for name, held in _addresses().items():
        yield from ((name, ipaddress.ip_network(each)) for each in held if "%" not in each)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # a kernel without the family
        return []


def _interfaces(config: Config) -> list[str]:
    """The interfaces that have the address of `peer`, or of `advertise` where `peer` is every interface."""
    address = config.advertise if is_wildcard(config.peer) else config.peer
    own = _resolved(address)
    if found := sorted(name for name, held in _addresses().items() if held & own):
        return found
    log.warning(
        "UCX listens on all network interfaces: none of them has the address of this daemon", address=address,
        remedy="set NET_DEVICES in ucx",
    )  # fmt: skip
    return []


def _rdma_ports() -> list[str]:
    """The ports that this process can open, as UCX names them: `mlx5_0:1`."""
    found = []
    for opened in UVERBS.glob("uverbs*"):
        with contextlib.suppress(OSError):  # a device of another container
            device = (SYSFS / "infiniband_verbs" / opened.name / "ibdev").read_text().strip()
            found += [f"{device}:{port.name}" for port in (SYSFS / "infiniband" / device / "ports").iterdir()]
    return sorted(found)


def _resolved(address: str) -> set[str]:
    host, port = split_address(address)
    if is_loopback(address):
        host = "127.0.0.1"
    try:
        return {str(ipaddress.ip_address(found[4][0])) for found in socket.getaddrinfo(host, port)}
    except OSError:
        return set()


def _addresses() -> dict[str, set[str]]:
    """Addresses by interface, where it has any: its first of IPv4, as UCX sees it, and all of IPv6."""
    found: dict[str, set[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                told = fcntl.ioctl(asking, SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                found[name] = {socket.inet_ntoa(told[20:24])}
    with contextlib.suppress(OSError):  # no IPv6 here
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, set()).add(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found
