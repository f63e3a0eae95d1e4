"""torch allocates an engine's cache in shared memory. (On a GPU: tests/gpu.)"""

from __future__ import annotations

from functools import partial

import torch

from kvferry.memory import memfd_region
from kvferry.memory.placing import buffers_of, placed, region_nbytes


def test_what_was_foretold_lies_in_the_region_and_nothing_else() -> None:
    cache = partial(torch.zeros, 8192, dtype=torch.int8, device="cpu")
    buffers = [*buffers_of(cache), *buffers_of(partial(torch.zeros, size=(3, 5), dtype=torch.float32))]
    assert not buffers_of(partial(torch.zeros, (0, 5), dtype=torch.float32))
    assert {buffer.device.type for buffer in buffers} == {"meta"}
    region = memfd_region(region_nbytes(buffers, "cpu"))
    with placed(region, buffers):
        others = [torch.zeros(64), torch.zeros(4096, dtype=torch.int8)]
        first, second = cache(), torch.zeros((3, 5), dtype=torch.float32)
        others.append(cache())
    others.append(cache())
    assert (first.data_ptr(), first.dtype) == (region.address, torch.int8)
    assert (second.data_ptr(), second.shape) == (region.address + 8192, (3, 5))
    place = range(region.address, region.address + region.nbytes)
    assert not any(other.data_ptr() in place for other in others)
    first[5] = 7
    assert region.array()[5] == 7
    region.close()
