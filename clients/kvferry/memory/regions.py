"""Regions: memory that an engine and its daemon share."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.descriptors import shortage
from kvferry.errors import KvferryError, Malformed
from kvferry.file import File
from kvferry.memory import cuda
from kvferry.memory.handover import map_sealed, sealed_file, unavailable
from kvferry.memory.vmm import POSIX_FD, Allocations, Hold, VmmMapping

if TYPE_CHECKING:
    import torch

POPULATE_WRITE = 23
"""Linux 5.14's MADV_POPULATE_WRITE, which Python does not name yet."""
POPULATE_NBYTES = 4 << 20
"""Populated at a time: in between other threads can map memory. 1 ms, or more than 10 where the machine has never used
the pages."""


@dataclass(slots=True, eq=False)
class SharedRegion:
    """A region of KV-cache memory mapped here: `nbytes` bytes from `address`.

    The process that maps it closes it. Arrays and tensors over it keep the mapping alive until they are gone.
    """

    id: int
    kind: str
    nbytes: int
    offset: int
    _map: mmap.mmap = field(repr=False)
    file: File
    """It can be handed to a daemon. No process can make it smaller."""

    @property
    def path(self) -> str:
        """The path at which a process of the same user and PID namespace can open it, while this region is open."""
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}"

    @property
    def address(self) -> int:
        """The address of byte 0 of the region in this process; ManifestBuilder.region asks for it."""
        return int(self.array().__array_interface__["data"][0])

    def array(self) -> npt.NDArray[np.uint8]:
        """The region as a writable array of bytes, shape (nbytes,)."""
        return np.frombuffer(self._map, dtype=np.uint8, count=self.nbytes, offset=self.offset % mmap.PAGESIZE)

    def tensor(self) -> torch.Tensor:
        """The region as a writable uint8 tensor, shape (nbytes,). Needs torch."""
        import torch

        return torch.from_numpy(self.array())  # torch.frombuffer would not keep the mapping from being closed

    def populate(self) -> None:
        """Map every page now, 0.3 s per GB, instead of at its first use: 1.3 us each, in the middle of a transfer.

        An older kernel leaves it at that. Called by ctypes, which lets go of the GIL: mmap's own madvise keeps it.
        """
        libc, whole = ctypes.CDLL(None), np.frombuffer(self._map, dtype=np.uint8)
        for start in range(0, len(whole), POPULATE_NBYTES):
            part = whole[start : start + POPULATE_NBYTES]
            libc.madvise(part.ctypes, ctypes.c_size_t(len(part)), POPULATE_WRITE)

    def close(self) -> None:
        """Unmap, as soon as no array or tensor uses the mapping any more. Idempotent."""
        self.file.close()
        with contextlib.suppress(BufferError):  # views are alive: the mapping goes with the last of them
            self._map.close()


def memfd_region(nbytes: int, region: int = 0) -> SharedRegion:
    """New zeroed host memory, to hand over with `EngineClient.adopt`. Raises KvferryError (`out_of_memory`)."""
    file = sealed_file("kvferry-region", nbytes)
    try:
        return open_region(file, nbytes, region)
    finally:
        os.close(file)


def open_file_region(path: str, nbytes: int, region: int = 0, offset: int = 0) -> SharedRegion:
    """Map the region that another process has as `SharedRegion.path`. Raises KvferryError (`region_unavailable`)."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # the latter: a null character
        raise unavailable(str(error), path) from None
    try:
        return open_region(file, nbytes, region, offset)
    finally:
        os.close(file)


def open_region(file: int, nbytes: int, region: int = 0, offset: int = 0) -> SharedRegion:
    """Map `nbytes` bytes at `offset` of a file that nobody can make smaller, readable and writable.

    The caller may close the descriptor: the region has its own. Raises KvferryError (`region_unavailable`,
    `out_of_descriptors`).
    """
    mapped = map_sealed(file, nbytes, offset)
    try:
        return SharedRegion(region, "host", nbytes, offset, mapped, *File.copies([file]))
    except OSError as error:
        raise shortage(error) or unavailable(str(error)) from None


@dataclass(slots=True, eq=False)
class CudaRegion:
    """A region of KV-cache memory on a GPU, mapped here over CUDA IPC or by descriptor: `nbytes` bytes from `address`.

    The process that maps it closes it. Tensors over it keep the mapping alive until they are gone.
    """

    id: int
    kind: str
    nbytes: int
    offset: int
    device: cuda.Device
    _mapping: cuda.Mapping | VmmMapping = field(repr=False)
    pools: list[object] = field(default_factory=list, repr=False)
    """torch's pools that allocate in here: see torch_pool."""
    file: File = field(default_factory=lambda: File(-1), repr=False)
    """It keeps the memory: the memory's own descriptor, or by which the daemon's keeper holds it. Closed where the
    memory goes with the daemon."""

    @property
    def outlives_daemon(self) -> bool:
        """Whether the next daemon can be given it: its descriptor is here, or its keeper is there."""
        if self.file.fileno() < 0 or isinstance(self._mapping, VmmMapping):
            return self.file.fileno() >= 0
        with socket.socket(fileno=os.dup(self.file.fileno())) as held:
            try:
                return bool(held.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                return True

    @property
    def exported(self) -> cuda.Exported | Allocations:
        """For another process to map: the handle, which opens it while its allocator lives, or the descriptor, which
        stays this region's."""
        if isinstance(self._mapping, VmmMapping):
            return Allocations((self.file.fileno(),), (self._mapping.nbytes,), self.offset)
        return cuda.Exported(self._mapping.handle, self.offset, self._mapping.nbytes, self.device.uuid)

    @property
    def address(self) -> int:
        """The address of byte 0 of the region in this process; ManifestBuilder.region asks for it."""
        return self._mapping.address + self.offset

    def tensor(self) -> torch.Tensor:
        """The region as a writable uint8 tensor, shape (nbytes,), on its GPU. Needs torch."""
        import torch

        return torch.as_tensor(_View(self), device=f"cuda:{self.device.index}")

    def hold(self) -> cuda.Mapping | Hold:
        """The mapping once more: it stays until what is returned is closed too."""
        return self._mapping.hold()

    def close(self) -> None:
        """Unmap, as soon as no tensor uses the mapping any more. Idempotent."""
        self.pools.clear()
        self._mapping.close()
        self.file.close()


class _View:
    """The interface by which torch uses memory that is not its own; torch keeps it as long as the tensor's storage."""

    def __init__(self, region: CudaRegion) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }
        weakref.finalize(self, region.hold().close).atexit = False


