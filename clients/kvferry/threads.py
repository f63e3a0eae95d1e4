"""Work that may block for long, or for ever: a driver waits for its GPU."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def made(name: str, make: Callable[[], T], timeout_s: float, end: Callable[[T], object] = lambda _: None) -> T:
    """The result of `make`, by a thread of its own that holds up neither the loop nor the end of the process.

    A thread calls `end` with the result where the caller is cancelled, its time is up (TimeoutError) or its loop ends
    first. RuntimeError: the interpreter exits, and begins no thread any more.
    """
    loop = asyncio.get_running_loop()
    there: asyncio.Future[T] = loop.create_future()

    def begin(work: Callable[[], object]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def give(result: T) -> None:
        if there.done():
            begin(lambda: end(result))
        else:
            there.set_result(result)

    def fail(error: BaseException) -> None:
        if not there.done():
            there.set_exception(error)

    def run() -> None:
        try:
            result = make()
        except BaseException as error:  # noqa: BLE001  raised where it is awaited
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(fail, error)
            return
        try:
            loop.call_soon_threadsafe(give, result)
        except RuntimeError:  # the loop has ended
            end(result)

    begin(run)
    async with asyncio.timeout(timeout_s):
        try:
            return await there
        except asyncio.CancelledError:
            if there.done() and not there.cancelled() and there.exception() is None:
                begin(lambda: end(there.result()))
            raise
