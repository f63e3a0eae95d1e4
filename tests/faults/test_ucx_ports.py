"""Ports of a daemon beside its own: UCX asks nobody who he is, so they are on one interface and in one range."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
from fleet import Daemons
from hosts import Host, daemons_apart, host
from lives import engine_on, reads_from

from kvferry.schemas import PeerRequest
from kvferryd.demo.fleet import DaemonService
from kvferryd.transport.ucx import PORTS

pytestmark = pytest.mark.anyio
FIRST, LAST = map(int, PORTS.split("-"))
LISTEN = "0A"


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def listens(daemon: DaemonService) -> set[tuple[str, int]]:
    """The daemon and the process in which it tries peers' metadata: (address, port), without the daemon's own two."""
    pid = daemon.process.pid
    inodes = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children()]:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if found := re.match(r"socket:\[(\d+)\]", os.readlink(entry)):
                    inodes.add(found[1])
    found = set()
    for table, words in (("tcp", 1), ("tcp6", 4)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].rpartition(":")
                packed = b"".join(bytes.fromhex(address[8 * n : 8 * n + 8])[::-1] for n in range(words))
                found.add((str(ipaddress.ip_address(packed)), int(port, 16)))
    own = {int(each.rpartition(":")[2]) for each in (daemon.url, daemon.peer)}
    return {(address, port) for address, port in found if port not in own}


async def test_on_loopback_only_where_the_peer_port_is(daemons: Daemons, stack: AsyncExitStack) -> None:
    (ours,), (theirs,) = await daemons.start("near-r"), await daemons.start("near-s")
    reader, _ = await engine_on(stack, "near-r", ours)
    source, _ = await engine_on(stack, "near-s", theirs)
    await reads_from(reader, source, "r")
    for daemon in (ours, theirs):
        heard = listens(daemon)
        assert heard, "UCX does not listen at all: this shows nothing"
        assert {address for address, _ in heard} == {"127.0.0.1"}
        assert all(FIRST <= port <= LAST for _, port in heard)
        assert f'"UCX_TCP_PORT_RANGE": "{PORTS}"' in daemon.log.read_text()


async def test_not_on_a_device_that_comes_after_the_daemon(daemons: Daemons, stack: AsyncExitStack) -> None:
    (daemon,) = await daemons.start("late")
    with host() as far:
        await engine_on(stack, "late", daemon)
        heard = listens(daemon)
    assert heard
    assert far.here not in {address for address, _ in heard}


@pytest.mark.slow
async def test_between_hosts_only_on_the_interface_of_the_peer_port(
    daemons: Daemons, far: Host, stack: AsyncExitStack
) -> None:
    near, remote = await daemons_apart(daemons, far, "ucx")
    reader, router = await engine_on(stack, "ucx-r", near)
    source, _ = await engine_on(stack, "ucx-s", remote)
    await router.prewarm(PeerRequest(engine_id="ucx-s", address=remote.peer))
    await reads_from(reader, source, "r")
    for daemon, address in ((near, far.here), (remote, far.there)):
        heard = listens(daemon)
        assert heard
        assert {each for each, _ in heard} == {address}
        assert all(FIRST <= port <= LAST for _, port in heard)


@pytest.mark.slow
async def test_what_an_operator_sets_stays(daemons: Daemons, stack: AsyncExitStack) -> None:
    (daemon,) = await daemons.start("set", 1, "--ucx", "NET_DEVICES=lo TCP_PORT_RANGE=17300-17399")
    await engine_on(stack, "set", daemon)
    heard = listens(daemon)
    assert heard
    assert all(address == "127.0.0.1" and 17300 <= port <= 17399 for address, port in heard)
