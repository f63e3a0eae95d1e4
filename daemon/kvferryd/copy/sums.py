"""Checksums of what was moved, over host memory: equal on both sides whatever their layouts.

Source and destination cut the same moves into the same chunks, in which runs lie in one order. Each chunk is packed
into a buffer from either side's own memory, and its CRC-32 taken.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvferry.errors import Unavailable
from kvferryd.copy.batch import Batch
from kvferryd.copy.chunks import Chunk
from kvferryd.copy.host import copy

CHUNK_NBYTES = 1 << 20
"""The buffer stays in the cache."""
Pack = Callable[[Chunk, int], Iterable[Batch]]
"""What packs a chunk into a buffer at this address."""


def sums(chunks: Sequence[Chunk], pack: Pack) -> list[int]:
    """CRC-32 of each chunk. Bytes between its pieces are those of the chunk before, on either side."""
    buffer = np.zeros(CHUNK_NBYTES, np.uint8)
    found = []
    for chunk in chunks:
        copy(pack(chunk, buffer.ctypes.data))
        found.append(zlib.crc32(buffer[: chunk.nbytes].data))
    return found


class Sums:
    """One engine's: a thread of their own, which is there from the first on. Closed before the memory is."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sums")

    async def of(self, chunks: Callable[[], Sequence[Chunk]], pack: Pack) -> list[int]:
        """chunks: called on the thread too. Raises KvferryError."""
        try:
            summing = self._thread.submit(lambda: sums(chunks(), pack))
        except RuntimeError:  # of a thread that was shut down
            raise Unavailable("session_closed", "the engine is gone, and its memory with it") from None
        return await asyncio.wrap_future(summing)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
