"""Host memory: files without a name that nobody can make smaller, so that no engine can take a page from under us."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvferry.errors import Full, Malformed
from kvferry.memory import SharedRegion, open_region
from kvferry.memory.handover import sealed_file
from kvferry.v1 import engine_pb2
from kvferryd.memory import Region
from kvferryd.transport.read import Span

NAME = "kvferry-cache"
"""The name in /proc of a region that a daemon made."""
CGROUP = Path("/sys/fs/cgroup")


class HostProvider:
    """Sealed files in memory."""

    def allocate(self, nbytes: int, *, kept: bool = False) -> Region:
        """A new zeroed region; its engine keeps it. Raises KvferryError (`out_of_memory`)."""
        try:
            return _made(nbytes)
        except OSError as error:  # lack of descriptors too, which passes
            message = f"there is no room for {nbytes} bytes of shared memory: {error}"
            remedy = "raise the limit that it names, or try again when less is open"
            raise Full("out_of_memory", message, field="nbytes", value=nbytes, remedy=remedy) from None

    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> Region:
        """Map a file that the engine handed over. Raises KvferryError."""
        kind = memory.WhichOneof("kind")
        if kind != "handed" or len(files) != 1:
            message = "a daemon with device = cpu adopts one file at a time"
            remedy = "hand over the descriptor of one sealed file, or run with device = cuda:N"
            raise Malformed("wrong_memory_kind", message, field="memory.kind", value=kind, remedy=remedy)
        shared = open_region(files[0], memory.nbytes, memory.region, memory.handed.offset)
        return _region(shared, memory, owned=memory.again)


def _made(nbytes: int) -> Region:
    """Raises KvferryError, OSError."""
    # Linux ends a process that takes more than there is, this daemon first, instead of refusing.
    room = min(_available(), _left_in_group())
    if nbytes > room:
        message = f"there is no room for {nbytes} bytes: {room} are left"
        remedy = "raise the memory limit of the daemon's container or make the cache smaller"
        raise Full("out_of_memory", message, field="nbytes", value=nbytes, remedy=remedy)
    file = sealed_file(NAME, nbytes)
    try:
        shared = open_region(file, nbytes)
    finally:
        os.close(file)
    shared.populate()
    return _region(shared, engine_pb2.Memory(nbytes=nbytes, handed=engine_pb2.HandedFile()), owned=True)


def _region(shared: SharedRegion, told: engine_pb2.Memory, *, owned: bool) -> Region:
    undo = ExitStack()
    undo.callback(shared.close)
    span = Span(shared.address, shared.nbytes, "host")
    return Region(span, owned, told, undo, unmappable="it is host memory", files=(shared.file,))


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _left_in_group() -> int:
    """Bytes left of this container's limit (cgroup v2), which also counts the cached pages of files."""
    try:
        limit, taken = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        return int(limit) - int(taken) + (int(cached[1]) if cached else 0)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return 1 << 63
