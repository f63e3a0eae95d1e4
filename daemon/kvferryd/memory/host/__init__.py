"""Host memory: files without a name that nobody can make smaller, so that no engine can take a page from under us."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import Full, Malformed
from kvferry.memory import SharedRegion, open_region
from kvferry.memory.handover import sealed_file
from kvferry.v1 import engine_pb2
from kvferryd.memory import Files
from kvferryd.transport import Span

NAME = "kvferry-cache"
"""What /proc shows of a region that a daemon made."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(slots=True, eq=False)
class HostRegion:
    """A mapped file. It goes when the last process that has it, the daemon or its engine, has gone."""

    shared: SharedRegion
    owned: bool

    @property
    def slow_source(self) -> str:
        return ""

    @property
    def unmappable(self) -> str:
        return "it is host memory"

    def probe(self) -> None:
        """Peers map GPU memory only."""

    @property
    def span(self) -> Span:
        return Span(self.shared.address, self.shared.nbytes, "host")

    def exported(self, region: int) -> engine_pb2.Memory:
        handed = engine_pb2.HandedFile(offset=self.shared.offset)
        return engine_pb2.Memory(region=region, nbytes=self.shared.nbytes, handed=handed)

    def files(self) -> Files:
        """A new descriptor, the caller's."""
        return Files([os.dup(self.shared.file)])

    def close(self) -> None:
        self.shared.close()


class HostProvider:
    """Sealed files in memory."""

    def allocate(self, nbytes: int) -> HostRegion:
        """A new zeroed region. Raises KvferryError (`out_of_memory`)."""
        _check_room(nbytes)
        file = sealed_file(NAME, nbytes)
        try:
            region = HostRegion(open_region(file, nbytes), owned=True)
        finally:
            os.close(file)
        region.shared.populate()
        return region

    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> HostRegion:
        """Map a file that the engine handed over. Raises KvferryError."""
        if memory.WhichOneof("kind") != "handed" or len(files) != 1:
            raise Malformed(
                "wrong_memory_kind",
                "a daemon with device = cpu adopts one file at a time",
                field="memory.kind",
                value=memory.WhichOneof("kind"),
                remedy="hand over the descriptor of one sealed file, or run with device = cuda:N",
            )
        return HostRegion(open_region(files[0], memory.nbytes, memory.region, memory.handed.offset), owned=False)

    def close(self) -> None:
        """Nothing of its own: regions belong to their engines."""


def _check_room(nbytes: int) -> None:
    """Linux ends a process that takes more than there is, this daemon first, instead of refusing."""
    room = min(_available(), _left_in_group())
    if nbytes > room:
        raise Full(
            "out_of_memory",
            f"there is no room for {nbytes} bytes: {room} are left",
            field="nbytes",
            value=nbytes,
            remedy="raise the memory limit of the daemon's container or make the cache smaller",
        )


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _left_in_group() -> int:
    """Of a limit set for this container (cgroup v2), which also counts the cached pages of files."""
    try:
        limit, taken = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
        return int(limit) - int(taken) + (int(cached[1]) if cached else 0)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return 1 << 63
