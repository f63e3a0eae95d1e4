"""The copy on host memory: numpy, for host regions and for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferryd.copy.batch import PAGE_NBYTES, Batch, Side
from kvferryd.plan.axes import Ints

LONG = 64 << 10
"""From this length on, one memmove a run beats numpy's indexing, which goes through a copy."""
STEP = 4 << 20
"""Bytes moved through that copy at once: it stays in the cache."""
_ZEROS = np.zeros(PAGE_NBYTES, dtype=np.uint8)
ZEROS: int = _ZEROS.ctypes.data
"""The address of the page of zeros."""


def copy(batches: Iterable[Batch]) -> None:
    """Run the batches. The addresses must be this process's, and every run inside mapped memory."""
    for batch in batches:
        if len(batch) == 0:
            continue
        source, destination = (starts(side, batch.rows) for side in (batch.source, batch.destination))
        if batch.nbytes >= LONG:
            for begin, end in zip(source.tolist(), destination.tolist(), strict=True):
                ctypes.memmove(end, begin, batch.nbytes)
            continue
        word, step = batch.word, max(1, STEP // batch.nbytes)
        from_at, to_at = _runs(source, batch.nbytes, word), _runs(destination, batch.nbytes, word)
        from_index, to_index = (source - source.min()) // word, (destination - destination.min()) // word
        for first in range(0, len(source), step):
            part = slice(first, first + step)
            to_at[to_index[part]] = from_at[from_index[part]]


def starts(side: Side, rows: int) -> Ints:
    """The address of every run, rows of one segment together."""
    found: Ints = (side.segments[:, None] + side.table.offsets[side.first_row : side.first_row + rows]).ravel()
    return found


def _runs(starts: Ints, nbytes: int, word: int) -> npt.NDArray[Any]:
    """The memory as overlapping items of `nbytes` bytes, one beginning at every word."""
    begin = int(starts.min())
    extent = int(starts.max()) - begin + nbytes
    memory = memoryview((ctypes.c_ubyte * extent).from_address(begin)).cast("B")
    items = (extent - nbytes) // word + 1
    return np.ndarray((items,), dtype=np.dtype(("V", nbytes)), buffer=memory, strides=(word,))
