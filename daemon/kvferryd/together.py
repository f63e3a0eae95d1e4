"""Several things at once, of which the first failure ends the others."""

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
