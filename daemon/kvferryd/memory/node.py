"""The folder that the daemons of one node share, and nobody else: GPU memory is handed from one to another there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvferryd.config import Config, bad_config

NAME, NBYTES = "node-id", 16
SOCKET = r"node-[0-9a-f]{16}"
"""The names of the daemons' sockets in it: of the kernel that runs, and of the daemon."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class NodeDir:
    folder: Path
    id: str
    """Known to those who see the folder and run on this kernel: who names it is on this node. It proves nothing else.
    A folder of a network filesystem has another id on each node."""

    @property
    def sockets(self) -> str:
        """The names of the sockets of this node's daemons begin so."""
        return f"node-{self.id[:8]}"

    def socket_name(self) -> str:
        """A new one."""
        return f"{self.sockets}{secrets.token_hex(4)}"

    @classmethod
    def of(cls, config: Config) -> NodeDir | None:
        """None where none is set, or there is no GPU whose memory could be shared. The first daemon writes the id.
        Raises KvferryError (`bad_config`)."""
        folder = config.node_dir
        if folder is None or config.device == "cpu":
            return None
        try:
            return cls(folder, _id(folder))
        except (OSError, ValueError) as error:
            remedy = "name a folder that this user may write to, and that the other daemons of the node have too"
            why = f"its file {NAME} cannot be read or written: {getattr(error, 'strerror', None) or error}"
            raise bad_config("node_dir", folder, why, remedy) from None


def _id(folder: Path) -> str:
    """Raises OSError, ValueError."""
    path, own = folder / NAME, folder / f"{NAME}-{secrets.token_hex(4)}"
    if not path.exists():
        try:
            own.touch(mode=0o600, exist_ok=False)
            own.write_text(secrets.token_hex(NBYTES))
            with contextlib.suppress(FileExistsError):  # another daemon was first
                os.link(own, path)
        finally:
            own.unlink(missing_ok=True)
    with path.open() as file:
        held = bytes.fromhex(file.read(1 + 2 * NBYTES))
    if len(held) != NBYTES:
        raise ValueError(f"it has {len(held)} bytes instead of {NBYTES}")
    return hashlib.blake2b(held + _boot(), digest_size=NBYTES).hexdigest()


def _boot() -> bytes:
    """Which start of which kernel this is; nothing where it does not say so."""
    with contextlib.suppress(OSError):
        return BOOT.read_bytes()
    return b""
