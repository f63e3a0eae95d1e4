"""The CUDA driver through ctypes: devices, memory that processes share, streams and events. Nothing else of CUDA.

Imports everywhere; the first call says what is missing where there is no driver or no GPU (`cuda_missing`). A `Device`
is a context manager that makes its primary context (the one torch uses) current in the calling thread and puts back
what was there; everything below does so for itself. Addresses are plain integers, sizes are bytes.
"""

from __future__ import annotations

import functools
import threading
import uuid
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

from kvferry.errors import Conflict, KvferryError, Malformed
from kvferry.memory.cuda_driver import HANDLE_NBYTES, IpcHandle, Uuid, call, missing

GRANULE = 2 << 20
"""Smaller allocations share one of these, and an IPC handle exports all of it."""
_LAZY_PEER_ACCESS, _NON_BLOCKING, _NO_TIMING, _PORTABLE, _DEVICE_MAP = 1, 1, 2, 1, 2
_MEMORY_TYPE, _DEVICE_ORDINAL, _LEGACY_IPC, _HANDLE_TYPES, _ON_DEVICE = 2, 9, 10, 14, 2


@dataclass(frozen=True, slots=True)
class Attributes:
    """The driver's knowledge of an address. `legacy_ipc`: exportable as a raw handle; VMM memory is not.

    handle_types: kinds of shareable handle that VMM memory was made with (1: POSIX fd, 8: fabric); 0 for others.
    """

    on_device: bool
    device: int
    legacy_ipc: bool
    handle_types: int
    base: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Exported:
    """A raw IPC handle: it maps the whole allocation of `allocation_nbytes`; the address is `offset` into it."""

    handle: bytes
    offset: int
    allocation_nbytes: int
    device_uuid: str

    def opened(self, device: Device) -> Mapping:
        """Mapped for this GPU. Raises KvferryError."""
        return device.open(self.handle)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. `index` counts what this process sees (CUDA_VISIBLE_DEVICES); `uuid` names it for everybody."""

    index: int
    uuid: str

    def bind(self) -> None:
        """Make the context current in this thread for good: what it does with this GPU then needs no switching."""
        if _thread.bound != self.index:
            call("cuCtxPushCurrent_v2", _primary(self.index))
            _thread.bound = self.index

    def __enter__(self) -> Device:
        if _thread.bound != self.index:
            call("cuCtxPushCurrent_v2", _primary(self.index))
        return self

    def __exit__(self, *exception: object) -> None:
        if _thread.bound != self.index:
            call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _ask(self, kind: type[c_uint64] | type[c_void_p], function: str, *arguments: object) -> int:
        """The value that a function of the driver writes where its first argument points."""
        answer = kind()
        with self:
            call(function, byref(answer), *arguments)
        return answer.value or 0

    def alloc(self, nbytes: int) -> int:
        """The address of new memory, not cleared. Raises KvferryError (`out_of_memory`). End it with `free`."""
        return self._ask(c_uint64, "cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        """Waits until nothing on the GPU can use it any more."""
        with self:
            call("cuMemFree_v2", address)

    def memory(self) -> tuple[int, int]:
        """Bytes free, bytes in all."""
        free, total = c_size_t(), c_size_t()
        with self:
            call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocation(self, address: int) -> tuple[int, int]:
        """(first address, bytes) of the allocation or mapping around an address."""
        base, nbytes = c_uint64(), c_size_t()
        with self:
            call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
        return base.value, nbytes.value

    def attributes(self, address: int) -> Attributes:
        """Raises KvferryError for an address that is not CUDA's."""
        asked = (_MEMORY_TYPE, _DEVICE_ORDINAL, _LEGACY_IPC, _HANDLE_TYPES)
        kind, ordinal, legacy, handles = (self._ask(c_uint64, "cuPointerGetAttribute", each, address) for each in asked)
        return Attributes(kind == _ON_DEVICE, ordinal, bool(legacy), handles, *self.allocation(address))

    def export(self, address: int) -> Exported:
        """The handle by which another process can open the memory around an address. Raises KvferryError."""
        found = self.attributes(address)
        if not found.legacy_ipc:
            message = "VMM-backed memory (cuMemCreate, expandable_segments, a sleep-mode pool) has no IPC handle"
            remedy = "describe it with kvferry.memory.cuda_memory, or allocate through the daemon (torch_pool)"
            raise Malformed("not_exportable", message, field="address", value=hex(address), remedy=remedy)
        handle = IpcHandle()
        with self:
            call("cuIpcGetMemHandle", byref(handle), found.base)
        return Exported(bytes(handle.bytes), address - found.base, found.nbytes, self.uuid)

    def open(self, handle: bytes) -> Mapping:
        """Map another process's allocation for this GPU, be it of this or of a peer GPU. Raises KvferryError."""
        if len(handle) != HANDLE_NBYTES:
            raise Malformed(
                "malformed_handle",
                f"a CUDA IPC handle has {HANDLE_NBYTES} bytes, not {len(handle)}",
                remedy="hand over the raw bytes of cudaIpcMemHandle_t",
            )
        with _mappings_lock:
            known = _mappings.get((self.index, handle))
            if known is None:
                raw = IpcHandle.from_buffer_copy(handle)
                address = self._ask(c_uint64, "cuIpcOpenMemHandle_v2", raw, _LAZY_PEER_ACCESS)
                known = _mappings[self.index, handle] = [address, 0]
            known[1] += 1
            return Mapping(self, handle, known[0])

    def stream(self, priority: int = 0) -> Stream:
        """A stream that does not wait for the legacy default stream. Lower numbers go first."""
        return Stream(self, self._ask(c_void_p, "cuStreamCreateWithPriority", _NON_BLOCKING, priority))

    def event(self, *, timing: bool = False) -> Event:
        return Event(self, self._ask(c_void_p, "cuEventCreate", 0 if timing else _NO_TIMING))

    def pinned(self, nbytes: int) -> Pinned:
        """Page-locked host memory, from which copies to the GPU really are asynchronous."""
        return Pinned(self, self._ask(c_void_p, "cuMemHostAlloc", nbytes, _PORTABLE), nbytes)

    def register(self, address: int, nbytes: int) -> Registered:
        """Let every GPU use whole pages of host memory that this process has already."""
        with self:
            call("cuMemHostRegister_v2", address, nbytes, _PORTABLE | _DEVICE_MAP)
            try:
                return Registered(self, address, self._ask(c_uint64, "cuMemHostGetDevicePointer_v2", address, 0))
            except KvferryError:
                call("cuMemHostUnregister", address)
                raise

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Let a cudaStream_t write 8 bytes when all it was given before is done, and visible to every GPU and process.

        Raises KvferryError (`stream_capturing`): a graph would write the same value every time that it is replayed.
        """
        capturing = c_int()
        with self:
            call("cuStreamIsCapturing", stream, byref(capturing))
            if capturing.value:
                message = "the stream's work is being captured into a graph, and a fence is for one time only"
                remedy = "make the fence after the graph's launch"
                raise Conflict("stream_capturing", message, field="stream", value=hex(stream), remedy=remedy)
            # Flags 0: with the memory barrier, which orders the earlier writes before this one for the whole system.
            call("cuStreamWriteValue64_v2", stream, address, value, 0)

    def synchronize(self) -> None:
        """Wait, without a deadline, for everything on this GPU."""
        with self:
            call("cuCtxSynchronize")


class Mapping:
    """Another process's allocation, mapped from `address` on. The driver gives one mapping for each allocation, so
    opens are counted: the last `close` unmaps. Close it when its exporter ends, or the memory stays taken."""

    def __init__(self, device: Device, handle: bytes, address: int) -> None:
        self.device, self.handle, self.address = device, handle, address
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self.device.allocation(self.address)[1]

    def hold(self) -> Mapping:
        """The mapping once more: it stays until what is returned is closed too."""
        return self.device.open(self.handle)

    def close(self) -> None:
        """Idempotent. Nothing on the GPU may use the memory any more."""
        with _mappings_lock:
            if self._closed:
                return
            self._closed = True
            known = _mappings[self.device.index, self.handle]
            known[1] -= 1
            if known[1] == 0:
                del _mappings[self.device.index, self.handle]
                with self.device:
                    call("cuIpcCloseMemHandle", self.address)


@dataclass(slots=True, eq=False)
class _Owned:
    device: Device
    handle: int
    """The driver's name for it: a handle or a host address; 0 once it is closed."""
    _end: ClassVar[str]

    def close(self) -> None:
        """Idempotent. Work that a stream was given still runs."""
        if self.handle:
            self._call(self._end, self.handle)
            self.handle = 0

    def _call(self, function: str, *arguments: object) -> bool:
        with self.device:
            return call(function, *arguments)


