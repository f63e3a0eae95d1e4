"""Refusals of the daemon at its start because this version cannot do it."""

from __future__ import annotations

import pytest

from kvferry.errors import KvferryError
from kvferryd.config import resolve


@pytest.mark.parametrize("settings", [{"way": "staged"}, {"strict": True, "ucx": {"TLS": "rc"}}])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_staging_needs_an_arena(device: str, settings: dict[str, object]) -> None:
    with pytest.raises(KvferryError) as refused:
        resolve({"device": device, "arena_mb": 0, **settings}, {})[0]
    assert (refused.value.code, refused.value.field) == ("bad_config", "arena_mb")


@pytest.mark.parametrize("way", ["direct", "mapped"])
def test_strict_leaves_nothing_to_be_read_directly(way: str) -> None:
    with pytest.raises(KvferryError) as refused:
        resolve({"strict": True, "ucx": {"TLS": "rc"}, "way": way}, {})
    assert (refused.value.code, refused.value.field) == ("bad_config", "way")


def test_strict_does_not_rest_on_transports_that_nobody_chose() -> None:
    """UCX would take TCP, over which it checks no key: tests/faults/test_strict_attacker.py reads the whole cache."""
    with pytest.raises(KvferryError) as refused:
        resolve({"strict": True}, {})
    assert (refused.value.code, refused.value.field) == ("bad_config", "strict")
    assert "TLS=rc,cuda_copy,cuda_ipc" in refused.value.remedy
    assert not list(resolve({"strict": True, "ucx": {"TLS": "rc,cuda_ipc"}}, {})[0].warnings())
    (warning,) = resolve({"strict": True, "ucx": {"TLS": "rc,tcp"}}, {})[0].warnings()
    assert "does not hold over TCP" in warning


def test_a_peer_port_that_nobody_can_dial_is_refused() -> None:
    with pytest.raises(KvferryError) as refused:
        resolve({"peer": "127.0.0.1:0"}, {})
    assert (refused.value.code, refused.value.field) == ("bad_config", "peer")


def test_leases_are_bounded() -> None:
    """Each takes a word of registered memory, from the engine's start on."""
    with pytest.raises(KvferryError) as refused:
        resolve({"max_leases": 10**9}, {})
    assert (refused.value.code, refused.value.field) == ("bad_config", "max_leases")
