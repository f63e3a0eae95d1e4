"""The folder that the daemons of one node share, and nobody else: GPU memory is handed from one to another there."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvferryd.config import Config, bad_config

SOCKET = r"node-[0-9a-f]{18}"
"""The names of the daemons' sockets in it: of the kernel that runs, of the GPU, and of the daemon."""
CONNECT_S = 0.2
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class NodeDir:
    """It holds sockets alone: there is no file whose loss would part the daemons of a node."""

    folder: Path

    @property
    def id(self) -> str:
        """Known to those who see the folder and run on this kernel: who names it is on this node. It proves nothing
        else. Empty where there is no such folder. A folder of a network filesystem has another id on each node, and so
        has one that was made anew at its path."""
        try:
            seen = self.folder.stat()
        except OSError:
            return ""
        return _digest(b"%b %d %d" % (_boot(), seen.st_dev, seen.st_ino), 16)

    def socket_name(self, gpu: str) -> str:
        """A new one. gpu: the UUID of the daemon's."""
        return f"{_kernel()}{_digest(gpu.encode(), 4)}{secrets.token_hex(2)}"

    def of_this_kernel(self) -> Iterator[Path]:
        """The sockets of daemons that run, or have run since this machine was started. Raises OSError."""
        return (path for path in self._named() if path.name.startswith(_kernel()))

    def of_before(self, gpu: str) -> Iterator[Path]:
        """Left by daemons beside this GPU at another start of the machine: the GPU is here now, so they are dead.
        Living daemons of other nodes, which share a folder of a network filesystem, are beside other GPUs. Raises
        OSError."""
        return (path for path in self.beside(gpu) if not path.name.startswith(_kernel()))

    def beside(self, gpu: str) -> Iterator[Path]:
        """The sockets of daemons beside this GPU, living or dead. Raises OSError."""
        digest = _digest(gpu.encode(), 4)
        return (path for path in self._named() if path.name[len(_kernel()) :].startswith(digest))

    def _named(self) -> Iterator[Path]:
        return (path for path in self.folder.iterdir() if re.match(SOCKET, path.name))

    @classmethod
    def of(cls, config: Config) -> NodeDir | None:
        """None where none is set, or there is no GPU whose memory could be shared. Raises KvferryError
        (`bad_config`)."""
        if config.node_dir is None or config.device == "cpu":
            return None
        node = cls(config.node_dir)
        if not node.id:
            remedy = "name a folder that this user may write to, and that the other daemons of the node have too"
            raise bad_config("node_dir", node.folder, "it cannot be looked at", remedy)
        return node


def is_dead(path: Path) -> bool:
    """Whether nobody listens at this socket of the kernel that runs: its daemon has ended, or is about to listen."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it is being removed, or has many callers
            pass
    return False


def _kernel() -> str:
    return f"node-{_digest(_boot(), 3)}"


def _boot() -> bytes:
    """Which start of which kernel this is; nothing where it does not say so."""
    with contextlib.suppress(OSError):
        return BOOT.read_bytes()
    return b""


def _digest(text: bytes, nbytes: int) -> str:
    return hashlib.blake2b(text, digest_size=nbytes).hexdigest()
