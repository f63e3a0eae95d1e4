"""Reads that take turns: posted chunk by chunk, and polled until NIXL reports their end."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import KvferryError, PeerFailed
from kvferryd.aio import settle
from kvferryd.observe import logs

log = logs.get(__name__)
Descriptors = npt.NDArray[np.uint64]
"""Shape (n, 3): address, bytes, device."""

CHUNK_DESCRIPTORS = 4096
CHUNK_BYTES = {"DRAM": 32 << 20, "VRAM": 128 << 20}
"""Bytes of one post, by where it goes: on host memory a post blocks while it reads (32 MiB: 4 to 8 ms), on a GPU it
does not (128 MiB: 0.4 ms over NVLink). Between posts other reads get their turn and an abandoned one stops."""
IN_FLIGHT = 2
"""Posts of one read that may be under way at once."""
STUCK_S = 1.0
"""A request with an error but no end is polled at this interval only: it tends to stay so, and NIXL writes a line each
time."""
POLL_S, LATE_S, POLL_LATE_S = 50e-6, 0.25, 5e-3
"""NIXL has no completion event: it is asked, seldom once a read has been under way for longer than LATE_S."""


class TransportError(PeerFailed):
    """An error that NIXL raised, with a stable code: `transport_failed`, or `peer_lost` for a Disconnected."""


class Disconnected(TransportError):
    """The connection broke: nothing of the request can arrive any more."""


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

    def row(self, nbytes: int | None = None) -> Descriptors:
        """Its first `nbytes`, or all of it, as one descriptor."""
        return np.array([(self.address, nbytes or self.nbytes, self.device)], dtype=np.uint64)


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
    problem: KvferryError | None = None
    """Why it fails."""
    abandoned: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.local.shape == self.remote.shape and self.local.shape[1] == 3
        self.nbytes, limit = int(self.local[:, 1].sum()), CHUNK_BYTES[self.local_type]
        if self.nbytes > limit or len(self.local) > CHUNK_DESCRIPTORS:
            self.local, self.remote = _split(self.local, limit), _split(self.remote, limit)
            self.chunks = _chunks(self.local, limit)
        elif len(self.local):
            self.chunks.append((0, len(self.local)))

    def abandon(self) -> None:
        """Post nothing more. Posted bytes may still arrive, until `quiet`."""
        self.abandoned = True


def typed(error: Exception, whom: str) -> KvferryError:
    """NIXL's error as ours; one of ours stays."""
    if isinstance(error, KvferryError):
        return error
    name = type(error).__name__
    if "Disconnect" in name:
        return Disconnected("peer_lost", f"the connection to {whom} broke during a read", value=name)
    return nixl_failed(f"{name} {error}".strip(), name)


def nixl_failed(said: str, value: str) -> TransportError:
    remedy = "the daemon's stderr has NIXL's own message"
    return TransportError("transport_failed", f"NIXL failed: {said}", field="nixl", value=value, remedy=remedy)


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


