"""A source behind NAT: daemons talk at a translated address, and NIXL needs a way without translation. A reader behind
NAT: it needs none, and the source a route to its address."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from fleet import TCP_ALONE, TIMEOUT_S, Daemons
from hosts import Host, _run, _start
from lives import engine_on
from ranks import Kv, TestEngine

from kvferry.engine import TransferFailed
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
INSIDE, GATEWAY = "172.31.9.1", "172.31.9.254"
"""The source's address behind the translation: nobody outside has a way there."""


def nft(far: Host, *rules: str) -> None:
    if shutil.which("nft") is None:
        pytest.skip("NAT is made with nft (Debian package nftables)")
    text = "\n".join(rules)
    done = subprocess.run(
        far.command(["nft", "-f", "-"]), input=text, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip(f"NAT needs the kernel's nf_tables: {done.stderr}")


def behind(daemons: Daemons, far: Host, name: str) -> DaemonService:
    """A daemon at INSIDE, whose port for peers is translated from the address of its host."""
    for command in (
        # UCX takes the names of this machine's own interfaces, in sysfs, for those of the namespace: eth0 is one.
        "link set eth0 down", "link set eth0 name outside", "link set outside up",
        "link add eth0 type veth peer name beside", f"addr add {INSIDE}/24 dev eth0", "link set eth0 up",
        "link set beside up", "route add default dev eth0",
    ):  # fmt: skip
        _run(far.command(["ip", *command.split()]))
    port, rest = daemons.fleet.free_port(), f"{far.there}:{daemons.fleet.free_port()}"
    to = f"ip daddr {far.there} tcp dport {port} dnat to {INSIDE}"
    nft(
        far, "table ip nat {", f"chain pre {{ type nat hook prerouting priority -100; {to}; }}",
        f"chain out {{ type nat hook output priority -100; {to}; }}", "}",
    )  # fmt: skip
    told = f"{far.there}:{port}"
    flags = [
        "--rest", rest, "--peer", f"{INSIDE}:{port}", "--advertise", told, "--roster", told,
        "--allow-peers", f"{far.here},{far.there},{INSIDE}",
        "--peer-secret-file", str(daemons.fleet.directory / "peer-secret"),
        "--ucx", f"TLS={TCP_ALONE}",
    ]  # fmt: skip
    with far.inside():
        return replace(daemons.fleet.daemon(name, flags=flags), url=f"http://{rest}", peer=told)


async def moved(source: TestEngine, reader: TestEngine) -> None:
    kv, given, taken = Kv.random(100), source.take(100), reader.take(100)
    source.write(kv, given)
    expected = reader.snapshot()
    reader.write_into(expected, kv, taken)
    await source.publish("r", given, 100)
    await reader.receive("r", taken, source=source.source())
    assert reader.differences(expected) == ""


async def test_a_source_behind_nat_is_named_with_the_address_that_would_have_to_be_reached(
    daemons: Daemons, far: Host, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)  # the setting of tests that stay on loopback
    near = _start(daemons, "outside", far.here, far)
    source_of = behind(daemons, far, "behind")
    await daemons.fleet.ready(near, source_of, timeout_s=TIMEOUT_S)
    source, _ = await engine_on(stack, "behind", source_of)
    reader, _ = await engine_on(stack, "outside", near)
    with refused("peer_unreachable", TransferFailed) as failed:
        await moved(source, reader)
    assert source_of.peer in str(failed.value) and f"{INSIDE} (eth0)" in str(failed.value)
    assert "NAT" in failed.value.remedy


@contextlib.contextmanager
def behind_gateway(far: Host) -> Iterator[Host]:
    """A host at INSIDE whose only way out is `far`, which puts its own address in place of INSIDE."""
    hold = far.command(["unshare", "--net", "sh", "-c", "echo made; read -r _"])
    holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin and holder.stdout
    try:
        assert holder.stdout.readline() == b"made\n"
        inner = Host(GATEWAY, INSIDE, holder.pid, "beside")
        for host, command in (
            (far, f"link add beside type veth peer name eth0 netns {holder.pid}"),
            (far, f"addr add {GATEWAY}/24 dev beside"), (far, "link set beside up"),
            (inner, f"addr add {INSIDE}/24 dev eth0"), (inner, "link set eth0 up"), (inner, "link set lo up"),
            (inner, f"route add default via {GATEWAY}"),
        ):  # fmt: skip
            _run(host.command(["ip", *command.split()]))
        _run(far.command(["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]))
        nft(
            far, "table ip nat {",
            f"chain pre {{ type nat hook prerouting priority -100; ip daddr {far.there} dnat to {INSIDE}; }}",
            f"chain post {{ type nat hook postrouting priority 100; ip saddr {INSIDE} masquerade; }}", "}",
        )  # fmt: skip
        yield inner
    finally:
        holder.stdin.close()
        holder.wait(60)
        holder.stdout.close()


async def read_through_nat(
    daemons: Daemons, far: Host, stack: AsyncExitStack, name: str
) -> tuple[DaemonService, TestEngine, TestEngine]:
    """(the source's daemon, the source, and a reader behind a gateway)"""
    near = _start(daemons, f"{name}-s", far.here, far)
    inner = stack.enter_context(behind_gateway(far))
    with inner.inside():
        reader_of = _start(daemons, f"{name}-r", INSIDE, inner, "--allow-peers", f"{far.here},{INSIDE}")
    reader_of = replace(reader_of, url=reader_of.url.replace(INSIDE, far.there))
    await daemons.fleet.ready(near, reader_of, timeout_s=TIMEOUT_S)
    source, _ = await engine_on(stack, f"{name}-s", near)
    reader, _ = await engine_on(stack, f"{name}-r", reader_of)
    return near, source, reader


async def test_a_reader_behind_nat_reads_where_the_sources_interface_has_any_route_to_its_own_address(
    daemons: Daemons, far: Host, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing goes by it: UCX answers in the connection that the reader has made, and wants the route all the same."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)  # the setting of tests that stay on loopback
    _run(["ip", "route", "add", f"{INSIDE}/32", "via", far.there, "dev", far.device])
    nowhere = f"ct status dnat accept; ip saddr {far.here} ip daddr {INSIDE} ct state new drop"
    nft(far, "table ip none {", f"chain onward {{ type filter hook forward priority 0; {nowhere}; }}", "}")
    _, source, reader = await read_through_nat(daemons, far, stack, "routed")
    await moved(source, reader)


async def test_a_source_without_a_way_back_to_a_reader_refuses_it_by_name_and_lives_on(
    daemons: Daemons, far: Host, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX would end the source's process when the reader's connects (signal 11)."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)  # the setting of tests that stay on loopback
    near, source, reader = await read_through_nat(daemons, far, stack, "lost")
    with refused("peer_unreachable", TransferFailed) as failed:
        await moved(source, reader)
    assert "no way back" in str(failed.value) and f"{INSIDE} (eth0)" in str(failed.value)
    assert near.process.poll() is None
