"""How the event loop is answered, by a thread of ours or by itself."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from kvferry.errors import KvferryError

T = TypeVar("T")


def settle(future: asyncio.Future[T], result: T | None = None, *, error: KvferryError | None = None) -> None:
    """Settle `future`: at once on its own loop, soon from any thread; nothing if it is settled, or its loop closed."""
    loop = future.get_loop()
    if asyncio._get_running_loop() is loop:
        _settle(future, result, error)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[T], result: T | None, error: KvferryError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        future.exception()  # retrieved: its waiter may have been cancelled
    else:
        future.set_result(result)  # type: ignore[arg-type]
