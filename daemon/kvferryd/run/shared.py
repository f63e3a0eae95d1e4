"""Shared memory with a name that an engine has made, which not every engine takes away: vLLM's ranks on the CPU leave
theirs even when they end well."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has it
IN_CREATE = 0x100
EVENT = struct.Struct("iIII")
READ = 1 << 16


class Watch:
    """Notes in a folder each file of MEMORY that one of our processes makes: its name, and in it the file's number.
    `remove` takes them away, by whichever process is left. `close` it."""

    def __init__(self, folder: Path, ours: Callable[[], Set[int]]) -> None:
        """Nothing is noted where the kernel has no watch left, or MEMORY is not there."""
        self._folder, self._ours = folder, ours
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd >= 0:
            libc.inotify_add_watch(self.fd, os.fsencode(MEMORY), IN_CREATE)

    def made(self) -> None:
        """`fd` can be read: note what is ours."""
        names = [name for name in _names(os.read(self.fd, READ)) if (MEMORY / name).is_file()]
        held = {path for pid in self._ours() for path in _open(pid)} if names else set()
        for name in names:
            if str(MEMORY / name) in held:
                with suppress(OSError):  # it has gone again
                    (self._folder / name).write_text(str((MEMORY / name).stat().st_ino))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def remove(folder: Path) -> None:
    """Take away what is noted there, is still the same file, and is open in no process: another program may have it."""
    notes = list(folder.iterdir()) if folder.is_dir() else []
    held = {path for each in Path("/proc").glob("[0-9]*") for path in _open(each.name)} if notes else set()
    for note in notes:
        path = MEMORY / note.name
        with suppress(OSError, ValueError):
            if str(path) not in held and path.stat().st_ino == int(note.read_text()):
                path.unlink()


def _names(events: bytes) -> Iterator[str]:
    at = 0
    while at < len(events):
        *_, length = EVENT.unpack_from(events, at)
        at += EVENT.size
        yield os.fsdecode(events[at : at + length].rstrip(b"\0"))
        at += length


def _open(pid: int | str) -> Iterator[str]:
    """Files that a process has open or mapped."""
    process = Path("/proc") / str(pid)
    with suppress(OSError):  # it has ended
        for each in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(each)
        for line in (process / "maps").read_text().splitlines():
            yield line[73:]
