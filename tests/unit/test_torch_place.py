"""torch allocates an engine's cache in shared memory. (On a GPU: tests/gpu.)"""

from __future__ import annotations

from pathlib import Path

import torch

from kvferry.memory import open_file_region
from kvferry.vllm.torch_place import placed, region_nbytes


def test_the_one_allocation_of_the_cache_lies_in_the_region(tmp_path: Path) -> None:
    file = tmp_path / "region"
    file.write_bytes(bytes(8192))
    region = open_file_region(str(file), region_nbytes(8192, "cpu"))
    with placed(region):
        cache = torch.zeros(8192, dtype=torch.int8, device=torch.device("cpu"))
        other = torch.zeros(64)
        smaller = torch.zeros(4096, dtype=torch.int8)
    assert torch.zeros(8192, dtype=torch.int8).data_ptr() != region.address
    assert cache.data_ptr() == region.address
    assert cache.dtype == torch.int8
    assert region.address not in (other.data_ptr(), smaller.data_ptr())
    cache[5] = 7
    assert file.read_bytes()[5] == 7
    region.close()
