"""GPU memory: cuMemAlloc, shared with engines and peers as raw CUDA IPC handles; or, where the daemons of a node share
a folder, cuMemCreate, shared as descriptors; and engines' own, of both kinds."""

from __future__ import annotations

import ctypes
import dataclasses
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing

from kvferry.errors import Full, KvferryError, Malformed
from kvferry.file import File
from kvferry.memory import CudaRegion, cuda, open_cuda_region, vmm
from kvferry.memory.regions import check_inside
from kvferry.memory.vmm import VmmMapping
from kvferry.v1 import engine_pb2
from kvferryd.memory import Probe, Region
from kvferryd.memory.kept import Keeper
from kvferryd.transport.read import Span

PROBE_NBYTES = 64
SLOW_ADOPTED = (
    "adopted GPU memory: NIXL reads it at about 0.5 GB/s as a direct source, so it goes staged or mapped "
    "(allocate through the daemon to have every way)"
)
SLOW_KEPT = "GPU memory of the keeper: NIXL reads it at about 0.5 GB/s as a direct source, so it goes staged or mapped"
SLOW_VMM = (
    "VMM-backed GPU memory, shared as descriptors: NIXL reads it at about 0.5 GB/s as a direct source, so it goes "
    "staged, or mapped by daemons that share a folder (node_dir)"
)


