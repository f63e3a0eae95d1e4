"""A GPU's copies, and the memory of others mapped for them.

Copies are launched, and their end is noticed, on the event loop: that takes microseconds, and the way to a thread and
back takes longer than a small copy. Longer work (compiling, mapping) is done on a thread. A copy cannot be called back
once it is launched: it is quiet when its event has been reached, whatever became of the transfer.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvferry.errors import Internal, KvferryError
from kvferry.memory import CudaRegion, cuda
from kvferry.memory.vmm import Fetched, VmmMapping
from kvferryd.aio import Timer, Worker, made_on, submit
from kvferryd.copy.batch import Batch
from kvferryd.copy.copying import CLOSE_S, Build, Copying, HostCopies, closed, given_up, typed
from kvferryd.copy.cuda import USUAL, Copier, NotPrepared, Shape
from kvferryd.memory import Probe
from kvferryd.memory.cuda import read
from kvferryd.observe import logs

log = logs.get(__name__)
T = TypeVar("T")
IN_FLIGHT = 2
"""Launches on the stream at once: the next is made while one runs. More would only take its SMs away."""
TOGETHER_NBYTES = 128 << 20
"""Copies that wait for their turn are launched as one, up to so many bytes (0.3 ms over NVLink): larger ones would keep
the first of them waiting for the last, and leave the GPU idle while their ends are told."""
SPIN_S, POLL_S = 5e-3, 1e-3
"""A copy's event is polled at every turn of the event loop for SPIN_S after its launch, then every POLL_S: a GPU does
not notify the host, and a timer of the loop is good to a millisecond."""
STAGING_FACTOR = 2
"""SMs of a staging copy, in units of what `programs` grants a mapped one. A program has 128 KiB in flight; mapped, that
is some 23 GB/s over NVLink, and 16 programs fill the link (copy.cuda). In local memory a chunk of 64 MiB should take
well less than its READ does (0.2 ms at 300 GB/s; measured: 619 GB/s, 0.1 ms, with all SMs), for the first
gather and the last scatter of a transfer overlap with nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class GpuCopy(Copying):
    """Batches on their way."""

    build: Build
    """Called when it is its turn, on the loop; once more whenever something had to be prepared for it."""
    programs: int
    """SMs that it may take."""
    place: tuple[int, int]
    """In the queue; the lowest goes first."""

    def goes_with(self, other: GpuCopy) -> bool:
        """Whether one launch may do both."""
        return self.programs == other.programs and self.place[0] == other.place[0]


@dataclass(slots=True, eq=False)
class _Launch:
    """Copies that end together, when their event is reached. problem: why they are not whole; something of them may run
    all the same, until the event."""

    copies: list[GpuCopy]
    event: cuda.Event
    launched_at: float
    problem: KvferryError | None = None


