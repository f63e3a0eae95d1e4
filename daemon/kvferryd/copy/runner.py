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
from dataclasses import dataclass
from typing import TypeVar

from kvferry.errors import Conflict, Internal, KvferryError, Unavailable
from kvferry.memory import CudaRegion, cuda
from kvferryd import logs
from kvferryd.aio import settle, submit
from kvferryd.copy.batch import Batch
from kvferryd.copy.cuda import USUAL, Copier, NotPrepared, Shape
from kvferryd.memory import Probe
from kvferryd.memory.cuda import read

log = logs.get(__name__)
T = TypeVar("T")
IN_FLIGHT = 2
"""Copies on the stream at once: the next is launched while one runs. More would only take its SMs away."""
SPIN_S, POLL_S = 5e-3, 1e-3
"""A copy's event is polled at every turn of the event loop for SPIN_S after its launch, then every POLL_S: a GPU does
not notify the host, and a timer of the loop is good to a millisecond."""
CLOSE_S = 10.0


@dataclass(slots=True, eq=False)
class GpuCopy:
    """Batches on their way. `done`: all is copied, or why not. `quiet`: nothing is written any more."""

    nbytes: int
    build: Callable[[], Sequence[Batch]]
    """Called when it is its turn, on the loop; once more whenever something had to be prepared for it."""
    done: asyncio.Future[None]
    quiet: asyncio.Future[None]
    programs: int
    """SMs that it may take."""
    place: tuple[int, int]
    """In the queue; the lowest goes first."""
    seconds: float = 0.0
    """From launch to event."""
    phase: str = "copy"
    launched_at: float = 0.0
    event: cuda.Event | None = None
    problem: KvferryError | None = None
    """Why it is not whole. Something of it may run all the same, until its event."""
    abandoned: bool = False

    def abandon(self) -> None:
        """Not launched if it has not been. Otherwise it goes on, until `quiet`."""
        self.abandoned = True


class Runner:
    """Owns a Copier, its stream, the mappings and a thread. `close` it."""

    @classmethod
    async def started(cls, device: cuda.Device, programs: int) -> Runner:
        """Load torch and Triton, seconds at the first time. Raises KvferryError (`triton_missing`)."""
        try:
            return cls(await asyncio.to_thread(Copier, device), programs)
        except Exception as error:  # noqa: BLE001  what importing them raises is of many kinds
            raise _typed(error) from None

    def __init__(self, copier: Copier, programs: int) -> None:
        """programs: SMs that a copy may take."""
        self.device, self.programs = copier.device, programs
        self.device.bind()
        self._copier, self._stream = copier, copier.device.stream()
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._waiting: list[tuple[tuple[int, int], GpuCopy]] = []
        self._in_flight: deque[GpuCopy] = deque()
        self._asking: asyncio.Handle | None = None
        self._events: list[cuda.Event] = []
        self._order = itertools.count()
        self._mappings: set[CudaRegion] = set()
        self._thread = threading.Thread(target=self._run, name=f"copies-{self.device.index}", daemon=True)
        self._thread.start()

    def copy(
        self, nbytes: int, build: Callable[[], Sequence[Batch]], priority: int = 0, programs: int | None = None
    ) -> GpuCopy:
        """Start a copy of `nbytes` bytes. Higher priority goes first.

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
        await self.call(lambda: self._copier.prepare(batches))

    def prepare_usual(self) -> None:
        """Compile, one by one between other work, what peers of other layouts may need. Triton keeps it on disk."""
        self._inbox.put(lambda: self._compile(USUAL))

    async def open(self, allocation: cuda.Exported, nbytes: int, probe: Probe | None = None) -> CudaRegion:
        """Map a peer's region and make sure that it is the peer's; without `probe` it is only held, not read.

        End it with `unmap`. Raises KvferryError: `probe_failed`, `cuda_ipc_failed`, ...
        """
        return await self.call(lambda: self._open(allocation, nbytes, probe))

    async def unmap(self, regions: Sequence[CudaRegion]) -> None:
        """Nothing may use them any more."""
        await self.call(lambda: self._unmap(regions))

    async def close(self) -> None:
        """Wait for what is launched, drop what is not, and unmap. Waits at most CLOSE_S for each. Copies that have not
        ended by then end when the thread knows that nothing of them runs any more."""
        self._closing = True
        for _, copy in self._waiting:
            _end(copy, _closed())
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
        return await submit(self._inbox.put, work, _typed)

    # ---- on the event loop ----

    def _wait(self, copy: GpuCopy) -> None:
        """Queue the copy, and launch it now if it is its turn."""
        heapq.heappush(self._waiting, (copy.place, copy))
        self._advance()

    def _advance(self) -> None:
        """Launch what can be launched, and poll what is in flight."""
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
        """End the copies whose events have been reached."""
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
        """Never raises: an error is the copy's own."""
        copy.launched_at = time.monotonic()
        try:
            event = self._events.pop() if self._events else self.device.event()
            try:
                batches = copy.build()
                self._copier.copy(batches, self._stream, copy.programs)
            except NotPrepared:
                self._events.append(event)
                self._prepare(copy, batches)
                return
            except Exception as error:  # noqa: BLE001  as in `submit`; of several launches some may run
                copy.problem = _typed(error)
            event.record(self._stream)
        except KvferryError as error:  # the context is broken: nothing of it runs any more
            _end(copy, error)
        else:
            copy.event = event
            self._in_flight.append(copy)

    def _prepare(self, copy: GpuCopy, batches: Sequence[Batch]) -> None:
        """Prepare on the thread, then queue the copy again."""

        def again(preparing: asyncio.Future[None]) -> None:
            problem = _closed() if self._closing else preparing.exception()
            if isinstance(problem, KvferryError):
                _end(copy, problem)
            else:
                self._wait(copy)

        submit(self._inbox.put, lambda: self._copier.prepare(batches), _typed).add_done_callback(again)

    # ---- on the thread ----

    def _run(self) -> None:
        self.device.bind()
        while (work := self._inbox.get()) is not None:
            work()
        try:
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

    def _compile(self, shapes: Sequence[Shape]) -> None:
        if shapes and not self._closing:
            try:
                self._copier.compile(shapes[0])
            except Exception as error:  # noqa: BLE001  it fails again for who needs it
                log.warning("kernel not compiled", shape=shapes[0], why=str(_typed(error)))
            self._inbox.put(lambda: self._compile(shapes[1:]))

    def _open(self, allocation: cuda.Exported, nbytes: int, probe: Probe | None) -> CudaRegion:
        mapping = self.device.open(allocation.handle)
        region = CudaRegion(0, "cuda", nbytes, allocation.offset, self.device, mapping)
        try:
            if probe is not None:
                self._check(mapping, allocation, nbytes, probe)
        except BaseException:
            region.close()
            raise
        self._mappings.add(region)
        return region

    def _check(self, mapping: cuda.Mapping, allocation: cuda.Exported, nbytes: int, probe: Probe) -> None:
        fits = (
            mapping.nbytes == allocation.allocation_nbytes
            and 0 <= allocation.offset <= allocation.offset + nbytes <= mapping.nbytes
            and len(probe.held) > 0
            and 0 <= probe.offset <= probe.offset + len(probe.held) <= mapping.nbytes
        )
        if not fits or read(self.device, mapping.address + probe.offset, len(probe.held)) != probe.held:
            message = "the mapped memory is not what the source has there"
            raise Internal("probe_failed", message, field="allocation_nbytes", value=mapping.nbytes)

    def _unmap(self, regions: Sequence[CudaRegion]) -> None:
        for region in regions:
            self._mappings.discard(region)
            region.close()


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