class CudaProvider:
    """Memory of one GPU, named by UUID (GPU-...) or by this process's number (cuda:0)."""

    def __init__(self, device: str, keeper: Keeper | None = None, *, shared: bool = False) -> None:
        """keeper: holds memory that is to outlive this process. shared: all memory is made to be shared as a
        descriptor, slots too, and outlives this process without a keeper. Raises KvferryError: `cuda_missing`,
        `unknown_gpu`."""
        self.device, self._keeper, self._shared = cuda.device(device), keeper, shared

    def allocate(self, nbytes: int, *, kept: bool = False) -> Region:
        """A new zeroed region. Raises KvferryError (`out_of_memory`)."""
        # Whole granules: a smaller allocation shares one with its neighbours, and a handle would export them too.
        taken = -(-(nbytes + PROBE_NBYTES) // cuda.GRANULE) * cuda.GRANULE
        try:
            if self._shared:
                described = engine_pb2.CudaAllocations(nbytes=[taken], device_uuid=self.device.uuid)
                return self._described(described, nbytes, vmm.create(self.device, taken), new=True)
            if kept and self._keeper is not None:
                exported, file = self._keeper.allocate(self.device.uuid, taken)
                return self._kept(engine_pb2.CudaAllocation(**dataclasses.asdict(exported)), nbytes, file, new=True)
            address = self.device.alloc(taken)
        except KvferryError as error:
            if error.code != "out_of_memory":
                raise
            free, total = self.device.memory()
            message = f"GPU {self.device.uuid} has no room for {nbytes} bytes: {free} of {total} are free"
            remedy = "start the daemon and its caches before other users of the GPU, or make the cache smaller"
            raise Full("out_of_memory", message, field="nbytes", value=nbytes, remedy=remedy) from None
        with ExitStack() as undo:
            undo.callback(self.device.free, address)
            nonce = self._cleared(address, taken)
            told = engine_pb2.CudaAllocation(**dataclasses.asdict(self.device.export(address)))
            memory = engine_pb2.Memory(nbytes=nbytes, cuda=told)
            return Region(self._span(address, nbytes), True, memory, undo.pop_all(), probe=lambda: nonce)

    def _cleared(self, address: int, nbytes: int) -> Probe:
        """The probe is zeros, but for the random bytes at its end."""
        nonce = Probe(nbytes - PROBE_NBYTES, secrets.token_bytes(PROBE_NBYTES))
        written = ctypes.create_string_buffer(nonce.held, PROBE_NBYTES)
        with closing(self.device.stream()) as stream:
            stream.fill(address, nbytes)
            stream.copy(address + nonce.offset, ctypes.addressof(written), PROBE_NBYTES)
            stream.synchronize()
        return nonce

    def _kept(self, told: engine_pb2.CudaAllocation, nbytes: int, file: File, *, new: bool) -> Region:
        """Memory of the keeper's, which `file` holds. new: or a daemon before this one has cleared and used it."""
        with ExitStack() as undo:
            undo.enter_context(file)
            mapping = undo.enter_context(closing(self.device.open(told.handle)))
            nonce = self._marked(mapping, nbytes, new=new)
            memory, span = engine_pb2.Memory(nbytes=nbytes, cuda=told), self._span(mapping.address, nbytes)
            return Region(span, True, memory, undo.pop_all(), SLOW_KEPT, probe=lambda: nonce, files=(file,))

    def _described(self, told: engine_pb2.CudaAllocations, nbytes: int, file: File, *, new: bool) -> Region:
        """An allocation whose descriptor is `file`. new: as of `_kept`."""
        with ExitStack() as undo:
            undo.enter_context(file)
            mapping = undo.enter_context(closing(VmmMapping(self.device, [file.fileno()], told.nbytes)))
            nonce = self._marked(mapping, nbytes, new=new)
            memory, span = engine_pb2.Memory(nbytes=nbytes, vmm=told), self._span(mapping.address, nbytes)
            return Region(span, True, memory, undo.pop_all(), SLOW_VMM, probe=lambda: nonce, files=(file,))

    def _marked(self, mapping: cuda.Mapping | VmmMapping, nbytes: int, *, new: bool) -> Probe:
        """The probe at the end of an allocation that outlives this process. Raises KvferryError."""
        check_inside(0, nbytes + PROBE_NBYTES, mapping.nbytes, "has")
        at = mapping.nbytes - PROBE_NBYTES
        if new:
            return self._cleared(mapping.address, mapping.nbytes)
        return Probe(at, read(self.device, mapping.address + at, PROBE_NBYTES))

    def adopt(self, memory: engine_pb2.Memory, files: Sequence[int] = ()) -> Region:
        """Map memory that the engine owns. Raises KvferryError."""
        kind, nbytes = memory.WhichOneof("kind"), memory.nbytes
        if kind not in ("cuda", "vmm"):
            what, remedy = "a daemon beside a GPU adopts CUDA memory only", "hand over what cuda_memory describes"
            raise Malformed("wrong_memory_kind", what, field="memory.kind", value=kind, remedy=remedy)
        given = memory.cuda if kind == "cuda" else memory.vmm
        if given.device_uuid != self.device.uuid:
            what = f"the memory is on GPU {given.device_uuid}, this daemon runs beside {self.device.uuid}"
            field, remedy = f"memory.{kind}.device_uuid", "attach each rank to the daemon of its own GPU"
            raise Malformed("wrong_gpu", what, field=field, value=given.device_uuid, remedy=remedy)
        if memory.again:
            if len(files) != 1 or given.offset:
                what = "memory of a daemon that has gone comes with one descriptor"
                remedy = "hand over what `allocate` returned"
                raise Malformed("malformed_region", what, field="memory.again", value=len(files), remedy=remedy)
            told = engine_pb2.Memory()
            told.CopyFrom(memory)
            if kind == "cuda":
                told.cuda.ClearField("ticket")
                return self._kept(told.cuda, nbytes, *File.copies(files), new=False)
            told.vmm.ClearField("ticket")
            return self._described(told.vmm, nbytes, *File.copies(files), new=False)
        held, slow = list[File](), SLOW_ADOPTED
        with ExitStack() as undo:
            if isinstance(given, engine_pb2.CudaAllocations):
                check_inside(given.offset, nbytes, sum(given.nbytes), "was said to have")
                held, slow = File.copies(files), SLOW_VMM
                undo.callback(File.close_all, held)
                mapped: VmmMapping | CudaRegion = VmmMapping(self.device, files, given.nbytes)
                address = mapped.address + given.offset
            else:
                place = given.handle, given.offset, nbytes, given.allocation_nbytes, given.device_uuid
                mapped = open_cuda_region(*place)
                address = mapped.address
            undo.callback(mapped.close)

            def probe() -> Probe:
                """The engine's own bytes: none of its memory is ours to write. They may be given back meanwhile."""
                with closing(mapped.hold()):
                    return Probe(given.offset, read(self.device, address, min(PROBE_NBYTES, nbytes)))

            span = self._span(address, nbytes)
            return Region(span, False, memory, undo.pop_all(), slow, probe=probe, files=held)

    def _span(self, address: int, nbytes: int) -> Span:
        return Span(address, nbytes, "cuda", self.device.index)


def read(device: cuda.Device, address: int, nbytes: int) -> bytes:
    """A few bytes of GPU memory, on a stream of their own."""
    held = ctypes.create_string_buffer(nbytes)
    with closing(device.stream()) as stream:
        stream.copy(ctypes.addressof(held), address, nbytes)
        stream.synchronize()
    return held.raw
