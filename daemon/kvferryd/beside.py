"""Work on tables: on the event loop where it is little, otherwise beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FEW = 8192
"""Blocks, segments or runs that are bound, cut or expanded on the loop: half a millisecond at most. More take several,
which others would wait for; these are not worth the way to a thread and back."""


def beside(rows: int, work: Callable[[], T]) -> asyncio.Future[T]:
    """What comes of `work` on so many rows of tables: it is done already where they are few."""
    loop = asyncio.get_running_loop()
    if rows > FEW:
        return loop.run_in_executor(None, work)
    worked: asyncio.Future[T] = loop.create_future()
    try:
        worked.set_result(work())
    except Exception as error:  # noqa: BLE001  who asks for the result hears of it, as from a thread
        worked.set_exception(error)
    return worked


def when_done(future: asyncio.Future[T], then: Callable[[asyncio.Future[T]], object]) -> None:
    """Call `then` with the future: now if it is done, and not only at the loop's next turn."""
    if future.done():
        then(future)
    else:
        future.add_done_callback(then)
