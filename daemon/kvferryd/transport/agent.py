"""One NIXL agent and the one thread that owns it.

The event loop hands over work and awaits futures; on host memory a read happens inside NIXL's post, so no NIXL call
is ever made on the loop. NIXL has neither abort nor timeouts: a read that was given up goes on writing until NIXL
says DONE or RemoteDisconnect for it, and `Read.quiet` tells when that is.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry import cuda
from kvferry.errors import KvferryError
from kvferryd import logs
from kvferryd.settle import settle
from kvferryd.transport.binding import make_agent

log = logs.get(__name__)
T = TypeVar("T")
Descriptors = npt.NDArray[np.uint64]
"""Shape (n, 3): address, bytes, device."""

CHUNK_DESCRIPTORS = 4096
CHUNK_BYTES = {"DRAM": 32 << 20, "VRAM": 128 << 20}
"""What one post carries, by where it goes: on host memory a post blocks while it reads (32 MiB: 4 to 8 ms), on a GPU it
does not (128 MiB: 0.4 ms over NVLink). Between posts other reads get their turn and an abandoned one stops."""
IN_FLIGHT = 2
"""Posts of one read that may be under way at once."""
POLL_S = 50e-6
POLL_LATE_S = 5e-3
"""NIXL has no completion event: it is asked, seldom once a read has been under way for longer than LATE_S."""
LATE_S = 0.25
CLOSE_S = 5.0
FETCH_PRIORITY = 1 << 20
TRIAL_DESCRIPTORS, TRIAL_NBYTES = 64, 4096
SCRATCH = 8192
"""Words that can be fetched at once, ahead of all other reads."""


class TransportError(KvferryError):
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
    _chunks: deque[tuple[int, int]] = field(default_factory=deque)
    _in_flight: list[tuple[Any, float]] = field(default_factory=list)
    _abandoned: bool = False

    @property
    def nbytes(self) -> int:
        return int(self.local[:, 1].sum())

    def abandon(self) -> None:
        """Post nothing more. What was posted may still arrive, until `quiet`."""
        self._abandoned = True


class Agent:
    """Owns a NIXL agent and its thread. Close it with `close`: that is also the only sure fence for a lost read."""

    def __init__(
        self, name: str, *, threads: int = 0, ucx: Mapping[str, str] | None = None, device: cuda.Device | None = None
    ) -> None:
        """`device`: the GPU whose memory the agent registers; None for host memory alone."""
        self.name, self.device = name, device
        self._threads, self._ucx = threads, dict(ucx or {})
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: list[tuple[int, int, Read]] = []
        self._waiting: list[Read] = []
        self._order = itertools.count()
        self._registered: dict[Span, Any] = {}
        self._peers: dict[str, tuple[bytes, int]] = {}
        self._closed = False
        self._scratch = np.zeros(SCRATCH, dtype=np.uint64)
        self._free = list(range(SCRATCH))
        self._thread = threading.Thread(target=self._run, name=f"nixl-{name}", daemon=True)
        self._nixl: Any = None
        self._landing: Span | None = None
        """GPU memory of the agent's own, where trial reads end."""

    async def start(self) -> None:
        """Make the NIXL agent (about 0.4 s, on its thread). Raises KvferryError."""
        self._thread.start()
        await self._call(self._start)

    def _start(self) -> None:
        if self.device is not None:
            self.device.bind()  # UCX looks at whatever context is current in the thread that calls it
        self._nixl = make_agent(self.name, threads=self._threads, ucx=self._ucx)
        self._register(Span(self._scratch.ctypes.data, self._scratch.nbytes, "host"))
        if self.device is not None:
            self._landing = Span(self.device.alloc(cuda.GRANULE), cuda.GRANULE, "cuda", self.device.index)
            self._register(self._landing)

    async def register(self, span: Span) -> None:
        """Register memory with NIXL. Few and large: metadata and peers' set-up grow with each."""
        await self._call(lambda: self._register(span))

    def _register(self, span: Span) -> None:
        rows = np.array([(span.address, span.nbytes, span.device)], dtype=np.uint64)
        self._registered[span] = self._nixl.register_memory(rows, span.memory_type)

    async def metadata(self) -> bytes:
        """What a peer needs to read from this agent: a bearer capability, for authenticated peers only."""
        return await self._call(lambda: bytes(self._nixl.get_agent_metadata()))

    async def add_peer(self, name: str, metadata: bytes) -> None:
        """Load a peer's metadata under its agent name; `remove_peer` as often as this was called."""
        await self._call(lambda: self._add_peer(name, metadata))

    def _add_peer(self, name: str, metadata: bytes) -> None:
        known, users = self._peers.get(name, (metadata, 0))
        if known != metadata:
            raise TransportError("transport_failed", f"agent {name} has other metadata than before", value=name)
        if not users:
            loaded = bytes(self._nixl.add_remote_agent(metadata)).decode()
            if loaded != name:
                self._nixl.remove_remote_agent(loaded)
                raise TransportError("transport_failed", f"the metadata is that of agent {loaded}", value=name)
        self._peers[name] = (metadata, users + 1)

    async def remove_peer(self, name: str) -> None:
        await self._call(lambda: self._remove_peer(name))

    def _remove_peer(self, name: str) -> None:
        metadata, users = self._peers.pop(name)
        if users > 1:
            self._peers[name] = (metadata, users - 1)
        else:
            self._nixl.remove_remote_agent(name)

    async def warm(self, peer: str, span: Span) -> None:
        """Read one byte of a peer's memory: the first read to a peer pays 5 to 15 ms of wire-up."""
        if self._landing is None:
            await self._fetch(peer, span, 1)
            return
        # Into GPU memory, as the reads to come: host memory would be wired up otherwise.
        local, remote = (np.array([(each.address, 1, each.device)], dtype=np.uint64) for each in (self._landing, span))
        read = self.read(peer, local, remote, self._landing.memory_type, span.memory_type, FETCH_PRIORITY)
        await read.done

    async def trial(self, peer: str, span: Span) -> tuple[float, float]:
        """(seconds for each further descriptor, bytes per second of a long one), read from a peer's GPU memory."""
        assert self._landing is not None
        long = min(span.nbytes, self._landing.nbytes)
        size = min(TRIAL_NBYTES, long // (2 * TRIAL_DESCRIPTORS))
        seconds = []
        scattered = [(2 * i * size, size) for i in range(TRIAL_DESCRIPTORS)] if size else [(0, long)]
        for rows in ([(0, long)], [(0, long)], scattered):
            local, remote = (
                np.array([(each.address + at, nbytes, each.device) for at, nbytes in rows], dtype=np.uint64)
                for each in (self._landing, span)
            )
            read = self.read(peer, local, remote, "VRAM", span.memory_type, FETCH_PRIORITY)
            await read.done
            seconds.append(read.seconds)
        return seconds[-1] / TRIAL_DESCRIPTORS, long / max(1e-6, seconds[1])

    async def peek(self, peer: str, address: int) -> int:
        """One word (8 bytes) of a peer's registered host memory. Raises TransportError."""
        return await self._fetch(peer, Span(address, 8, "host"), 8)

    async def _fetch(self, peer: str, span: Span, nbytes: int) -> int:
        if not self._free:
            raise TransportError("transport_failed", f"{SCRATCH} words are being read already", value=SCRATCH)
        index = self._free.pop()
        self._scratch[index] = 0
        local = np.array([(self._scratch.ctypes.data + 8 * index, nbytes, 0)], dtype=np.uint64)
        remote = np.array([(span.address, nbytes, span.device)], dtype=np.uint64)
        read = self.read(peer, local, remote, "DRAM", span.memory_type, FETCH_PRIORITY)
        read.quiet.add_done_callback(lambda _: self._free.append(index))  # not before: it may still be written
        await read.done
        return int(self._scratch[index])

    def read(
        self, peer: str, local: Descriptors, remote: Descriptors, local_type: str, remote_type: str, priority: int = 0
    ) -> Read:
        """Start reading `remote` into `local`, row by row; equal lengths in each row. Higher priority goes first."""
        assert local.shape == remote.shape and local.shape[1] == 3
        limit = CHUNK_BYTES[local_type]
        local, remote = _split(local, limit), _split(remote, limit)
        read = Read(
            peer,
            local,
            remote,
            local_type,
            remote_type,
            priority,
            self._loop.create_future(),
            self._loop.create_future(),
            _chunks=_chunks(local, limit),
        )
        if self._closed:
            self._end(read)
        else:
            self._inbox.put(lambda: self._begin(read))
        return read

    async def close(self) -> bool:
        """Destroy the agent: every read ends here. Whether the thread has stopped within CLOSE_S: until it has,
        the registered memory may still be written."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S)
        return not self._thread.is_alive()

    # ---- everything below runs on the agent's thread ----

    async def _call(self, work: Callable[[], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except KvferryError as error:
                settle(future, error=error)
            except Exception as error:  # noqa: BLE001  NIXL's errors are RuntimeErrors of its own
                settle(future, error=_typed(error, self.name))
            else:
                settle(future, result)

        if self._closed:
            raise TransportError("agent_closed", f"the NIXL agent {self.name} is closed")
        self._inbox.put(run)
        return await future

    def _run(self) -> None:
        try:
            while True:
                try:
                    work = self._inbox.get(block=True, timeout=self._patience())
                except queue.Empty:
                    self._advance()
                else:
                    if work is None:
                        break
                    work()
        except Exception:
            log.exception("the NIXL thread broke", agent=self.name)
            self._closed = True
        self._destroy()

    def _patience(self) -> float | None:
        """How long to wait for new work: not at all with chunks to post, a poll interval with reads under way."""
        if self._reads:
            return 0.0
        if not self._waiting:
            return None
        newest = max(posted for read in self._waiting for _, posted in read._in_flight)
        return POLL_S if time.monotonic() - newest < LATE_S else POLL_LATE_S

    def _begin(self, read: Read) -> None:
        if self._nixl is None:
            self._end(read)
            return
        if not read._chunks:
            self._finish(read)
            return
        heapq.heappush(self._reads, (-read.priority, next(self._order), read))

    def _advance(self) -> None:
        """Post one chunk of the next read in turn, then ask after those under way."""
        if self._reads:
            _, _, read = heapq.heappop(self._reads)
            if not read._abandoned:
                self._post(read)
            if read._in_flight:
                self._waiting.append(read)
            else:
                self._requeue(read)
        for read in self._waiting[:]:
            self._poll(read)
            if len(read._in_flight) < IN_FLIGHT and (read._chunks or not read._in_flight):
                self._waiting.remove(read)
                self._requeue(read)

    def _requeue(self, read: Read) -> None:
        """Behind the others of its priority, so that reads share the agent chunk by chunk."""
        if read._abandoned or read.done.done():
            read._chunks.clear()
        if read._chunks:
            heapq.heappush(self._reads, (-read.priority, next(self._order), read))
        elif read._in_flight:
            self._waiting.append(read)
        else:
            self._finish(read)

    def _post(self, read: Read) -> None:
        start, stop = read._chunks.popleft()
        began = time.monotonic()
        try:
            handle = self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(read.local[start:stop], read.local_type),
                self._nixl.get_xfer_descs(read.remote[start:stop], read.remote_type),
                read.peer,
            )
        except Exception as error:  # noqa: BLE001  see _typed
            self._fail(read, error)  # nothing was posted
            return
        try:
            state = self._nixl.transfer(handle)
        except Exception as error:  # noqa: BLE001  see _typed
            self._fail(read, error)
            # Some descriptors may be on their way: the handle is asked until it says that they are not.
            state = "ERR" if _typed(error, read.peer).code == "peer_lost" else "PROC"
        now = time.monotonic()
        read.seconds += now - began
        if state == "PROC":
            read._in_flight.append((handle, now))
        else:
            self._release(handle)

    def _poll(self, read: Read) -> None:
        for entry in read._in_flight[:]:
            handle, posted = entry
            try:
                state = self._nixl.check_xfer_state(handle)
            except Exception as error:  # noqa: BLE001  see _typed
                self._fail(read, error)
                if _typed(error, read.peer).code != "peer_lost":
                    continue  # proves nothing: only DONE or a lost connection do
                state = "ERR"
            if state != "PROC":
                read._in_flight.remove(entry)
                read.seconds += time.monotonic() - posted
                self._release(handle)

    def _release(self, handle: Any) -> None:
        try:
            self._nixl.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001  a handle that cannot be freed is a leak, not a failed read
            log.warning("a NIXL handle could not be released", agent=self.name, error=str(error))

    def _fail(self, read: Read, error: Exception) -> None:
        read._chunks.clear()
        settle(read.done, error=_typed(error, read.peer))

    def _finish(self, read: Read) -> None:
        if read._abandoned:
            settle(read.done, error=TransportError("abandoned", "the read was given up"))
        settle(read.done, None)
        settle(read.quiet, None)

    def _destroy(self) -> None:
        """The end: what is under way, and what is still asked for, is told so."""
        nixl, self._nixl = self._nixl, None
        if nixl is not None:
            for registered in self._registered.values():
                try:
                    nixl.deregister_memory(registered)
                except Exception as error:  # noqa: BLE001  the agent goes all the same
                    log.warning("memory could not be deregistered", agent=self.name, error=str(error))
        self._registered.clear()
        del nixl  # before any read is called quiet: this is the fence
        landing, self._landing = self._landing, None
        if self.device is not None and landing is not None:
            try:
                self.device.free(landing.address)
            except KvferryError as error:  # a broken context: the reads are ended all the same
                log.warning("GPU memory could not be freed", agent=self.name, error=str(error))
        for read in [*self._waiting, *(read for _, _, read in self._reads)]:
            self._end(read)
        self._reads.clear()
        self._waiting.clear()
        while not self._inbox.empty():
            work = self._inbox.get()
            if work is not None:
                work()

    def _end(self, read: Read) -> None:
        read._in_flight.clear()
        closed = TransportError("agent_closed", f"the NIXL agent {self.name} was closed")
        settle(read.done, error=closed)
        settle(read.quiet, None)


def _chunks(local: Descriptors, limit: int) -> deque[tuple[int, int]]:
    """Row ranges of at most CHUNK_DESCRIPTORS rows and about `limit` bytes, at least one row each."""
    if len(local) == 0:
        return deque()
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


def _typed(error: Exception, whom: str) -> TransportError:
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
