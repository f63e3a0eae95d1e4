"""Make torch allocate inside a region, so that an unmodified engine places its cache in the daemon's memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvferry.errors import Full
from kvferry.memory.cuda import Mapping

if TYPE_CHECKING:
    import torch

    from kvferry.memory.regions import CudaRegion
    from kvferry.memory.vmm import Hold

SMALL, LARGE, SEGMENT = 1 << 20, 10 << 20, 2 << 20
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


def segment_nbytes(nbytes: int) -> int:
    """The bytes that torch asks its allocator for to place one tensor of `nbytes` in a fresh pool: 2 MiB up to 1 MiB
    (shared with other small tensors), 20 MiB below 10 MiB (shared likewise), else `nbytes` rounded up to 2 MiB."""
    if nbytes <= SMALL:
        return SEGMENT
    return 2 * LARGE if nbytes < LARGE else -(-nbytes // SEGMENT) * SEGMENT


class _Bump:
    """Hands out a region from its start. The piece that is given back last can be had again; the rest when all is
    back."""

    def __init__(self, region: CudaRegion) -> None:
        self._start, self._nbytes, self._device = region.address, region.nbytes, region.device.index
        self._mapping: Mapping | Hold | None = region.hold()
        self._lock = threading.Lock()
        self._used = self._live = 0
        self._ended = False
        self.refused = ""

    def allocate(self, nbytes: int, device: int, stream: int) -> int | None:
        nbytes = -(-nbytes // SEGMENT) * SEGMENT
        with self._lock:
            if device != self._device:
                self.refused = f"the region is on cuda:{self._device}, torch allocates on cuda:{device}"
                return None
            if self._used + nbytes > self._nbytes:
                self.refused = f"torch asks for a segment of {nbytes} bytes and {self._used} of {self._nbytes} are used"
                return None
            address = self._start + self._used
            self._used += nbytes
            self._live += nbytes
            return address

    def free(self, address: int, nbytes: int, device: int, stream: int) -> None:
        nbytes = -(-nbytes // SEGMENT) * SEGMENT
        with self._lock:
            self._live -= nbytes
            if address + nbytes == self._start + self._used:
                self._used -= nbytes
            if self._live == 0:
                self._used = 0
                self._release()

    def end(self) -> None:
        """No pool asks any more: the mapping goes with the last segment."""
        with self._lock:
            self._ended = True
            self._release()

    def _release(self) -> None:
        if self._ended and self._live == 0 and self._mapping is not None:
            self._mapping.close()
            self._mapping = None


_kept: list[Any] = []
"""torch calls the callbacks for as long as it lives: they and their allocators are never given up."""


@contextlib.contextmanager
def torch_pool(region: CudaRegion) -> Iterator[torch.cuda.MemPool]:
    """Inside, what torch allocates on the region's GPU in this thread lies in `region`; yields the pool.

    Tensors stay valid afterwards, until they are freed, and the region keeps the pool. To allocate more later, use the
    same pool with torch.cuda.use_mem_pool: another torch_pool begins at the region's start again. torch rounds what
    it asks for: see `segment_nbytes`. Raises KvferryError (`region_full`) when the region has no room for a segment.
    """
    import torch

    bump = _Bump(region)
    allocate, free = _ALLOCATE(bump.allocate), _FREE(bump.free)
    # As torch.cuda.CUDAPluggableAllocator does, without a shared library in between.
    allocator = torch._C._cuda_customAllocator(
        ctypes.cast(allocate, ctypes.c_void_p).value or 0, ctypes.cast(free, ctypes.c_void_p).value or 0
    )
    _kept.append((allocate, free, allocator))
    pool = torch.cuda.MemPool(allocator)
    region.pools.append(pool)
    weakref.finalize(pool, bump.end).atexit = False
    try:
        with torch.cuda.use_mem_pool(pool, device=region.device.index):
            yield pool
    except torch.OutOfMemoryError as error:
        if not bump.refused:
            raise
        message = f"the region has no room: {bump.refused}"
        remedy = "allocate the sum of kvferry.memory.pools.segment_nbytes over the tensors it is to hold"
        raise Full("region_full", message, field="nbytes", value=region.nbytes, remedy=remedy) from error
