"""How a thread of ours answers the event loop, and how the loop answers itself."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from kvferry.errors import KvferryError

T = TypeVar("T")


def settle(future: asyncio.Future[T], result: T | None = None, *, error: KvferryError | None = None) -> None:
    """Settle `future` on its own loop, from any thread; nothing if it is settled, or its loop closed, already."""
    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: settle_now(future, result, error=error))


def settle_now(future: asyncio.Future[T], result: T | None = None, *, error: KvferryError | None = None) -> None:
    """The same, at once; for who runs on its loop."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        future.exception()  # retrieved: its waiter may have been cancelled
    else:
        future.set_result(result)  # type: ignore[arg-type]
