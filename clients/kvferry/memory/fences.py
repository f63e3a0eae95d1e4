"""Points in an engine's CUDA streams that its daemon can wait for, while no thread of the engine waits.

A page of words in host memory is shared with the daemon. A fence is one word and a value: the stream writes the value
when all its earlier work is done, and only then can readers see what was published `after` the fence.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.errors import Full, KvferryError, Unavailable
from kvferry.file import File
from kvferry.memory import cuda
from kvferry.memory.handover import sealed_file

if TYPE_CHECKING:
    import torch

NBYTES = mmap.PAGESIZE
WORDS = NBYTES // 8


@dataclass(frozen=True, slots=True)
class Fence:
    """Reached when `word` of the page holds `value` or more: an older value of a word has always arrived before."""

    word: int
    value: int


class Fences:
    """The page of one engine. `close` it when nothing more is enqueued. Any thread may call."""

    def __init__(self) -> None:
        self.file = File(sealed_file("kvferry-fences", NBYTES))
        """To be handed to the daemon, which maps it; closed by `handed`."""
        self._map = mmap.mmap(self.file.fileno(), NBYTES)
        self.words: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64)
        self._given = np.zeros(WORDS, dtype=np.uint64)
        self._next = self._value = 0
        self._lock = threading.Lock()
        self._registered: cuda.Registered | None = None
        self._closed = False

    def handed(self) -> None:
        """The daemon has it. Idempotent."""
        self.file.close()

    def after(self, stream: int | torch.cuda.Stream, device: int = 0) -> Fence:
        """A fence that is reached when all that the stream was given until now is done and visible to everybody.

        Takes microseconds and waits for nothing, once the page is registered. stream: torch's, or a cudaStream_t of
        this process's GPU number `device`, on which nothing is being captured. Raises KvferryError: `stream_capturing`,
        `too_many_fences`, `cuda_missing`, `cuda_failed`.
        """
        if isinstance(stream, int):
            gpu, handle = cuda.device(f"cuda:{device}"), stream
        else:
            gpu, handle = cuda.device(f"cuda:{stream.device.index}"), stream.cuda_stream
        registered = self.register(gpu)
        with self._lock:
            fence = self._take()
            try:
                gpu.write_word(handle, registered.address + 8 * fence.word, fence.value)
            except BaseException:
                self._given[fence.word] = self.words[fence.word]
                raise
        return fence

    def register(self, gpu: cuda.Device) -> cuda.Registered:
        """Let every GPU write to the page; `gpu` is one that this process uses anyhow. It may wait for work under way.

        Idempotent. Raises KvferryError: `cuda_failed`, or `session_closed` for a page that is closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("session_closed", "the session is closed", remedy="connect again")
            if self._registered is None:
                self._registered = gpu.register(int(self.words.ctypes.data), NBYTES)
            return self._registered

    def take(self) -> Fence:
        """A fence that the caller will reach with `reach`, for an engine whose writers are not streams."""
        with self._lock:
            return self._take()

    def reach(self, fence: Fence) -> None:
        """The writes that the fence stands for are done and visible to other processes."""
        self.words[fence.word] = fence.value

    def _take(self) -> Fence:
        for _ in range(WORDS):
            self._next = (self._next + 1) % WORDS
            if self.words[self._next] == self._given[self._next]:
                self._value += 1
                self._given[self._next] = self._value
                return Fence(self._next, self._value)
        remedy = "synchronise a stream before the next: none of them gets its work done"
        raise Full("too_many_fences", f"{WORDS} fences are not reached yet", field="stream", remedy=remedy)

    @property
    def pending(self) -> Sequence[int]:
        """The words whose values have not arrived."""
        return [int(word) for word in np.flatnonzero(self.words != self._given)]

    def close(self) -> None:
        """Idempotent. While a stream has a word still to write, the page stays for the life of the process."""
        self.handed()
        with self._lock:
            self._closed = True
            if self.pending:
                _kept.append(self)
            elif self._registered is not None:
                with contextlib.suppress(KvferryError):  # a broken context: the process keeps what it holds
                    self._registered.close()
                self._registered = None


_kept: list[Fences] = []
