"""Copies between staging slots and the cache: two implementations of one shape.

Memory that a copy is still in must not be lent to others: nothing of what `start` returns runs any more when it is
quiet, whatever has become of those who waited for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvferry.errors import KvferryError, Unavailable
from kvferryd.aio import Worker
from kvferryd.copy import Batch, host
from kvferryd.copy.runner import CLOSE_S, Copying, Runner, given_up, typed
from kvferryd.observe import logs

log = logs.get(__name__)
Build = Callable[[], Sequence[Batch]]
"""Makes the batches. Called on the thread that copies, perhaps more than once."""

STAGING_FACTOR = 2
"""SMs of a staging copy, in units of what `programs` grants a mapped one. A program has 128 KiB in flight; mapped, that
is some 23 GB/s over NVLink, and 16 programs fill the link (copy.cuda). In local memory a chunk of 64 MiB should take
well less than its READ does (0.2 ms at 300 GB/s; measured: 619 GB/s, 0.1 ms, with all SMs), for the first
gather and the last scatter of a transfer overlap with nothing."""


class HostCopies:
    """On host memory: one thread of its own, which takes them as they come, for there are few slots and so few copies.
    `run` copies batches and returns when all bytes have arrived."""

    zeros = host.ZEROS
    """The address of a page of zeros."""

    def __init__(self, run: Callable[[Sequence[Batch]], None] = host.copy) -> None:
        self._run = run
        self._closed = False
        self._worker = Worker("staging")

    def start(self, nbytes: int, build: Build, priority: int = 0) -> Copying:
        """Run what `build` makes; `nbytes` is its size. Higher priority goes first. May raise KvferryError at once."""
        if self._closed:
            raise arena_closed()
        loop = asyncio.get_running_loop()
        copy = Copying(nbytes, loop.create_future(), loop.create_future())

        def run() -> None:
            problem = given_up() if copy.abandoned else None
            if problem is None:
                copy.launched_at = time.monotonic()
                try:
                    self._run(build())
                except Exception as error:
                    log.exception("a copy broke")
                    problem = typed(error)
            loop.call_soon_threadsafe(copy.end, problem)

        self._worker.put(run)
        return copy

    async def prepare(self, batches: Sequence[Batch]) -> None:
        """Pay now for what the first copy of such batches would pay: numpy needs no compiling."""

    async def close(self) -> bool:
        """Whether the last copy is over, within CLOSE_S. Idempotent."""
        self._closed = True
        return await self._worker.close(CLOSE_S)


class GpuCopies:
    """On a GPU: through the engine's runner, which its mapped copies share. The engine closes it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def zeros(self) -> int:
        return self._runner.zeros

    def start(self, nbytes: int, build: Build, priority: int = 0) -> Copying:
        return self._runner.copy(nbytes, build, priority, STAGING_FACTOR * self._runner.programs)

    async def prepare(self, batches: Sequence[Batch]) -> None:
        await self._runner.prepare(batches)

    async def close(self) -> bool:
        """Nothing of its own: the runner tells whether it has ended every copy."""
        return True


Copies = HostCopies | GpuCopies


def arena_closed() -> KvferryError:
    return Unavailable("arena_closed", "the staging arena is closed: its engine is gone")
