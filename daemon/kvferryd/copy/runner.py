"""One GPU's copies, the memory of others mapped for them, and the one thread that owns all of it.

The event loop hands over work and awaits futures. A copy cannot be called back once it is launched: it is quiet when
its event has been reached, whatever became of the transfer.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry import cuda
from kvferry.errors import KvferryError
from kvferryd.copy.batch import Batch
from kvferryd.copy.cuda import Copier
from kvferryd.memory import Probe
from kvferryd.memory.cuda import read
from kvferryd.settle import settle

T = TypeVar("T")
IN_FLIGHT = 2
"""Copies on the stream at once: the next is launched while one runs. More would only take its SMs away."""
SPIN_S = 150e-6
POLL_S = 50e-6
CLOSE_S = 10.0
TRIAL_NBYTES = 32 << 20


@dataclass(slots=True, eq=False)
class GpuCopy:
    """Batches on their way. `done`: all is copied, or why not. `quiet`: nothing is written any more."""

    nbytes: int
    build: Callable[[], Sequence[Batch]]
    done: asyncio.Future[None]
    quiet: asyncio.Future[None]
    programs: int
    """SMs that it may take."""
    seconds: float = 0.0
    """From launch to event."""
    phase: str = "copy"
    launched_at: float = 0.0
    event: cuda.Event | None = None
    abandoned: bool = False

    def abandon(self) -> None:
        """Not launched if it has not been. Otherwise it goes on, until `quiet`."""
        self.abandoned = True


@dataclass(slots=True, eq=False)
class Mapped:
    """A peer's region in this process. `bytes_per_s`: of a plain copy from it, measured when it was opened."""

    address: int
    bytes_per_s: float
    mapping: cuda.Mapping = field(repr=False)


