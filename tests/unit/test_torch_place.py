"""torch allocates an engine's cache in shared memory. (On a GPU: tests/gpu.)"""

from __future__ import annotations

import torch

from kvferry.memory import memfd_region
from kvferry.vllm.torch_place import placed, region_nbytes


def test_the_one_allocation_of_the_cache_lies_in_the_region() -> None:
    region = memfd_region(region_nbytes(8192, "cpu"))
    with placed(region):
        cache = torch.zeros(8192, dtype=torch.int8, device=torch.device("cpu"))
        other = torch.zeros(64)
        smaller = torch.zeros(4096, dtype=torch.int8)
    assert torch.zeros(8192, dtype=torch.int8).data_ptr() != region.address
    assert cache.data_ptr() == region.address
    assert cache.dtype == torch.int8
    assert region.address not in (other.data_ptr(), smaller.data_ptr())
    cache[5] = 7
    assert region.array()[5] == 7
    region.close()
