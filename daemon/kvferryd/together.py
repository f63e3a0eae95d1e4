"""Several things at once, and work that outlasts whoever started it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable


async def together(steps: Iterable[Coroutine[None, None, None]]) -> None:
    """All at once; the first failure ends the others, and is raised when they have ended."""
    # Not a TaskGroup: before Python 3.13 one whose child failed leaves the task's count of cancellations raised
    # (cpython gh-116720), and a deadline that passes later looks like an abort.
    every = list(steps)
    if len(every) == 1:
        await every[0]
        return
    tasks = [asyncio.create_task(step) for step in every]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Tasks(set["asyncio.Task[None]"]):
    """Work that outlasts whoever started it, until it has ended."""

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
