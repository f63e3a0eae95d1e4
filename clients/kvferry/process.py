"""The process at the other end of a Unix socket, watched until it is dead."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable

from kvferry.file import File

SO_PEERPIDFD = 77
"""Linux 6.5: a pidfd of the peer, also of one in another PID namespace. Python has no name for it yet."""
CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of SO_PEERCRED. The pid is 0 for a process in a PID namespace that is not visible here."""


class Process:
    """Owns a pidfd, which is readable from the moment when all threads of the process have ended. `close` it."""

    def __init__(self, fd: int) -> None:
        self._file = File(fd)
        self._watching: asyncio.AbstractEventLoop | None = None

    @classmethod
    def at(cls, connection: socket.socket) -> Process | None:
        """The process that connected, or that listens; None where this kernel cannot say which one it is."""
        try:
            return cls(connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            pid, _, _ = credentials(connection)
        try:
            return cls(os.pidfd_open(pid)) if pid else None
        except OSError:
            return None

    @property
    def dead(self) -> bool:
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(0))

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call it once when the process is dead, on the running loop. It replaces what was to be called before."""
        self._unwatch()
        loop = self._watching = asyncio.get_running_loop()

        def died() -> None:
            self._unwatch()
            on_death()

        loop.add_reader(self._file, died)

    def _unwatch(self) -> None:
        if self._watching is not None and not self._watching.is_closed():
            self._watching.remove_reader(self._file)
        self._watching = None

    def close(self) -> None:
        """Watch it no more. Idempotent."""
        self._unwatch()
        self._file.close()


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, gid = CREDENTIALS.unpack(raw)
    return pid, uid, gid