def open_cuda_region(
    handle: bytes, offset: int, nbytes: int, allocation_nbytes: int, device_uuid: str, region: int = 0
) -> CudaRegion:
    """Map `nbytes` bytes at `offset` of another process's allocation, given by its raw CUDA IPC handle.

    Raises KvferryError: `cuda_missing`, `unknown_gpu`, `region_out_of_bounds`, `cuda_ipc_failed`.
    """
    device = cuda.device(device_uuid)
    check_inside(offset, nbytes, allocation_nbytes, "was said to have")
    mapping = device.open(handle)
    try:
        check_inside(offset, nbytes, mapping.nbytes, "has")
    except KvferryError:
        mapping.close()
        raise
    return CudaRegion(region, "cuda", nbytes, offset, device, mapping)


def open_descriptor_region(
    file: File, offset: int, nbytes: int, allocation_nbytes: int, device_uuid: str, region: int = 0
) -> CudaRegion:
    """The same of an allocation that is given by its descriptor, which is the region's from now on.

    Raises KvferryError: `cuda_missing`, `unknown_gpu`, `region_out_of_bounds`, `cuda_failed`.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(file)
        device = cuda.device(device_uuid)
        check_inside(offset, nbytes, allocation_nbytes, "was said to have")
        mapping = VmmMapping(device, [file.fileno()], [allocation_nbytes])
        undo.pop_all()
        return CudaRegion(region, "cuda", nbytes, offset, device, mapping, file=file)


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """GPU memory that this process allocated, to hand over with `EngineClient.adopt`. Keep it allocated."""

    id: int
    nbytes: int
    address: int
    exported: cuda.Exported = field(repr=False)
    kind: str = "cuda"


@dataclass(frozen=True, slots=True)
class VmmMemory:
    """The same for VMM-backed memory (cuMemCreate, torch's expandable_segments): `EngineClient.adopt` hands over a file
    descriptor for each of its allocations. As a source it is slow to read directly; peers map it where their daemons
    share a folder (`node_dir`)."""

    id: int
    nbytes: int
    address: int
    device: cuda.Device
    kind: str = "cuda"


def cuda_memory(
    memory: int | torch.Tensor, nbytes: int = 0, *, region: int = 0, device: int = 0
) -> CudaMemory | VmmMemory:
    """Describe a contiguous CUDA tensor, or `nbytes` bytes from an address on this process's GPU number `device`.

    Raises KvferryError: `not_contiguous`, `not_exportable` (VMM memory not made to be shared by file descriptor),
    `region_out_of_bounds`, `cuda_missing`, ...
    """
    if isinstance(memory, int):
        address = memory
    else:
        if not memory.is_cuda or not memory.is_contiguous():
            message = f"a region is one contiguous piece of GPU memory, the tensor is on {memory.device}"
            remedy = "hand over the tensor that was allocated, not a view, or its address and nbytes"
            raise Malformed("not_contiguous", message, field="memory", value=tuple(memory.shape), remedy=remedy)
        address, nbytes, device = memory.data_ptr(), memory.nbytes, memory.device.index
    gpu = cuda.devices()[device]
    found = gpu.attributes(address)
    if not found.legacy_ipc:
        if found.handle_types & POSIX_FD:
            return VmmMemory(region, nbytes, address, gpu)
        message = "the memory is VMM-backed and was not made to be shared as a file descriptor"
        remedy = "make it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or in the daemon's memory (torch_pool)"
        raise Malformed("not_exportable", message, field="handle_types", value=found.handle_types, remedy=remedy)
    exported = gpu.export(address)
    check_inside(exported.offset, nbytes, exported.allocation_nbytes, "has")
    return CudaMemory(region, nbytes, address, exported)


def check_inside(offset: int, nbytes: int, allocation_nbytes: int, said: str) -> None:
    if offset < 0 or nbytes <= 0 or offset + nbytes > allocation_nbytes:
        end, value = offset + nbytes, f"{offset}, {nbytes}"
        message = f"bytes [{offset}, {end}) are not inside an allocation that {said} {allocation_nbytes} bytes"
        remedy = "count offset from the allocation's base (kvferry.memory.cuda.Device.export does)"
        raise Malformed("region_out_of_bounds", message, field="offset, nbytes", value=value, remedy=remedy)