class Runner:
    """Owns a Copier, its stream, the mappings and a thread. `close` it."""

    @classmethod
    async def started(cls, device: cuda.Device, programs: int) -> Runner:
        """Load torch and Triton, seconds at the first time. Raises KvferryError (`triton_missing`)."""
        try:
            return cls(await asyncio.to_thread(Copier, device), programs)
        except Exception as error:  # noqa: BLE001  what importing them raises is of many kinds
            raise typed(error) from None

    def __init__(self, copier: Copier, programs: int) -> None:
        """programs: SMs that a copy may take."""
        self.device, self.programs = copier.device, programs
        self.device.bind()
        self._copier, self._stream = copier, copier.device.stream()
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._waiting: list[tuple[tuple[int, int], GpuCopy]] = []
        self._in_flight: deque[_Launch] = deque()
        self._soon: asyncio.Handle | None = None
        self._late = Timer(self._ask)
        """Either asks after what is in flight."""
        self._events: list[cuda.Event] = []
        self._order = itertools.count()
        self._mappings: set[CudaRegion] = set()
        self._worker = Worker(f"copies-{self.device.index}", self.device.bind, self._free)

    @property
    def zeros(self) -> int:
        """The address of a page of zeros."""
        return self._copier.zeros

    def start(self, nbytes: int, build: Build, priority: int = 0, programs: int | None = None) -> GpuCopy:
        """Start a copy of `nbytes` bytes. Higher priority goes first. programs: SMs that it may take; where absent, as
        many as for a staging copy."""
        done, quiet = self._loop.create_future(), self._loop.create_future()
        place = -priority, next(self._order)
        copy = GpuCopy(
            nbytes, done, quiet, build=build, programs=programs or STAGING_FACTOR * self.programs, place=place
        )
        if self._closing:
            copy.end(closed())
        else:
            self._wait(copy)
        return copy

    async def prepare(self, batches: Sequence[Batch]) -> None:
        """Compile what such batches need: about a second for each new shape of kernel."""
        await self.call(lambda: self._copier.prepare(batches))

    def prepare_usual(self) -> None:
        """Compile, one by one between other work, what peers of other layouts may need. Triton keeps it on disk."""
        self._worker.put(lambda: self._compile(USUAL))

    async def open(self, allocation: cuda.Exported | Fetched, nbytes: int, probe: Probe) -> CudaRegion:
        """Map a peer's region and make sure that it is the peer's.

        End it with `unmap`. Raises KvferryError: `probe_failed`, `cuda_ipc_failed`, ...
        """
        if self._closing:
            raise closed()
        try:
            return await made_on(
                self._worker.put, lambda: self._open(allocation, nbytes, probe), lambda region: self._unmap([region])
            )
        except Exception as error:  # noqa: BLE001  as in `submit`
            raise typed(error) from None

    async def unmap(self, regions: Sequence[CudaRegion]) -> None:
        """Nothing may use them any more."""
        await self.call(lambda: self._unmap(regions))

    async def close(self) -> bool:
        """Wait for what is launched, drop what is not, and unmap. Waits at most CLOSE_S for each. Copies that have not
        ended by then end when the thread knows that nothing of them runs any more. Whether all have ended. Idempotent.
        """
        if self._closing:
            return await self._worker.close(CLOSE_S)
        self._closing = True
        for _, copy in self._waiting:
            copy.end(closed())
        self._waiting.clear()
        try:
            if self._in_flight:
                flying = [copy.quiet for launch in self._in_flight for copy in launch.copies]
                await asyncio.wait(flying, timeout=CLOSE_S)
        finally:
            self._late.set(None)
            if self._soon is not None:
                self._soon.cancel()
            self._worker.put(None)
        return await self._worker.close(CLOSE_S)

    async def call(self, work: Callable[[], T]) -> T:
        """Run something on the thread. Raises what it raises, as KvferryError."""
        if self._closing:
            raise closed()
        return await submit(self._worker.put, work, typed)

    # ---- on the event loop ----

    def _wait(self, copy: GpuCopy) -> None:
        """Queue the copy, and launch it now if it is its turn."""
        heapq.heappush(self._waiting, (copy.place, copy))
        self._advance()

    def _advance(self) -> None:
        """Launch what can be launched, and poll what is in flight."""
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            if copies := self._next():
                self._launch(copies)
        if self._in_flight and self._soon is None:
            if time.monotonic() - self._in_flight[0].launched_at < SPIN_S:
                self._soon = self._loop.call_soon(self._ask)
            else:
                self._late.ring_by(self._loop.time() + POLL_S)

    def _next(self) -> list[GpuCopy]:
        """The copy whose turn it is, and those behind it that may be launched with it. Copies that were given up end
        here."""
        copies: list[GpuCopy] = []
        nbytes = 0
        while self._waiting:
            copy = self._waiting[0][1]
            nbytes += copy.nbytes
            if copies and (nbytes > TOGETHER_NBYTES or not copy.goes_with(copies[0])):
                break
            heapq.heappop(self._waiting)
            if copy.abandoned:
                copy.end(given_up())
            else:
                copies.append(copy)
        return copies

    def _ask(self) -> None:
        """End the copies whose events have been reached."""
        self._soon = None
        while self._in_flight:
            launch = self._in_flight[0]
            problem = launch.problem
            try:
                if not launch.event.reached():
                    break
            except KvferryError as error:  # the context is broken: nothing of it runs any more
                problem = error
            self._in_flight.popleft()
            self._events.append(launch.event)
            for copy in launch.copies:
                copy.end(problem)
        self._advance()

    def _launch(self, copies: list[GpuCopy]) -> None:
        """Never raises: an error is the copies' own."""
        now, batches, built = time.monotonic(), list[Batch](), list[GpuCopy]()
        for copy in copies:
            copy.launched_at = now
            try:
                batches += copy.build()
            except Exception as error:  # noqa: BLE001  as in `submit`; nothing of this one runs
                copy.end(typed(error))
            else:
                built.append(copy)
        if built:
            self._run_together(built, batches, now)

    def _run_together(self, copies: list[GpuCopy], batches: Sequence[Batch], now: float) -> None:
        try:
            launch = _Launch(copies, self._events.pop() if self._events else self.device.event(), now)
            try:
                self._copier.copy(batches, self._stream, copies[0].programs)
            except NotPrepared:
                self._events.append(launch.event)
                self._prepare(copies, batches)
                return
            except Exception as error:  # noqa: BLE001  as in `submit`; of several launches some may run
                launch.problem = typed(error)
            launch.event.record(self._stream)
        except KvferryError as error:  # the context is broken: nothing of it runs any more
            for copy in copies:
                copy.end(error)
        else:
            self._in_flight.append(launch)

    def _prepare(self, copies: list[GpuCopy], batches: Sequence[Batch]) -> None:
        """Prepare on the thread, then queue the copy again. Several do not wait for what only all of them together may
        need: they are launched one by one, this time."""

        def again(preparing: asyncio.Future[None]) -> None:
            problem = closed() if self._closing else preparing.exception()
            for copy in copies:
                if isinstance(problem, KvferryError):
                    copy.end(problem)
                else:
                    self._wait(copy)

        if len(copies) > 1:
            submit(self._worker.put, lambda: self._copier.prepare(batches), typed)
            for copy in copies:
                self._launch([copy])
            return
        submit(self._worker.put, lambda: self._copier.prepare(batches), typed).add_done_callback(again)

    # ---- on the thread ----

    def _free(self) -> None:
        try:
            self._stream.synchronize()
            self._unmap(list(self._mappings))
            self._copier.close()
            self._stream.close()
            for event in (*self._events, *(launch.event for launch in self._in_flight)):
                event.close()
        except KvferryError:
            pass  # a broken context: nothing runs any more, and the process keeps what it holds until it ends
        for launch in self._in_flight:
            for copy in launch.copies:
                copy.end(closed())

    def _compile(self, shapes: Sequence[Shape]) -> None:
        if shapes and not self._closing:
            try:
                self._copier.compile(shapes[0])
            except Exception as error:  # noqa: BLE001  it fails again for who needs it
                log.warning("kernel not compiled", shape=shapes[0], why=str(typed(error)))
            self._worker.put(lambda: self._compile(shapes[1:]))

    def _open(self, allocation: cuda.Exported | Fetched, nbytes: int, probe: Probe) -> CudaRegion:
        mapping = allocation.opened(self.device)
        region = CudaRegion(0, "cuda", nbytes, allocation.offset, self.device, mapping)
        try:
            self._check(mapping, allocation, nbytes, probe)
        except BaseException:
            region.close()
            raise
        self._mappings.add(region)
        return region

    def _check(
        self, mapping: cuda.Mapping | VmmMapping, allocation: cuda.Exported | Fetched, nbytes: int, probe: Probe
    ) -> None:
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


Copies = HostCopies | Runner
"""Two implementations of one shape: `start`, `prepare`, `zeros`, `close`."""
