"""Two pods of one node, as far as processes can tell: own PID, IPC, network and mount namespaces, and a line between.

    with pods() as (a, b):
        subprocess.Popen(a.command(["kvferry", "serve", ...]))
        subprocess.Popen(b.command([...], hidden=("/dev/nvidia0",)))

Files are those of the host: a folder that both see is a hostPath.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = "10.77.1.1", "10.77.1.2"
ENTER = "mount -t proc proc /proc && echo made && read -r _"


@dataclass(frozen=True)
class Pod:
    address: str
    holder: int
    """A process of it, as this one counts."""

    def command(self, command: Sequence[str], hidden: Sequence[str] = ()) -> list[str]:
        """As a process of this pod. hidden: devices that it does not see."""
        enter = ["nsenter", f"--target={self.holder}", "--net", "--ipc", "--pid", "--mount", f"--wd={os.getcwd()}"]
        enter += ["env", "--unset=UCX_NET_DEVICES"]  # the setting of tests that stay on loopback
        if not hidden:
            return [*enter, *command]
        hide = " && ".join(f"mount --bind /dev/null {device}" for device in hidden)
        return [*enter, "unshare", "--mount", "sh", "-c", f'{hide} && exec "$@"', "sh", *command]


@contextlib.contextmanager
def pods() -> Iterator[tuple[Pod, Pod]]:
    """Everything in them ends with the block. Skips the test where namespaces cannot be made."""
    pyroute2 = pytest.importorskip("pyroute2", reason="the line between pods is made with pyroute2")
    with contextlib.ExitStack() as undo:
        first, second = (Pod(address, undo.enter_context(_holder())) for address in ADDRESSES)
        with pyroute2.IPRoute() as route:
            try:
                route.link("add", ifname="kvferry-a", kind="veth", peer={"ifname": "kvferry-b"})
            except pyroute2.NetlinkError as error:
                pytest.skip(f"the line between pods needs CAP_NET_ADMIN: {error}")
            for pod, device in ((first, "kvferry-a"), (second, "kvferry-b")):
                (index,) = route.link_lookup(ifname=device)
                route.link("set", index=index, net_ns_pid=pod.holder)
                subprocess.run(
                    pod.command([sys.executable, __file__, device, pod.address]), check=True, timeout=60
                )  # fmt: skip
        yield first, second


@contextlib.contextmanager
def _holder() -> Iterator[int]:
    """The first process of new namespaces; with it all that runs in them ends."""
    unshare = ["unshare", "--net", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c", ENTER]
    holder = subprocess.Popen(unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin and holder.stdout
    try:
        if holder.stdout.readline() != b"made\n":
            pytest.skip("pods need the right to make namespaces (CAP_SYS_ADMIN)")
        yield int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
    finally:
        holder.stdin.close()
        holder.wait(60)
        holder.stdout.close()


def main(device: str, address: str) -> None:
    """In a pod: its end of the line, and its loopback; and the folder in which UCX looks for both."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        (index,) = route.link_lookup(ifname=device)
        route.addr("add", index=index, address=address, prefixlen=24)
        devices = Path("/sys/class/net")
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(devices)], check=True)
        for name in (device, "lo"):
            route.link("set", index=route.link_lookup(ifname=name)[0], state="up")
            (devices / ".devices" / name).mkdir(parents=True)
            (devices / name).symlink_to(devices / ".devices" / name)  # a folder itself it takes for no device


if __name__ == "__main__":
    main(*sys.argv[1:])
