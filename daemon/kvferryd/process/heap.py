"""This process's memory. glibc keeps what was freed while there is work, and gives it back when there is none."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 32 << 20
"""glibc's own upper bound for the mmap threshold."""
IDLE_S = 10.0


def keep() -> None:
    """Let glibc keep what numpy frees, up to KEEP_BYTES, instead of handing it back and faulting it in again.

    A request's runs are arrays of hundreds of KiB that live for a millisecond: with glibc's defaults most of the time
    that `bind` takes for 16,384 blocks is page faults.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


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
