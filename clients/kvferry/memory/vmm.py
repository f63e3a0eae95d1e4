"""VMM-backed GPU memory (cuMemCreate, torch's expandable_segments) between processes.

It has no IPC handle. Each allocation it is mapped from is shared as a file descriptor, if it was made to be, and the
other process maps them one behind the other. It needs no namespace in common with the maker, and the memory stays as
long as any process has the descriptor open or the memory mapped, whatever has become of its maker.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import byref, c_int, c_uint64
from dataclasses import dataclass

from kvferry.errors import Malformed, Unavailable
from kvferry.file import File
from kvferry.memory.cuda import GRANULE, Device
from kvferry.memory.cuda_driver import Access, Location, Properties, call
from kvferry.memory.handover import MAX_FILES, too_many_files

POSIX_FD = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, also a bit of the pointer attribute that lists the allowed types."""
_MAPPING_NBYTES, _MAPPING_BASE = 18, 19
_RDMA_SUPPORTED = 110
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_MOST_NBYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class Allocations:
    """`files`: a descriptor of each, in the order of their addresses; `nbytes` of each.

    The exported memory lies `offset` bytes into the first. `close` it; the memory stays.
    """

    files: tuple[int, ...]
    nbytes: tuple[int, ...]
    offset: int

    def close(self) -> None:
        for file in self.files:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The same as another process has sent them. The descriptors are closed with the last reference."""

    files: tuple[File, ...]
    nbytes: tuple[int, ...]
    offset: int

    @property
    def allocation_nbytes(self) -> int:
        return sum(self.nbytes)

    def opened(self, device: Device) -> VmmMapping:
        """Mapped for this GPU. Raises KvferryError."""
        return VmmMapping(device, [file.fileno() for file in self.files], self.nbytes)


def create(device: Device, nbytes: int) -> File:
    """New memory of the device, not cleared, as the descriptor that keeps it. nbytes: whole granules. Raises
    KvferryError (`out_of_memory`)."""
    wanted = Properties(type=_PINNED, handle_types=POSIX_FD, location=Location(_ON_DEVICE, device.index))
    handle, rdma = c_uint64(), c_int()
    with device:
        call("cuDeviceGetAttribute", byref(rdma), _RDMA_SUPPORTED, device.index)
        wanted.rdma = rdma.value  # else no NIC can be given it
        call("cuMemCreate", byref(handle), nbytes, byref(wanted), 0)
        return File(_released(handle))


def export(device: Device, address: int, nbytes: int) -> Allocations:
    """The allocations behind a range of VMM-backed memory. Raises KvferryError: `too_many_files`, `cuda_failed`."""
    files, sizes, first, at = list[int](), list[int](), 0, address
    try:
        with device:
            while at < address + nbytes:
                base, size = _attribute(_MAPPING_BASE, at), _attribute(_MAPPING_NBYTES, at)
                first = first or base
                if len(files) == MAX_FILES:
                    raise too_many_files(-(-nbytes // size))
                files.append(_export(base))
                sizes.append(size)
                at = base + size
    except BaseException:
        Allocations(tuple(files), (), 0).close()
        raise
    return Allocations(tuple(files), tuple(sizes), address - first)


def _attribute(attribute: int, address: int) -> int:
    value = c_uint64()
    call("cuPointerGetAttribute", byref(value), attribute, address)
    return value.value


def _export(address: int) -> int:
    handle = c_uint64()
    call("cuMemRetainAllocationHandle", byref(handle), address)
    return _released(handle)


def _released(handle: c_uint64) -> int:
    """A descriptor of an allocation; the handle is given back."""
    file = c_int(-1)
    try:
        call("cuMemExportToShareableHandle", byref(file), handle, POSIX_FD, 0)
    finally:
        call("cuMemRelease", handle)
    return file.value


class VmmMapping:
    """Another process's allocations, mapped here one behind the other from `address` on, `nbytes` in all. They stay
    mapped until it and all that `hold` has returned are closed."""

    def __init__(self, device: Device, files: Sequence[int], sizes: Sequence[int]) -> None:
        """The caller may close the files then. Raises KvferryError: `region_out_of_bounds`, `cuda_failed`."""
        whole = all(0 < size <= _MOST_NBYTES and size % GRANULE == 0 for size in sizes)
        if len(files) != len(sizes) or not sizes or not whole:
            message = f"{len(files)} files and {len(sizes)} sizes came; a size is a whole number of {GRANULE} bytes"
            remedy = "hand over one file for each allocation, with its size (kvferry.memory.vmm.export)"
            raise Malformed("region_out_of_bounds", message, field="vmm.nbytes", value=list(sizes), remedy=remedy)
        self.device, self.nbytes = device, sum(sizes)
        self._lock, self._users = threading.RLock(), 1
        self._mapped = list[tuple[int, int]]()
        with device:
            address = c_uint64()
            call("cuMemAddressReserve", byref(address), self.nbytes, 0, 0, 0)
            self.address = address.value
            self._open = True
            try:
                at = self.address
                for file, size in zip(files, sizes, strict=True):
                    self._map(file, at, size)
                    at += size
                access = Access(Location(_ON_DEVICE, device.index), _READ_WRITE)
                call("cuMemSetAccess", self.address, self.nbytes, byref(access), 1)
            except BaseException:
                self.close()
                raise

    def _map(self, file: int, address: int, nbytes: int) -> None:
        handle = c_uint64()
        call("cuMemImportFromShareableHandle", byref(handle), ctypes.c_void_p(file), POSIX_FD)
        try:
            call("cuMemMap", address, nbytes, 0, handle, 0)  # refuses more bytes than the allocation has
        finally:
            call("cuMemRelease", handle)
        self._mapped.append((address, nbytes))

    def hold(self) -> Hold:
        """Raises KvferryError (`region_closed`) when nothing keeps it mapped any more."""
        with self._lock:
            if not self._users:
                why, remedy = "the memory is not mapped here any more", "allocate or adopt it anew"
                raise Unavailable("region_closed", why, field="region", value=hex(self.address), remedy=remedy)
            self._users += 1
        return Hold(self)

    def close(self) -> None:
        """Idempotent. It waits for work on the GPU that may still use the memory."""
        with self._lock:
            self._open, was = False, self._open
            if was:
                self.let_go()

    def let_go(self) -> None:
        """The opener, and each that holds it, calls it once."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._unmap()

    def _unmap(self) -> None:
        with self.device:
            call("cuCtxSynchronize")  # cuMemUnmap waits for nothing: queued work would find its addresses gone
            for address, nbytes in self._mapped:
                call("cuMemUnmap", address, nbytes)
            call("cuMemAddressFree", self.address, self.nbytes)


class Hold:
    """Keeps a mapping until it is closed."""

    def __init__(self, mapping: VmmMapping) -> None:
        self._mapping: VmmMapping | None = mapping

    def close(self) -> None:
        """Idempotent."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.let_go()
