"""Another host, made of a network namespace, that can vanish without a word: nothing comes back, not even a reset.

    with host() as far:                                     # or the fixture `far`
        near, remote = await daemons_apart(daemons, far, "a")    # a daemon here and one there
        far.vanish(); ...; far.come_back()

Both ends then send to an Ethernet address that nobody has, as behind a switch without power. An engine reaches its
daemon through a Unix socket all the same, wherever that runs.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from fleet import TCP_ALONE, TIMEOUT_S, Daemons

from kvferryd.demo.fleet import DaemonService

HERE, THERE, NOBODY = (f"02:00:00:00:00:{last}" for last in ("01", "02", "99"))
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Host:
    here: str
    """Our address on the line between us."""
    there: str
    holder: int
    """The process that holds the namespace: it ends with ours."""
    device: str
    """The near end of the line; the far end is called eth0."""

    def command(self, command: Sequence[str]) -> list[str]:
        """As a command of that host: give it to Popen, and the process is the command's own."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", *command]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and the processes that it starts, are on that host. Nothing else may run on it meanwhile."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/proc/{self.holder}/ns/net") as theirs:
            _enter(theirs.fileno())
            try:
                yield
            finally:
                _enter(ours.fileno())

    def vanish(self) -> None:
        """From now on nothing arrives, in either direction."""
        self._lead_to(NOBODY, NOBODY)

    def deafen(self) -> None:
        """From now on nothing arrives there, but all that it says arrives here."""
        self._lead_to(HERE, NOBODY)

    def come_back(self) -> None:
        self._lead_to(HERE, THERE)

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """The line is down inside the block, as both ends can see."""
        _ip("link", "set", self.device, "down")
        try:
            yield
        finally:
            _ip("link", "set", self.device, "up")
            self.come_back()

    @contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """Inside the block the line carries so much each way, as tc writes it: `100mbit`."""
        shaping = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        both = (["tc"], self.command(["tc"]))
        for tc, device in zip(both, (self.device, "eth0"), strict=True):
            try:
                _run([*tc, "qdisc", "add", "dev", device, *shaping])
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                pytest.skip(f"a slow line needs tc and the kernel's token bucket (sch_tbf): {error}")
        try:
            yield
        finally:
            for tc, device in zip(both, (self.device, "eth0"), strict=True):
                _run([*tc, "qdisc", "del", "dev", device, "root"])

    def _lead_to(self, here: str, there: str) -> None:
        _ip("neigh", "replace", self.there, "lladdr", there, "dev", self.device, "nud", "permanent")
        _run(self.command(["ip", "neigh", "replace", self.here, "lladdr", here, "dev", "eth0", "nud", "permanent"]))


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def host() -> Iterator[Host]:
    """Skips the test where namespaces cannot be made."""
    if not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("another host needs ip, nsenter and unshare")
    # It waits for the end of its stdin, which comes with the end of this process at the latest.
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo made; read -r _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert holder.stdin and holder.stdout
    try:
        if holder.stdout.readline() != b"made\n":
            pytest.skip("another host needs the right to make a network namespace (CAP_SYS_ADMIN)")
        number = next(_numbers)
        subnet = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        far = Host(f"{subnet}.{4 * number + 1}", f"{subnet}.{4 * number + 2}", holder.pid, f"kvf{os.getpid()}n{number}")
        try:
            _ip(
                "link", "add", far.device, "address", HERE, "type", "veth",
                "peer", "name", "eth0", "address", THERE, "netns", str(holder.pid),
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"another host needs the right to add a network device (CAP_NET_ADMIN): {error.stderr}")
        _ip("addr", "add", f"{far.here}/30", "dev", far.device)
        _ip("link", "set", far.device, "up")
        for command in (
            ("addr", "add", f"{far.there}/30", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _run(far.command(["ip", *command]))
        far.come_back()
        try:
            yield far
        finally:
            _ip("link", "del", far.device)
    finally:
        holder.stdin.close()
        holder.wait(60)
        holder.stdout.close()


async def daemons_apart(
    daemons: Daemons, far: Host, name: str, *flags: str, here: Sequence[str] = ()
) -> tuple[DaemonService, DaemonService]:
    """Two daemons that read from each other over TCP, one here and one there; `flags` for both, `here` for the one."""
    near = _start(daemons, f"{name}-near", far.here, far, *flags, *here)
    with far.inside():
        remote = _start(daemons, f"{name}-far", far.there, far, *flags)
    await daemons.fleet.ready(near, remote, timeout_s=TIMEOUT_S)
    return near, remote


def _start(daemons: Daemons, name: str, address: str, far: Host, *flags: str) -> DaemonService:
    """In the network namespace of this thread."""
    rest, peer = (f"{address}:{daemons.fleet.free_port()}" for _ in range(2))
    places = ("--rest", rest, "--peer", peer, "--roster", peer, "--allow-peers", f"{far.here},{far.there}")
    secret = daemons.fleet.directory / "peer-secret"
    if not secret.exists():
        secret.write_text(secrets.token_hex(32))
    apart = ("--peer-secret-file", str(secret), "--ucx", f"TLS={TCP_ALONE}")
    before = os.environ.pop("UCX_NET_DEVICES", None)  # the setting of tests that stay on loopback
    try:
        started = daemons.fleet.daemon(name, flags=[*places, *apart, *flags])
    finally:
        if before is not None:
            os.environ["UCX_NET_DEVICES"] = before
    services = daemons.fleet.services
    services[services.index(started)] = moved = replace(started, url=f"http://{rest}", peer=peer)
    return moved


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