class Reads:
    """Driven by one thread at a time, which lends it NIXL's agent."""

    def __init__(self) -> None:
        self._to_post: list[tuple[int, int, Read]] = []
        self._waiting: list[Read] = []
        self._order = itertools.count()

    def begin(self, read: Read) -> None:
        if read.chunks:
            heapq.heappush(self._to_post, (-read.priority, next(self._order), read))
        elif read.in_flight:
            self._waiting.append(read)
        else:
            _finish(read)

    def patience(self) -> float | None:
        """Seconds until `advance` is due: none with chunks to post; None with nothing under way."""
        if self._to_post:
            return 0.0
        posts = [posted for read in self._waiting for _, posted in read.in_flight]
        if not posts:
            return None
        return POLL_S if time.monotonic() - max(posts) < LATE_S else POLL_LATE_S

    def advance(self, nixl: Any) -> None:
        """Post one chunk of the next read in turn, then ask after those under way."""
        if self._to_post:
            _, _, read = heapq.heappop(self._to_post)
            if not read.abandoned:
                post(nixl, read)
            if read.in_flight:
                self._waiting.append(read)
            else:
                self._requeue(read)
        now = time.monotonic()
        for read in self._waiting[:]:
            if now < read.ask_at:
                continue
            _poll(nixl, read)
            if len(read.in_flight) < IN_FLIGHT and (read.chunks or not read.in_flight):
                self._waiting.remove(read)
                self._requeue(read)

    def any_from(self, peer: str) -> bool:
        """Whether a read from this peer is not quiet."""
        return any(read.peer == peer for read in (*self._waiting, *(read for _, _, read in self._to_post)))

    def drain(self) -> list[Read]:
        """All of them, without their handles: the caller destroys NIXL's agent next."""
        found = [*self._waiting, *(read for _, _, read in self._to_post)]
        self._waiting.clear()
        self._to_post.clear()
        for read in found:
            read.in_flight.clear()
        return found

    def _requeue(self, read: Read) -> None:
        """Behind the others of its priority, so that reads share the agent chunk by chunk."""
        if read.abandoned or read.done.done():
            read.chunks.clear()
        self.begin(read)


def post(nixl: Any, read: Read) -> None:
    """Post the next chunk. Chunks that NIXL has not finished by then are in `in_flight`; errors are stored in
    `problem`."""
    start, stop = read.chunks.popleft()
    began, handle = time.monotonic(), None
    try:
        local = nixl.get_xfer_descs(read.local[start:stop], read.local_type)
        remote = nixl.get_xfer_descs(read.remote[start:stop], read.remote_type)
        handle = nixl.initialize_xfer("READ", local, remote, read.peer)
        state = nixl.transfer(handle)
    except Exception as error:  # noqa: BLE001  see typed
        why = _fail(read, error)
        if handle is None:
            return  # nothing was posted
        # Some descriptors may be on their way: the handle is asked until it says that they are not.
        state = "ERR" if isinstance(why, Disconnected) else "PROC"
    _fail_if_error(read, state)
    now = time.monotonic()
    read.seconds += now - began
    if state == "PROC":
        read.in_flight.append((handle, now))
    else:
        _release(nixl, handle)
        read.at_once = state == "DONE" and not read.chunks and not read.in_flight


def _finish(read: Read) -> None:
    """NIXL has nothing of it any more."""
    if read.abandoned and read.problem is None:
        read.problem = TransportError("abandoned", "the read was given up")
    settle(read.quiet)  # first: a thread can be held up between the two, and what is done is quiet
    settle(read.done, error=read.problem)


def _poll(nixl: Any, read: Read) -> None:
    for entry in read.in_flight[:]:
        handle, posted = entry
        try:
            state = nixl.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001  see typed
            if not isinstance(_fail(read, error), Disconnected):
                read.ask_at = time.monotonic() + STUCK_S
                continue  # proves nothing: only DONE or a lost connection do
            state = "ERR"
        _fail_if_error(read, state)
        if state != "PROC":
            read.in_flight.remove(entry)
            read.seconds += time.monotonic() - posted
            _release(nixl, handle)


def _fail_if_error(read: Read, state: str) -> None:
    """NIXL raises where something is wrong; should it only say so, that is no success either."""
    if state == "ERR":
        _fail(read, RuntimeError("the request ended in state ERR"))


def _fail(read: Read, error: Exception) -> KvferryError:
    """Tell it now; more of it may still arrive."""
    why = typed(error, read.peer)
    read.chunks.clear()
    if read.problem is None:
        read.problem = why
        settle(read.done, error=why)
    return why


def _release(nixl: Any, handle: Any) -> None:
    try:
        nixl.release_xfer_handle(handle)
    except Exception as error:  # noqa: BLE001  a handle that cannot be freed is a leak, not a failed read
        log.warning("a NIXL handle could not be released", error=str(error))
