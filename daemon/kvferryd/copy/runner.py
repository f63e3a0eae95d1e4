"""One GPU's copies, and the memory of others mapped for them.

Copies are launched, and their end is noticed, on the event loop: that takes microseconds, and the way to a thread and
back takes longer than a small copy. What takes longer (compiling, mapping) is done on a thread. A copy cannot be called
back once it is launched: it is quiet when its event has been reached, whatever became of the transfer.
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

from kvferry.errors import Conflict, Internal, KvferryError, Unavailable
from kvferry.memory import cuda
from kvferryd.aio import settle
from kvferryd.copy.batch import Batch
from kvferryd.copy.cuda import Copier, NotPrepared
from kvferryd.memory import Probe
from kvferryd.memory.cuda import read

T = TypeVar("T")
IN_FLIGHT = 2
"""Copies on the stream at once: the next is launched while one runs. More would only take its SMs away."""
SPIN_S, POLL_S = 5e-3, 1e-3
"""For so long after its launch a copy is asked for at every turn of the event loop, later once in POLL_S: a GPU wakes
nobody when it is done, and a timer of the loop is good to a millisecond."""
CLOSE_S = 10.0
TRIAL_NBYTES = 32 << 20


@dataclass(slots=True, eq=False)
class GpuCopy:
    """Batches on their way. `done`: all is copied, or why not. `quiet`: nothing is written any more."""

    nbytes: int
    build: Callable[[], Sequence[Batch]]
    """Called when it is its turn, on the loop; twice where something had to be prepared for it first."""
    done: asyncio.Future[None]
    quiet: asyncio.Future[None]
    programs: int
    """SMs that it may take."""
    place: tuple[int, int]
    """In the queue: lower goes first."""
    seconds: float = 0.0
    """From launch to event."""
    phase: str = "copy"
    launched_at: float = 0.0
    event: cuda.Event | None = None
    prepared: bool = False
    problem: KvferryError | None = None
    """Why it is not whole. Something of it may run all the same, until its event."""
    abandoned: bool = False

    def abandon(self) -> None:
        """Not launched if it has not been. Otherwise it goes on, until `quiet`."""
        self.abandoned = True


@dataclass(slots=True, eq=False)
class Mapped:
    """A peer's memory in this process. `bytes_per_s`: of a plain copy when it was opened; 0 if it is only held."""

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
        self._waiting: list[tuple[tuple[int, int], GpuCopy]] = []
        self._preparing: set[GpuCopy] = set()
        self._in_flight: deque[GpuCopy] = deque()
        self._asking: asyncio.Handle | None = None
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
            self.device.bind()
        except BaseException:
            await self.close()
            raise

    def copy(
        self, nbytes: int, build: Callable[[], Sequence[Batch]], priority: int = 0, programs: int | None = None
    ) -> GpuCopy:
        """Start a copy; `nbytes` is for those who count. Higher priority goes first.

        programs: SMs that it may take; the runner's own number where absent.
        """
        done, quiet = self._loop.create_future(), self._loop.create_future()
        copy = GpuCopy(nbytes, build, done, quiet, programs or self.programs, (-priority, next(self._order)))
        if self._closing:
            _end(copy, _closed())
        else:
            self._wait(copy)
        return copy

    async def prepare(self, batches: Sequence[Batch]) -> None:
        """Compile what such batches need: about a second for each new shape of kernel."""
        await self.call(lambda: self._copier.prepare(batches) if self._copier else None)

    async def open(self, allocation: cuda.Exported, nbytes: int, probe: Probe | None = None) -> Mapped:
        """Map a peer's region and make sure that it is the peer's; without `probe` it is only held, not read.

        Raises KvferryError: `probe_failed`, `cuda_ipc_failed`, ...
        """
        return await self.call(lambda: self._open(allocation, nbytes, probe))

    async def unmap(self, every: Sequence[Mapped]) -> None:
        """Nothing may use them any more."""
        await self.call(lambda: self._unmap([each.mapping for each in every]))

    async def close(self) -> None:
        """Wait for what is launched, drop what is not, and unmap. Waits at most CLOSE_S for each. A copy that has not
        ended by then is quiet when the thread knows that it has."""
        self._closing = True
        for copy in (*self._preparing, *(copy for _, copy in self._waiting)):
            _end(copy, _closed())
        self._preparing.clear()
        self._waiting.clear()
        try:
            if self._in_flight:
                await asyncio.wait([copy.quiet for copy in self._in_flight], timeout=CLOSE_S)
        finally:
            if self._asking is not None:
                self._asking.cancel()
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    async def call(self, work: Callable[[], T]) -> T:
        """Run something on the thread. Raises what it raises, as KvferryError."""
        if self._closing:
            raise _closed()
        return await self._submit(work)

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  Triton's and torch's are of many kinds
                settle(future, error=_typed(error))
            else:
                settle(future, result)

        self._inbox.put(run)
        return future

    # ---- on the event loop ----

    def _wait(self, copy: GpuCopy) -> None:
        """Until it is its turn, which may be now."""
        heapq.heappush(self._waiting, (copy.place, copy))
        self._advance()

    def _advance(self) -> None:
        """Launch what can be launched."""
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            copy = heapq.heappop(self._waiting)[1]
            if copy.abandoned:
                _end(copy, Conflict("abandoned", "the copy was given up"))
            else:
                self._launch(copy)
        if self._in_flight and self._asking is None:
            fresh = time.monotonic() - self._in_flight[0].launched_at < SPIN_S
            self._asking = self._loop.call_soon(self._ask) if fresh else self._loop.call_later(POLL_S, self._ask)

    def _ask(self) -> None:
        """Whether copies have ended."""
        self._asking = None
        while self._in_flight:
            copy = self._in_flight[0]
            assert copy.event is not None
            problem = copy.problem
            try:
                if not copy.event.reached():
                    break
            except KvferryError as error:  # the context is broken: nothing of it runs any more
                problem = error
            self._in_flight.popleft()
            self._events.append(copy.event)
            _end(copy, problem)
        self._advance()

    def _launch(self, copy: GpuCopy) -> None:
        """Never raises: what is wrong is the copy's."""
        assert self._copier is not None and self._stream is not None
        copy.launched_at = time.monotonic()
        try:
            event = self._events.pop() if self._events else self.device.event()
            try:
                batches = copy.build()
                self._copier.copy(batches, self._stream, copy.programs, prepare=copy.prepared)
            except NotPrepared:
                self._events.append(event)
                self._prepare(copy, batches)
                return
            except Exception as error:  # noqa: BLE001  as in `_submit`; of several launches some may run
                copy.problem = _typed(error)
            event.record(self._stream)
        except KvferryError as error:  # the context is broken: nothing of it runs any more
            _end(copy, error)
        else:
            copy.event = event
            self._in_flight.append(copy)

    def _prepare(self, copy: GpuCopy, batches: Sequence[Batch]) -> None:
        """On the thread; then it is the copy's turn again."""
        copier = self._copier
        assert copier is not None
        copy.prepared = True
        self._preparing.add(copy)

        def again(prepared: asyncio.Future[None]) -> None:
            if copy in self._preparing:
                self._preparing.remove(copy)
                if isinstance(problem := prepared.exception(), KvferryError):
                    _end(copy, problem)
                else:
                    self._wait(copy)

        self._submit(lambda: copier.prepare(batches)).add_done_callback(again)

    # ---- on the thread ----

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            work()
        self._stop()

    def _start(self) -> None:
        self.device.bind()
        self._copier = Copier(self.device, self.programs)
        self._stream = self.device.stream()

    def _open(self, allocation: cuda.Exported, nbytes: int, probe: Probe | None) -> Mapped:
        mapping = self.device.open(allocation.handle)
        if probe is None:
            self._mappings.add(mapping)
            return Mapped(mapping.address + allocation.offset, 0.0, mapping)
        try:
            fits = (
                mapping.nbytes == allocation.allocation_nbytes
                and 0 <= allocation.offset <= allocation.offset + nbytes <= mapping.nbytes
                and len(probe.held) > 0
                and 0 <= probe.offset <= probe.offset + len(probe.held) <= mapping.nbytes
            )
            if not fits or read(self.device, mapping.address + probe.offset, len(probe.held)) != probe.held:
                raise Internal(
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
        stream, room = self.device.stream(), self.device.alloc(nbytes)
        began, ended = self.device.event(timing=True), self.device.event(timing=True)
        try:
            stream.copy(room, source, nbytes)
            began.record(stream)
            stream.copy(room, source, nbytes)
            ended.record(stream)
            stream.synchronize()
            return nbytes / max(1e-6, ended.ms_since(began) / 1e3)
        finally:
            self.device.free(room)
            for each in (began, ended, stream):
                each.close()

    def _unmap(self, mappings: Sequence[cuda.Mapping]) -> None:
        for mapping in mappings:
            self._mappings.discard(mapping)
            mapping.close()

    def _stop(self) -> None:
        try:
            if self._stream is not None and self._copier is not None:
                self._stream.synchronize()
                self._unmap(list(self._mappings))
                self._copier.close()
                self._stream.close()
                for event in (*self._events, *(copy.event for copy in self._in_flight if copy.event)):
                    event.close()
        except KvferryError:
            pass  # a broken context: nothing runs any more, and the process keeps what it holds until it ends
        for copy in self._in_flight:
            settle(copy.quiet)
            settle(copy.done, error=_closed())


def _end(copy: GpuCopy, problem: KvferryError | None) -> None:
    if copy.launched_at:
        copy.seconds = time.monotonic() - copy.launched_at
    settle(copy.quiet)
    settle(copy.done, error=problem)


def _closed() -> KvferryError:
    return Unavailable("copies_closed", "the engine whose copies these are has ended")


def _typed(error: Exception) -> KvferryError:
    if isinstance(error, KvferryError):
        return error
    return Internal("copy_failed", f"the copy failed: {type(error).__name__} {error}"[:500])
