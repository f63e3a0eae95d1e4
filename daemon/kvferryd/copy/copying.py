"""Copies on their way, and those on host memory; those on a GPU are in `kvferryd.copy.runner`.

Memory that a copy is still in must not be lent to others: nothing of what `start` returns runs any more when it is
quiet, whatever has become of those who waited for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.errors import Conflict, Internal, KvferryError, Unavailable
from kvferryd.aio import Worker, settle
from kvferryd.copy import host
from kvferryd.copy.batch import Batch
from kvferryd.observe import logs

log = logs.get(__name__)
CLOSE_S = 10.0
Build = Callable[[], Sequence[Batch]]
"""Makes the batches when it is a copy's turn; perhaps more than once."""


@dataclass(slots=True, eq=False)
class Copying:
    """A copy on its way, here or on a host's thread. `quiet`: nothing of it runs any more. `done`, a moment later: all
    is copied, or why not."""

    nbytes: int
    done: asyncio.Future[None]
    quiet: asyncio.Future[None]
    seconds: float = 0.0
    """From launch to end."""
    phase: str = "copy"
    launched_at: float = 0.0
    abandoned: bool = False

    def abandon(self) -> None:
        """Not launched if it has not been. Otherwise it goes on, until `quiet`."""
        self.abandoned = True

    def end(self, problem: KvferryError | None = None) -> None:
        if self.launched_at:
            self.seconds = time.monotonic() - self.launched_at
        settle(self.quiet)
        settle(self.done, error=problem)


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
        """Run what `build` makes, on the thread; `nbytes` is its size. May raise KvferryError at once."""
        if self._closed:
            raise closed()
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


def closed() -> KvferryError:
    return Unavailable("copies_closed", "the engine whose copies these are has ended")


def given_up() -> KvferryError:
    return Conflict("abandoned", "the copy was given up")


def typed(error: Exception) -> KvferryError:
    """An error of a copy may be of many kinds; one of ours stays."""
    if isinstance(error, KvferryError):
        return error
    return Internal("copy_failed", f"the copy failed: {type(error).__name__} {error}"[:500])
