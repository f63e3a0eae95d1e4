"""What glibc does with memory that was freed: it keeps it while there is work, and gives it back when there is none."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 32 << 20
"""glibc's own upper bound for the mmap threshold."""
IDLE_S = 10.0


def keep() -> None:
    """Let glibc keep what numpy frees, up to KEEP_BYTES, instead of handing it back and faulting it in again.

    A request's runs are arrays of hundreds of KiB that live for a millisecond: with glibc's defaults most of the time
    that `bind` takes for 16,384 blocks is page faults (docs/decisions.md).
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


async def give_back(done: Callable[[], object]) -> None:
    """Hand back what was kept whenever no work has ended for IDLE_S. Runs until it is cancelled.

    done: something that changes with every piece of work that ends.
    """
    before = given = done()
    while True:
        await asyncio.sleep(IDLE_S)
        now = done()
        if now == before != given:
            with contextlib.suppress(OSError, AttributeError):  # another libc
                await asyncio.to_thread(ctypes.CDLL(None).malloc_trim, 0)
            given = now
        before = now
