"""Memory that an engine and its daemon share, on the host or a GPU, and what has to be done for it.

`EngineClient.allocate` returns a SharedRegion or a CudaRegion of the daemon's; `memfd_region` and `cuda_memory`
describe memory of the engine's own, for `EngineClient.adopt`.
"""

from kvferry.memory.pools import torch_pool
from kvferry.memory.regions import (
    CudaMemory,
    CudaRegion,
    SharedRegion,
    VmmMemory,
    cuda_memory,
    memfd_region,
    open_cuda_region,
    open_descriptor_region,
    open_file_region,
    open_region,
)

__all__ = [
    "CudaMemory", "CudaRegion", "SharedRegion", "VmmMemory", "cuda_memory", "memfd_region", "open_cuda_region",
    "open_descriptor_region", "open_file_region", "open_region", "torch_pool",
]  # fmt: skip
