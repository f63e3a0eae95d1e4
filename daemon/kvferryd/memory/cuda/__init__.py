"""GPU memory: cuMemAlloc, shared with engines as raw CUDA IPC handles."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.errors import Full, KvferryError, Malformed
from kvferry.memory import CudaRegion, cuda, open_cuda_region
from kvferry.v1 import engine_pb2
from kvferryd.memory import Probe
from kvferryd.memory.cuda import vmm
from kvferryd.memory.cuda.vmm import VmmRegion
from kvferryd.transport import Span

PROBE_NBYTES = 64
SLOW_ADOPTED = (
    "adopted GPU memory: NIXL reads it at about 0.5 GB/s as a direct source, so it goes staged or mapped "
    "(allocate through the daemon to have every way)"
)


@dataclass(slots=True, eq=False)
class OwnedRegion:
    """Memory of this process, alone in its allocation: its handle exports nothing else."""

    device: cuda.Device
    address: int
    nbytes: int
    handle: cuda.Exported = field(repr=False)
    nonce: Probe = field(repr=False)
    slow_source: str = ""
    unmappable: str = ""
    _open: bool = field(default=True, repr=False)

    @property
    def owned(self) -> bool:
        return True

    @property
    def span(self) -> Span:
        return Span(self.address, self.nbytes, "cuda", self.device.index)

    def probe(self) -> Probe:
        return self.nonce

    def exported(self, region: int) -> engine_pb2.Memory:
        return _message(region, self.nbytes, self.handle)

    def close(self) -> None:
        """Free the memory here; a process that still maps it keeps it taken until it unmaps or ends. Idempotent."""
        if self._open:
            self._open = False
            self.device.free(self.address)


@dataclass(slots=True, eq=False)
class AdoptedRegion:
    """An engine's memory, mapped here. `handle` is the engine's own: a mapping cannot be exported again, so this is
    what a peer gets that maps it. `slow_source`: why it should not be read directly, in words."""

    shared: CudaRegion
    handle: cuda.Exported = field(repr=False)
    slow_source: str = SLOW_ADOPTED
    unmappable: str = ""

    @property
    def owned(self) -> bool:
        return False

    @property
    def span(self) -> Span:
        return Span(self.shared.address, self.shared.nbytes, "cuda", self.shared.device.index)

    def probe(self) -> Probe:
        """What the engine has there now: no byte of its memory is ours to write."""
        nbytes = min(PROBE_NBYTES, self.shared.nbytes)
        return Probe(self.handle.offset, read(self.shared.device, self.shared.address, nbytes))

    def exported(self, region: int) -> engine_pb2.Memory:
        return _message(region, self.shared.nbytes, self.handle)

    def close(self) -> None:
        """Unmap. Call it as soon as the engine is gone: the mapping keeps its memory taken. Idempotent."""
        self.shared.close()


class CudaProvider:
    """Memory of one GPU, named by UUID (GPU-...) or by this process's number (cuda:0)."""

    def __init__(self, device: str) -> None:
        """Raises KvferryError: `cuda_missing`, `unknown_gpu`."""
        self.device = cuda.device(device)

    def allocate(self, nbytes: int) -> OwnedRegion:
        """A new zeroed region. Raises KvferryError (`out_of_memory`)."""
        # Whole granules: a smaller allocation shares one with its neighbours, and a handle would export them too.
        taken = -(-(nbytes + PROBE_NBYTES) // cuda.GRANULE) * cuda.GRANULE
        try:
            address = self.device.alloc(taken)
        except KvferryError as error:
            if error.code != "out_of_memory":
                raise
            free, total = self.device.memory()
            raise Full(
                "out_of_memory",
                f"GPU {self.device.uuid} has no room for {nbytes} bytes: {free} of {total} are free",
                field="nbytes",
                value=nbytes,
                remedy="start the daemon and its caches before other users of the GPU, or make the cache smaller",
            ) from None
        try:
            nonce = Probe(taken - PROBE_NBYTES, secrets.token_bytes(PROBE_NBYTES))
            stream = self.device.stream()
            stream.fill(address, taken)
            written = ctypes.create_string_buffer(nonce.held, PROBE_NBYTES)
            stream.copy(address + nonce.offset, ctypes.addressof(written), PROBE_NBYTES)
            stream.synchronize()
            stream.close()
            return OwnedRegion(self.device, address, nbytes, self.device.export(address), nonce)
        except BaseException:
            self.device.free(address)
            raise

    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> AdoptedRegion | VmmRegion:
        """Map memory that the engine owns. Raises KvferryError."""
        kind = memory.WhichOneof("kind")
        if kind not in ("cuda", "vmm"):
            raise Malformed(
                "wrong_memory_kind",
                "a daemon beside a GPU adopts CUDA memory only",
                field="memory.kind",
                value=kind,
                remedy="hand over what kvferry.memory.cuda_memory describes",
            )
        given = memory.cuda if kind == "cuda" else memory.vmm
        if given.device_uuid != self.device.uuid:
            raise Malformed(
                "wrong_gpu",
                f"the memory is on GPU {given.device_uuid}, this daemon runs beside {self.device.uuid}",
                field=f"memory.{kind}.device_uuid",
                value=given.device_uuid,
                remedy="attach each rank to the daemon of its own GPU",
            )
        if isinstance(given, engine_pb2.CudaAllocations):
            return vmm.adopt(self.device, memory, files)
        shared = open_cuda_region(
            given.handle, given.offset, memory.nbytes, given.allocation_nbytes, given.device_uuid, memory.region
        )
        handle = cuda.Exported(given.handle, given.offset, given.allocation_nbytes, given.device_uuid)
        return AdoptedRegion(shared, handle)

    def close(self) -> None:
        """Nothing of its own: regions belong to their engines."""


def read(device: cuda.Device, address: int, nbytes: int) -> bytes:
    """A few bytes of GPU memory, on a stream of their own."""
    held = ctypes.create_string_buffer(nbytes)
    stream = device.stream()
    try:
        stream.copy(ctypes.addressof(held), address, nbytes)
        stream.synchronize()
    finally:
        stream.close()
    return held.raw


def _message(region: int, nbytes: int, handle: cuda.Exported) -> engine_pb2.Memory:
    allocation = engine_pb2.CudaAllocation(
        handle=handle.handle,
        offset=handle.offset,
        allocation_nbytes=handle.allocation_nbytes,
        device_uuid=handle.device_uuid,
    )
    return engine_pb2.Memory(region=region, nbytes=nbytes, cuda=allocation)
