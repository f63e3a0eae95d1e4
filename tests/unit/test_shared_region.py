"""Shared memory: a region outlives its `close` for as long as somebody looks at it, and torch allocates in one."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from kvferry.file import File
from kvferry.memory import CudaRegion, SharedRegion, cuda, memfd_region, open_region
from kvferry.memory.placing import buffers_of, placed, region_nbytes


@pytest.fixture
def region() -> SharedRegion:
    whole = memfd_region(8192)
    try:
        return open_region(whole.file.fileno(), 4096, offset=100)
    finally:
        whole.close()


def test_an_array_keeps_the_mapping(region: SharedRegion) -> None:
    array = region.array()
    region.close()
    array[:] = 7
    assert (array == 7).all()


def test_a_tensor_keeps_the_mapping(region: SharedRegion) -> None:
    tensor = region.tensor()
    region.close()
    tensor.fill_(7)
    assert bool((tensor == 7).all())
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (4096,)


def test_a_tensor_is_the_memory(region: SharedRegion) -> None:
    region.tensor()[5] = 9
    assert region.array()[5] == 9


def test_a_populated_region_is_mapped_before_it_is_used(region: SharedRegion) -> None:
    region.populate()
    at = f"{region.address - region.offset:x}-"
    entry = Path("/proc/self/smaps").read_text().split(f"\n{at}", 1)[1]
    assert next(line for line in entry.splitlines() if line.startswith("Rss:")).split()[1:] == ["8", "kB"]
    assert not region.array().any()


def test_other_threads_run_while_pages_are_mapped() -> None:
    """A page that the machine has never used may take a thousand times as long as one that it has."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a thread that keeps the GIL keeps it to its end
    try:
        assert any(_runs_beside_populate() for _ in range(100))
    finally:
        sys.setswitchinterval(interval)


def _runs_beside_populate() -> bool:
    """Whether this thread got to run before the other one had ended. A busy machine may let it wait for longer."""
    region, began = memfd_region(64 << 20), threading.Event()

    def populate() -> None:
        began.set()
        region.populate()

    mapping = threading.Thread(target=populate)
    try:
        mapping.start()
        began.wait()
        return mapping.is_alive()
    finally:
        mapping.join()
        region.close()


def descriptors_of(file: os.stat_result) -> int:
    """How many this process has of one file. Other threads open and close others at any time."""
    same = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile, as the folder's own is
            same += os.path.samestat(os.stat(descriptor), file)
    return same


def test_a_region_that_nobody_closes_leaves_nothing_open() -> None:
    """A caller that is cancelled, or a loop that ends, drops it."""
    device, mapping = cast(cuda.Device, None), cast(cuda.Mapping, None)  # asked for nothing here
    shared = memfd_region(4096)
    memory = os.stat(shared.file.fileno())
    on_gpu = CudaRegion(0, "cuda", 1, 0, device, mapping, file=File(os.dup(shared.file.fileno())))
    assert descriptors_of(memory) >= 2
    del shared, on_gpu
    assert not descriptors_of(memory)


def test_gpu_memory_outlives_its_daemon_for_as_long_as_a_keeper_holds_it() -> None:
    device, mapping = cast(cuda.Device, None), cast(cuda.Mapping, None)  # asked for nothing here
    keeper, held = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with keeper:
        region = CudaRegion(0, "cuda", 1, 0, device, mapping, file=File(held.detach()))
        assert region.outlives_daemon
    assert not region.outlives_daemon
    region.file.close()
    assert not region.outlives_daemon
    assert not CudaRegion(0, "cuda", 1, 0, device, mapping).outlives_daemon


# ---- torch allocates an engine's cache in shared memory (on a GPU: tests/gpu) ----


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
