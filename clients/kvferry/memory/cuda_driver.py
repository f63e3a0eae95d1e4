"""libcuda.so.1 through ctypes: signatures, and every status as a KvferryError. Use it through cuda.py."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

from kvferry.errors import Full, KvferryError, Unavailable

HANDLE_NBYTES = 64
NOT_READY = 600


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * HANDLE_NBYTES),)


class Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * 16),)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamWriteValue64_v2": (c_void_p, c_uint64, c_uint64, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
}
_QUICK = frozenset(
    {"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery"}
)
"""Quick functions are called with the GIL held: to wait for it again can take some hundred microseconds."""
_REMEDIES = {
    "cuMemAlloc_v2": "free memory on this GPU, or ask for fewer bytes",
    "cuMemCreate": "free memory on this GPU, or ask for fewer bytes",
    "cuMemHostAlloc": "raise the limit of locked memory (capability IPC_LOCK), or ask for fewer bytes",
    "cuMemHostRegister_v2": "synchronise the stream on the host instead, and publish without a fence",
    "cuStreamWriteValue64_v2": "give a stream of the GPU that was named, or synchronise it and publish without a fence",
    "cuIpcOpenMemHandle_v2": "its exporter must live, in this PID namespace, and its GPU reach this one;"
    " between pods take memory of the daemon (torch_pool), or hand over descriptors (kvferry.memory.vmm.export)",
    "cuIpcGetMemHandle": "only memory from cuMemAlloc or cudaMalloc can be exported, and only outside WSL",
    "cuMemImportFromShareableHandle": "hand over descriptors of GPU memory, and let this process see its GPU",
    "cuMemMap": "hand over the sizes that the allocations really have (kvferry.memory.vmm.export)",
    "cuPointerGetAttribute": "give an address inside memory of this GPU",
    "cuMemGetAddressRange_v2": "give an address inside memory of this GPU",
}
_ANY_REMEDY = "an earlier copy or kernel of this process may have failed: the first CUDA error in the log tells"


@functools.cache
def _functions() -> dict[str, Any]:
    try:
        library, holding = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise missing(str(error)) from None
    functions: dict[str, Any] = {}
    for name, arguments in _SIGNATURES.items():
        function = functions[name] = getattr(holding if name in _QUICK else library, name)
        function.argtypes, function.restype = arguments, c_int
    status = functions["cuInit"](0)
    if status:
        raise missing(" ".join(_words(functions, status)))
    return functions


def missing(why: str) -> KvferryError:
    message = "no CUDA device can be used here"
    remedy = "run where an NVIDIA driver and a GPU are visible (nvidia-smi lists it), or use host memory"
    return Unavailable("cuda_missing", message, field="libcuda.so.1", value=why, remedy=remedy)


def _words(functions: dict[str, Any], status: int) -> list[str]:
    """The driver's name and sentence for a status."""
    texts = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = c_char_p()
        functions[name](status, byref(text))
        texts.append((text.value or b"").decode() or f"error {status}")
    return texts


def call(function: str, *arguments: object) -> bool:
    """Call the driver; False when it answers "not ready". Raises KvferryError with the driver's own words."""
    functions = _functions()
    status = functions[function](*arguments)
    if status in (0, NOT_READY):
        return bool(status == 0)
    name, sentence = _words(functions, status)
    code = "cuda_ipc_failed" if function.startswith("cuIpc") else "cuda_failed"
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        code = "out_of_memory"
    remedy = _REMEDIES.get(function, _ANY_REMEDY)
    raise Full(code, f"{function} failed: {sentence}", field="cuda", value=name, remedy=remedy)
