"""Which addresses may be dialled."""

from __future__ import annotations

import pytest

from kvferryd.peers.allow import check, split
from support import refused


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("10.1.2.3:7411", ["10.0.0.0/8"]),
        ("10.1.2.3:7411", ["10.1.2.3"]),
        ("10.1.2.3:7411", ["10.1.2.3/24"]),  # host bits set
        ("[fd00::7]:7411", ["fd00::/64"]),
        ("[::1]:1", ["::1"]),
        ("prefill-3.kv.svc:7411", ["*.kv.svc"]),
        ("PREFILL-3.kv.svc:7411", ["prefill-?.KV.svc"]),
        ("localhost:7411", ["10.0.0.0/8", "localhost"]),
    ],
)
def test_what_an_entry_admits_may_be_dialled(address: str, allowed: list[str]) -> None:
    check(address, tuple(allowed))


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("10.1.2.3:7411", []),
        ("11.1.2.3:7411", ["10.0.0.0/8"]),
        ("127.0.0.1:7411", ["localhost"]),  # a name admits no address
        ("localhost:7411", ["127.0.0.0/8"]),  # nor an address a name
        ("10.1.2.3:7411", ["10.*"]),  # wildcards are for names
        ("evil.kv.svc.example.com:7411", ["*.kv.svc"]),
        ("[::ffff:10.1.2.3]:7411", ["10.0.0.0/8"]),
        ("169.254.169.254:80", ["127.0.0.0/8", "::1", "localhost"]),
        ("0:7411", ["127.0.0.0/8"]),  # a libc would read 0.0.0.0
        ("2130706433:7411", ["127.0.0.0/8"]),  # and this 127.0.0.1
    ],
)
def test_nothing_else_is_dialled(address: str, allowed: list[str]) -> None:
    with refused("address_not_allowed", value=address):
        check(address, tuple(allowed))


OTHER_PLACES = [
    "dns://6.6.6.6/x.kv.svc:7411", "dns:///x.kv.svc:7411", "dns:x.kv.svc:7411", "xds:///x.kv.svc:7411",
    "unix:/tmp/x.kv.svc:7411", "unix-abstract:x.kv.svc:7411", "ipv4:6.6.6.6:7411", "6.6.6.6?x.kv.svc:7411",
    "6.6.6.6#x.kv.svc:7411", "6.6.6.6%3A80%3Fx.kv.svc:7411", "user@x.kv.svc:7411", "6.6.6.6,x.kv.svc:7411",
    "x.kv.svc:7411\n", "x.kv.svc :7411", "[x.kv.svc]:7411", "fd00::7:7411",
]  # fmt: skip
"""Texts that gRPC takes for an address of another kind, or for another host than the one before the port."""


@pytest.mark.parametrize("address", OTHER_PLACES)
def test_what_only_ends_like_an_allowed_name_is_no_address(address: str) -> None:
    with refused("malformed_address"):
        check(address, ("*", "*.kv.svc", "x.kv.svc", "0.0.0.0/0", "::/0"))


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a:1", ("a", 1)), ("[fd00::7]:65535", ("fd00::7", 65535)), ("10.0.0.1:80", ("10.0.0.1", 80))],
)
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split(address) == parts


@pytest.mark.parametrize(
    "address", ["", "host", ":7411", "host:", "host:0", "host:65536", "host:-1", "host:7x", "[]:1"]
)
def test_half_an_address_is_refused(address: str) -> None:
    with refused("malformed_address"):
        split(address)