class Stream(_Owned):
    """Work that runs in order. `handle` is a cudaStream_t: torch.cuda.ExternalStream takes it."""

    _end = "cuStreamDestroy_v2"

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Any kind of memory on either side. From pageable host memory it waits until the bytes are staged."""
        self._call("cuMemcpyAsync", destination, source, nbytes, self.handle)

    def upload(self, destination: int, source: Pinned, nbytes: int) -> None:
        """Its first bytes, without waiting. They must stay until the stream has taken them."""
        self._call("cuMemcpyHtoDAsync_v2", destination, source.address, nbytes, self.handle)

    def fill(self, address: int, nbytes: int, value: int = 0) -> None:
        self._call("cuMemsetD8Async", address, value, nbytes, self.handle)

    def wait(self, event: Event) -> None:
        """Later work on this stream runs after the event."""
        self._call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self.handle)


class Event(_Owned):
    """A point in a stream."""

    _end = "cuEventDestroy_v2"

    def record(self, stream: Stream) -> None:
        self._call("cuEventRecord", self.handle, stream.handle)

    def reached(self) -> bool:
        """Without waiting; True when it was never recorded. Raises KvferryError when work before it failed."""
        return self._call("cuEventQuery", self.handle)

    def synchronize(self) -> None:
        self._call("cuEventSynchronize", self.handle)

    def ms_since(self, earlier: Event) -> float:
        """Milliseconds between two events made with timing and reached."""
        elapsed = c_float()
        self._call("cuEventElapsedTime", byref(elapsed), earlier.handle, self.handle)
        return elapsed.value


@dataclass(slots=True, eq=False)
class Pinned(_Owned):
    """Page-locked host memory from its `handle` on."""

    nbytes: int
    _end = "cuMemFreeHost"

    @property
    def address(self) -> int:
        return self.handle


@dataclass(slots=True, eq=False)
class Registered(_Owned):
    """Host memory at `handle`, which GPUs see at `address`. Nothing on a GPU may use it when it is closed."""

    address: int
    _end = "cuMemHostUnregister"


class _Thread(threading.local):
    bound = -1
    """Index of the GPU whose context this thread keeps."""


_thread = _Thread()
_mappings: dict[tuple[int, bytes], list[int]] = {}
"""(device index, handle) -> [address, opens]."""
_mappings_lock = threading.RLock()


@functools.cache
def _primary(index: int) -> c_void_p:
    """Retained for the life of the process, and only on GPUs that are used: a context takes about half a GB."""
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", byref(context), index)
    return context


@functools.cache
def devices() -> tuple[Device, ...]:
    """The GPUs that this process sees. Raises KvferryError (`cuda_missing`) when there is none."""
    count = c_int()
    call("cuDeviceGetCount", byref(count))
    found = []
    for index in range(count.value):
        raw = Uuid()
        call("cuDeviceGetUuid_v2", byref(raw), index)
        found.append(Device(index, f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"))
    if not found:
        raise missing("the driver sees no GPU")
    return tuple(found)


def device(name: str) -> Device:
    """A device by UUID (GPU-...) or by this process's number (cuda:0). Raises KvferryError (`unknown_gpu`)."""
    for found in devices():
        if name in (found.uuid, f"cuda:{found.index}"):
            return found
    visible = ", ".join(f"cuda:{found.index} {found.uuid}" for found in devices())
    message = f"{name} is not among the GPUs that this process sees"
    remedy = f"visible here (CUDA_VISIBLE_DEVICES, the container's devices): {visible}"
    raise Malformed("unknown_gpu", message, field="device", value=name, remedy=remedy)
