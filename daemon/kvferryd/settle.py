"""Answers to the event loop, from a thread of ours or from the loop itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


def submit(
    hand_over: Callable[[Callable[[], None]], None], work: Callable[[], T], typed: Callable[[Exception], KvferryError]
) -> asyncio.Future[T]:
    """Hand `work` over to a thread. The future gets its result, or its error, which `typed` makes a KvferryError."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  NIXL's, Triton's and torch's are of many kinds
            settle(future, error=typed(error))
        else:
            settle(future, result)

    hand_over(run)
    return future


def _settle(future: asyncio.Future[T], result: T | None, error: KvferryError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        future.exception()  # retrieved: its waiter may have been cancelled
    else:
        future.set_result(result)  # type: ignore[arg-type]
