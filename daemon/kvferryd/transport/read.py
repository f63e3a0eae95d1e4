"""One read, and what can go wrong with it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import PeerFailed

Descriptors = npt.NDArray[np.uint64]
"""Shape (n, 3): address, bytes, device."""

CHUNK_DESCRIPTORS = 4096
CHUNK_BYTES = {"DRAM": 32 << 20, "VRAM": 128 << 20}
"""What one post carries, by where it goes: on host memory a post blocks while it reads (32 MiB: 4 to 8 ms), on a GPU it
does not (128 MiB: 0.4 ms over NVLink). Between posts other reads get their turn and an abandoned one stops."""


class TransportError(PeerFailed):
    """What NIXL raised, with a stable code: `peer_lost`, `transport_failed`."""


@dataclass(frozen=True, slots=True)
class Span:
    """Registered memory: `kind` is host or cuda; `device` the GPU's index in this process, 0 for host."""

    address: int
    nbytes: int
    kind: str
    device: int = 0

    @property
    def memory_type(self) -> str:
        return "DRAM" if self.kind == "host" else "VRAM"


@dataclass(slots=True, eq=False)
class Read:
    """Bytes on their way from one peer. `done`: all have arrived, or why not. `quiet`: nothing can arrive any more."""

    peer: str
    local: Descriptors
    remote: Descriptors
    local_type: str
    remote_type: str
    priority: int
    done: asyncio.Future[None]
    quiet: asyncio.Future[None]
    seconds: float = 0.0
    """Spent inside NIXL for this read: making, posting and waiting for its requests."""
    phase: str = "nixl"
    chunks: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges of rows that are still to be posted."""
    in_flight: list[tuple[Any, float]] = field(default_factory=list)
    """NIXL's handles, and when they were posted."""
    at_once: bool = False
    """All of it arrived inside the post."""
    ask_at: float = 0.0
    """Not asked for before then, by time.monotonic()."""
    problem: TransportError | None = None
    """Why it fails."""
    abandoned: bool = False

    def __post_init__(self) -> None:
        assert self.local.shape == self.remote.shape and self.local.shape[1] == 3
        limit = CHUNK_BYTES[self.local_type]
        self.local, self.remote = _split(self.local, limit), _split(self.remote, limit)
        self.chunks = _chunks(self.local, limit)

    @property
    def nbytes(self) -> int:
        return int(self.local[:, 1].sum())

    def abandon(self) -> None:
        """Post nothing more. What was posted may still arrive, until `quiet`."""
        self.abandoned = True


def typed(error: Exception, whom: str) -> TransportError:
    """NIXL's error as ours."""
    name = type(error).__name__
    if "Disconnect" in name:
        return TransportError("peer_lost", f"the connection to {whom} broke during a read", value=name)
    return TransportError(
        "transport_failed",
        f"NIXL failed: {name} {error}".strip(),
        field="nixl",
        value=name,
        remedy="the daemon's stderr has NIXL's own message",
    )


def _chunks(local: Descriptors, limit: int) -> deque[tuple[int, int]]:
    """Row ranges of at most CHUNK_DESCRIPTORS rows and about `limit` bytes, at least one row each."""
    if len(local) <= 1:
        return deque([(0, 1)] if len(local) else [])
    ends = np.cumsum(local[:, 1])
    cuts, start = [0], 0
    while start < len(local):
        before = int(ends[start - 1]) if start else 0
        by_bytes = int(np.searchsorted(ends, before + limit, side="right"))
        start = min(len(local), start + CHUNK_DESCRIPTORS, max(by_bytes, start + 1))
        cuts.append(start)
    return deque(itertools.pairwise(cuts))


def _split(rows: Descriptors, limit: int) -> Descriptors:
    """Cut rows longer than `limit`, so that one long run does not hold up everything else."""
    if len(rows) == 0 or rows[:, 1].max() <= limit:
        return rows
    pieces = -(-rows[:, 1].astype(np.int64) // limit)
    cut = np.repeat(rows, pieces, axis=0)
    nth = np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut[:, 0] += (nth * limit).astype(np.uint64)
    cut[:, 1] = np.minimum(cut[:, 1] - (nth * limit).astype(np.uint64), limit)
    return cut
