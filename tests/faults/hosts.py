"""Another host, made of a network namespace, that can vanish without a word: nothing comes back, not even a reset.

    with host() as far:                                     # or the fixture `far`
        far.command(["kvferry", "serve", ...])              # runs there; it listens on far.there, we on far.here
        far.vanish(); ...; far.come_back()

Both ends then send to an Ethernet address that nobody has, as behind a switch without power. Daemons there need
`--ucx "TLS=tcp"`, as CMA passes between namespaces, and `--allow-peers` with the other end's address.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

HERE, THERE, NOBODY = (f"02:00:00:00:00:{last}" for last in ("01", "02", "99"))
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

    def vanish(self) -> None:
        """From now on nothing arrives, in either direction."""
        self._lead_to(NOBODY, NOBODY)

    def come_back(self) -> None:
        self._lead_to(HERE, THERE)

    def _lead_to(self, here: str, there: str) -> None:
        _ip("neigh", "replace", self.there, "lladdr", there, "dev", self.device, "nud", "permanent")
        _run(self.command(["ip", "neigh", "replace", self.here, "lladdr", here, "dev", "eth0", "nud", "permanent"]))


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
        holder.wait(10)
        holder.stdout.close()


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
