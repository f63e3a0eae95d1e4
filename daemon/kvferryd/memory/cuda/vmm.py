"""Adopted VMM-backed memory: an engine's allocations, handed over as file descriptors and mapped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.memory import cuda
from kvferry.memory.regions import check_inside
from kvferry.memory.vmm import VmmMapping
from kvferry.v1 import engine_pb2
from kvferryd.transport import Span

SLOW = (
    "VMM-backed GPU memory: NIXL reads it at about 0.5 GB/s as a direct source and no peer can map it, so it goes "
    "staged (allocate through the daemon to have every way)"
)


@dataclass(slots=True, eq=False)
class VmmRegion:
    """`nbytes` bytes, `offset` into the mapping."""

    mapping: VmmMapping = field(repr=False)
    offset: int
    nbytes: int
    slow_source: str = SLOW
    unmappable: str = "it is VMM-backed GPU memory, which has no IPC handle"

    @property
    def owned(self) -> bool:
        return False

    @property
    def span(self) -> Span:
        return Span(self.mapping.address + self.offset, self.nbytes, "cuda", self.mapping.device.index)

    def probe(self) -> None:
        """No peer can map it."""

    def exported(self, region: int) -> engine_pb2.Memory:
        allocations = engine_pb2.CudaAllocations(offset=self.offset, device_uuid=self.mapping.device.uuid)
        return engine_pb2.Memory(region=region, nbytes=self.nbytes, vmm=allocations)

    def close(self) -> None:
        """Unmap. Call it as soon as the engine is gone: the mapping keeps its memory taken. Idempotent."""
        self.mapping.close()


def adopt(device: cuda.Device, memory: engine_pb2.Memory, files: Sequence[int]) -> VmmRegion:
    """Raises KvferryError: `region_out_of_bounds`, `cuda_failed`."""
    given = memory.vmm
    check_inside(given.offset, memory.nbytes, sum(given.nbytes), "was said to have")
    return VmmRegion(VmmMapping(device, files, given.nbytes), given.offset, memory.nbytes)
