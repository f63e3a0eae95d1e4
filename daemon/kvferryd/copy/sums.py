"""Checksums of moved bytes: equal on both sides, in any layouts and kinds of memory.

Source and destination cut the same moves into the same chunks, in which every run has one place. A chunk's sum is that
of its 32-bit words, each times the key of its place, modulo 2**64. It needs no order, and no width of access: half a
word times the key of the whole is a part of the sum. A key is odd, so one changed word is always noticed; keys differ,
so words that have changed places are too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import Unavailable
from kvferry.memory import cuda
from kvferryd.aio import Worker, submit
from kvferryd.copy.batch import Batch
from kvferryd.copy.chunks import Chunk
from kvferryd.copy.copying import CLOSE_S, typed
from kvferryd.copy.cuda import Copier, load
from kvferryd.copy.host import copy

SLICE_NBYTES = 1 << 20
"""A host's chunk, and what it sums at once: keys and buffer stay in the cache."""
MOST_NBYTES = 16 << 20
"""A GPU's chunk, and the most that a reader may ask for. With chunks of 1 MiB the host works 63 ms for 671 MB, before a
GPU that needs a few is told; with these 2."""
WORD_NBYTES = 4
AT_ONCE = 1024
"""Chunks that a GPU sums in one launch."""
Pack = Callable[[Chunk, int], Iterable[Batch]]
"""Packs a chunk into a buffer at this address."""


@functools.lru_cache(maxsize=MOST_NBYTES // SLICE_NBYTES)
def keys(first: int) -> npt.NDArray[np.uint64]:
    """Keys of the words of a slice, from the `first` on: SplitMix64, made odd. `kernel.py` computes the same."""
    places = np.arange(first + 1, first + 1 + SLICE_NBYTES // WORD_NBYTES, dtype=np.uint64)
    mixed = places * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: npt.NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return found


class HostSums:
    """Packs each chunk into a buffer."""

    def __init__(self) -> None:
        self._buffer = np.zeros(MOST_NBYTES, np.uint8)  # memory that no chunk reaches is never taken
        self._products = np.empty(SLICE_NBYTES // WORD_NBYTES, np.uint64)

    def __call__(self, chunks: Sequence[Chunk], pack: Pack) -> list[int]:
        found = []
        for chunk in chunks:
            words = self._buffer.view("<u4")[: -(-chunk.nbytes // WORD_NBYTES)]
            words.fill(0)  # between pieces there are no runs
            copy(pack(chunk, self._buffer.ctypes.data))
            found.append(
                sum(self._of_slice(words, first) for first in range(0, len(words), len(self._products))) % 2**64
            )
        return found

    def _of_slice(self, words: npt.NDArray[np.uint32], first: int) -> int:
        some = words[first : first + len(self._products)]
        return int(np.multiply(some, keys(first)[: len(some)], out=self._products[: len(some)]).sum())

    def close(self) -> None:
        """Nothing of its own."""


class GpuSums:
    """Sums runs where they lie. For one thread."""

    def __init__(self, device: cuda.Device, programs: int) -> None:
        """programs: SMs that it may take. Raises KvferryError (`triton_missing`)."""
        load()  # all that may be missing, before there is something to be freed
        self._device, self._programs, self._stream = device, programs, device.stream()
        self._sums = device.alloc(8 * AT_ONCE)
        self._copier = Copier(device, self._sums)

    def __call__(self, chunks: Sequence[Chunk], pack: Pack) -> list[int]:
        found = np.empty(len(chunks), np.uint64)
        for first in range(0, len(chunks), AT_ONCE):
            some = chunks[first : first + AT_ONCE]
            batches = [batch for number, chunk in enumerate(some) for batch in pack(chunk, number << 32)]
            self._copier.prepare(batches)
            self._stream.fill(self._sums, 8 * len(some))
            self._copier.copy(batches, self._stream, self._programs)
            self._stream.copy(found[first:].ctypes.data, self._sums, 8 * len(some))
            self._stream.synchronize()
        return found.tolist()

    def close(self) -> None:
        self._copier.close()
        self._stream.close()
        self._device.free(self._sums)


class Sums:
    """An engine's checksums, on a thread of their own, which starts with the first. Closed before the memory is."""

    def __init__(self, device: cuda.Device | None = None, programs: int = 0) -> None:
        """device: where the memory is; of its SMs `programs` may be taken."""
        self.chunk_nbytes = SLICE_NBYTES if device is None else MOST_NBYTES
        self._make: Callable[[], HostSums | GpuSums] = (
            HostSums if device is None else functools.partial(GpuSums, device, programs)
        )
        self._made: HostSums | GpuSums | None = None
        self._closed = False
        self._worker = Worker("sums", end=self._unmake)

    async def of(self, chunks: Callable[[], Sequence[Chunk]], pack: Pack) -> list[int]:
        """The sum of each chunk. chunks: called on the thread too, unless the caller has gone by then. Raises
        KvferryError."""
        self._check_open()
        gone = threading.Event()
        try:
            return await submit(self._worker.put, lambda: [] if gone.is_set() else self._of(chunks, pack), typed)
        finally:
            gone.set()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("session_closed", "the engine is gone, and its memory with it")

    def _of(self, chunks: Callable[[], Sequence[Chunk]], pack: Pack) -> list[int]:
        self._check_open()
        self._made = self._made or self._make()
        return self._made(chunks(), pack)

    async def close(self) -> bool:
        """Whether nothing of it is left, also while somebody still holds this: of what takes longer than CLOSE_S the
        memory is still read."""
        self._closed = True
        return await self._worker.close(CLOSE_S)

    def _unmake(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()
