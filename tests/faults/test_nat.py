"""A source behind NAT: daemons talk at a translated address, and NIXL needs a way without translation."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from fleet import TCP_ALONE, TIMEOUT_S, Daemons
from hosts import Host, _run, _start
from lives import engine_on
from ranks import Kv, TestEngine

from kvferry.engine import TransferFailed
from kvferryd.demo.fleet import DaemonService

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
INSIDE = "172.31.9.1"
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
        "link set beside up",
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
    await source.publish("r", given, 100)
    await reader.receive("r", taken, source=source.source())


async def test_a_source_behind_nat_is_named_with_the_address_that_would_have_to_be_reached(
    daemons: Daemons, far: Host, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)  # the setting of tests that stay on loopback
    near = _start(daemons, "outside", far.here, far)
    source_of = behind(daemons, far, "behind")
    await daemons.fleet.ready(near, source_of, timeout_s=TIMEOUT_S)
    source, _ = await engine_on(stack, "behind", source_of)
    reader, _ = await engine_on(stack, "outside", near)
    with pytest.raises(TransferFailed) as failed:
        await moved(source, reader)
    assert failed.value.code == "peer_unreachable", failed.value
    assert source_of.peer in str(failed.value) and f"{INSIDE} (eth0)" in str(failed.value)
    assert "NAT" in failed.value.remedy