class Runner:
    """Owns a Copier, its stream, the mappings and a thread. `close` it."""

    def __init__(self, device: cuda.Device, programs: int) -> None:
        self.device, self.programs = device, programs
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"copies-{device.index}", daemon=True)
        self._closing = False
        self._waiting: list[tuple[int, int, GpuCopy]] = []
        self._in_flight: deque[GpuCopy] = deque()
        self._events: list[cuda.Event] = []
        self._order = itertools.count()
        self._mappings: set[cuda.Mapping] = set()
        self._copier: Copier | None = None
        self._stream: cuda.Stream | None = None

    async def start(self) -> None:
        """Load torch and Triton, seconds at the first time. Raises KvferryError (`triton_missing`)."""
        self._thread.start()
        try:
            await self.call(self._start)
        except BaseException:
            await self.close()
            raise

    def copy(
        self, nbytes: int, build: Callable[[], Sequence[Batch]], priority: int = 0, programs: int | None = None
    ) -> GpuCopy:
        """Start a copy. `build` runs on the thread; `nbytes` is for those who count. Higher priority goes first.

        programs: SMs that it may take; the runner's own number where absent.
        """
        done, quiet = self._loop.create_future(), self._loop.create_future()
        copy = GpuCopy(nbytes, build, done, quiet, programs or self.programs)
        entry = (-priority, next(self._order), copy)
        if not self._closing:
            self._inbox.put(lambda: heapq.heappush(self._waiting, entry))
        else:
            self._end(copy, _closed())
        return copy

    async def prepare(self, batches: Sequence[Batch]) -> None:
        """Compile what such batches need: about a second for each new shape of kernel."""
        await self.call(lambda: self._copier.prepare(batches) if self._copier else None)

    async def open(self, allocation: cuda.Exported, nbytes: int, probe: Probe) -> Mapped:
        """Map a peer's region and make sure that it is the peer's. Raises KvferryError: `probe_failed`, ..."""
        return await self.call(lambda: self._open(allocation, nbytes, probe))

    async def unmap(self, every: Sequence[Mapped]) -> None:
        """Nothing may use them any more."""
        await self.call(lambda: self._unmap([each.mapping for each in every]))

    async def close(self) -> None:
        """Wait for what is launched, drop what is not, and unmap. Waits at most CLOSE_S for the thread."""
        self._closing = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    async def call(self, work: Callable[[], T]) -> T:
        """Run something on the thread. Raises what it raises, as KvferryError."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except KvferryError as error:
                settle(future, error=error)
            except Exception as error:  # noqa: BLE001  Triton's and torch's are of many kinds
                settle(future, error=_failed(error))
            else:
                settle(future, result)

        if self._closing:
            raise _closed()
        self._inbox.put(run)
        return await future

    # ---- everything below runs on the thread ----

    def _start(self) -> None:
        self._copier = Copier(self.device, self.programs)
        self._stream = self.device.stream()

    def _run(self) -> None:
        while True:
            try:
                work = self._inbox.get(timeout=self._patience())
            except queue.Empty:
                self._advance()
            else:
                if work is None:
                    break
                work()
        self._stop()

    def _patience(self) -> float | None:
        """Not at all with a copy to launch or one just launched; for ever with none."""
        if self._in_flight:
            launching = bool(self._waiting) and len(self._in_flight) < IN_FLIGHT
            fresh = time.monotonic() - self._in_flight[0].launched_at < SPIN_S
            return 0.0 if launching or fresh else POLL_S
        return 0.0 if self._waiting else None

    def _advance(self) -> None:
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            copy = heapq.heappop(self._waiting)[2]
            if copy.abandoned:
                self._end(copy, KvferryError("abandoned", "the copy was given up"))
            else:
                self._launch(copy)
        while self._in_flight:
            copy = self._in_flight[0]
            assert copy.event is not None
            problem: KvferryError | None = None
            try:
                if not copy.event.reached():
                    break
            except KvferryError as error:  # the context is broken: nothing of it runs any more
                problem = error
            self._in_flight.popleft()
            self._events.append(copy.event)
            self._end(copy, problem)

    def _launch(self, copy: GpuCopy) -> None:
        assert self._copier is not None and self._stream is not None
        copy.launched_at = time.monotonic()
        event = self._events.pop() if self._events else self.device.event()
        problem: KvferryError | None = None
        try:
            self._copier.copy(copy.build(), self._stream, copy.programs)
        except KvferryError as error:
            problem = error
        except Exception as error:  # noqa: BLE001  as in `call`
            problem = _failed(error)
        if problem is not None:
            self._stream.synchronize()  # of several launches some may run
            self._events.append(event)
            self._end(copy, problem)
            return
        event.record(self._stream)
        copy.event = event
        self._in_flight.append(copy)

    def _end(self, copy: GpuCopy, problem: KvferryError | None) -> None:
        if copy.launched_at:
            copy.seconds = time.monotonic() - copy.launched_at
        settle(copy.done, error=problem)
        settle(copy.quiet, None)

    def _open(self, allocation: cuda.Exported, nbytes: int, probe: Probe) -> Mapped:
        mapping = self.device.open(allocation.handle)
        try:
            fits = (
                mapping.nbytes == allocation.allocation_nbytes
                and 0 <= allocation.offset <= allocation.offset + nbytes <= mapping.nbytes
                and len(probe.held) > 0
                and 0 <= probe.offset <= probe.offset + len(probe.held) <= mapping.nbytes
            )
            if not fits or read(self.device, mapping.address + probe.offset, len(probe.held)) != probe.held:
                raise KvferryError(
                    "probe_failed",
                    "the mapped memory is not what the source has there",
                    field="allocation_nbytes",
                    value=mapping.nbytes,
                )
            address = mapping.address + allocation.offset
            rate = self._rate(address, min(nbytes, TRIAL_NBYTES))
        except BaseException:
            mapping.close()
            raise
        self._mappings.add(mapping)
        return Mapped(address, rate, mapping)

    def _rate(self, source: int, nbytes: int) -> float:
        """Bytes per second of a plain copy; the first touch of the mapping is not counted."""
        assert self._stream is not None
        room, began, ended = self.device.alloc(nbytes), self.device.event(timing=True), self.device.event(timing=True)
        try:
            self._stream.copy(room, source, nbytes)
            began.record(self._stream)
            self._stream.copy(room, source, nbytes)
            ended.record(self._stream)
            self._stream.synchronize()
            return nbytes / max(1e-6, ended.ms_since(began) / 1e3)
        finally:
            self.device.free(room)
            began.close()
            ended.close()

    def _unmap(self, mappings: Sequence[cuda.Mapping]) -> None:
        for mapping in mappings:
            self._mappings.discard(mapping)
            mapping.close()

    def _stop(self) -> None:
        if self._stream is not None and self._copier is not None:
            try:
                self._stream.synchronize()
                self._unmap(list(self._mappings))
                self._copier.close()
                self._stream.close()
                for event in (*self._events, *(copy.event for copy in self._in_flight if copy.event)):
                    event.close()
            except KvferryError:
                pass  # a broken context: the process keeps what it holds until it ends
        for copy in (*self._in_flight, *(entry[2] for entry in self._waiting)):
            self._end(copy, _closed())
        self._in_flight.clear()
        self._waiting.clear()


def _closed() -> KvferryError:
    return KvferryError("copies_closed", "the engine whose copies these are has ended")


def _failed(error: Exception) -> KvferryError:
    return KvferryError("copy_failed", f"the copy failed: {type(error).__name__} {error}"[:500])
