"""VMM-backed memory (cuMemCreate, expandable_segments): adopted by file descriptors, filled, read and given back."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64
from pathlib import Path

import pytest
from needs import GPUS

from support import refused

# isort: split
import gpu_engine
import numpy as np
import torch
from fleet import open_files, until
from gpu_daemons import daemon
from gpu_engine import GpuEngine, GpuRank, Mirror, registered
from ranks import HND, Blocks, Kv, Shape, TestEngine

from kvferry.engine import EngineClient
from kvferry.errors import KvferryError
from kvferry.memory import VmmMemory, cuda, cuda_memory
from kvferry.memory import vmm as cuda_vmm
from kvferry.memory.cuda_driver import Access, Location, Properties, call
from kvferry.memory.handover import sealed_file
from kvferry.memory.vmm import VmmMapping
from kvferry.router import RouterClient
from kvferry.v1 import engine_pb2
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.memory.cuda import CudaProvider, read

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
MIB = 1 << 20
SLACK = 24 * MIB
FAR = len(GPUS) - 1
TOKENS = 300


class Vmm:
    """Memory of cuMemCreate: allocations of these sizes, mapped one behind the other."""

    def __init__(self, gpu: cuda.Device, sizes: Sequence[int], *, handle_types: int = 1) -> None:
        create = ctypes.CDLL("libcuda.so.1").cuMemCreate
        create.argtypes, create.restype = (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64), c_int
        self.gpu, self.sizes, self.nbytes = gpu, tuple(sizes), sum(sizes)
        properties = Properties(type=1, handle_types=handle_types, location=Location(1, gpu.index))
        address = c_uint64()
        with gpu:
            call("cuMemAddressReserve", byref(address), self.nbytes, 0, 0, 0)
            self.address = at = address.value
            for size in sizes:
                handle = c_uint64()
                assert create(byref(handle), size, byref(properties), 0) == 0
                call("cuMemMap", at, size, 0, handle, 0)
                call("cuMemRelease", handle)
                at += size
            access = Access(Location(1, gpu.index), 3)
            call("cuMemSetAccess", self.address, self.nbytes, byref(access), 1)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device=f"cuda:{self.gpu.index}")

    def close(self) -> None:
        at = self.address
        self.gpu.synchronize()
        with self.gpu:
            for size in self.sizes:
                call("cuMemUnmap", at, size)
                at += size
            call("cuMemAddressFree", self.address, self.nbytes)


@pytest.fixture
def memory() -> Iterator[Vmm]:
    """Three allocations on the last GPU."""
    memory = Vmm(GPUS[FAR], [2 * MIB, 4 * MIB, 2 * MIB])
    memory.tensor().copy_(torch.arange(memory.nbytes, device=f"cuda:{FAR}") // 1000 % 251)
    torch.cuda.synchronize(FAR)
    yield memory
    memory.close()


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def free() -> list[int]:
    return [gpu.memory()[0] for gpu in GPUS]


# the driver's part, within one process


def test_it_is_told_apart_and_has_no_handle(memory: Vmm) -> None:
    found = memory.gpu.attributes(memory.address)
    assert (found.on_device, found.legacy_ipc, found.handle_types) == (True, False, 1)
    assert cuda_memory(memory.tensor()) == VmmMemory(0, memory.nbytes, memory.address, memory.gpu)
    with refused("not_exportable"):
        memory.gpu.export(memory.address)


def test_memory_that_was_not_made_to_be_shared_is_refused() -> None:
    memory = Vmm(GPUS[FAR], [2 * MIB], handle_types=0)
    with pytest.raises(KvferryError) as refused:
        cuda_memory(memory.address, memory.nbytes, device=FAR)
    assert refused.value.code == "not_exportable"
    assert refused.value.remedy
    memory.close()


@pytest.mark.parametrize(
    ("first", "nbytes", "sizes"), [(0, 8 * MIB, [2, 4, 2]), (MIB, 1000, [2]), (3 * MIB, 5 * MIB, [4, 2])]
)
def test_any_part_of_it_is_exported_and_seen(memory: Vmm, first: int, nbytes: int, sizes: list[int]) -> None:
    before = files()
    allocations = cuda_vmm.export(memory.gpu, memory.address + first, nbytes)
    assert list(allocations.nbytes) == [size * MIB for size in sizes]
    mapping = VmmMapping(memory.gpu, allocations.files, allocations.nbytes)
    allocations.close()
    assert files() == before
    seen = read(memory.gpu, mapping.address + allocations.offset, nbytes)
    assert seen == memory.tensor()[first : first + nbytes].cpu().numpy().tobytes()
    mapping.close()
    mapping.close()


def test_what_is_not_an_allocation_of_that_size_is_not_mapped(memory: Vmm) -> None:
    before, held = free(), files()  # in this order: the first look at a GPU opens files for good
    allocations = cuda_vmm.export(memory.gpu, memory.address, memory.nbytes)
    provider, wrong = CudaProvider(memory.gpu.uuid), sealed_file("no memory of a GPU", 2 * MIB)
    for given, sizes, nbytes, code in (
        (allocations.files, [2 * MIB, 4 * MIB, 4 * MIB], 8 * MIB, "cuda_failed"),
        (allocations.files, [2 * MIB, 4 * MIB], 6 * MIB, "region_out_of_bounds"),
        (allocations.files, [2 * MIB, 4 * MIB, 1 << 63], 8 * MIB, "region_out_of_bounds"),
        (allocations.files, allocations.nbytes, 8 * MIB + 1, "region_out_of_bounds"),
        ([wrong], [2 * MIB], 2 * MIB, "cuda_failed"),
        ([], [], 1, "region_out_of_bounds"),
    ):
        told = engine_pb2.CudaAllocations(ticket="t", nbytes=sizes, device_uuid=memory.gpu.uuid)
        with pytest.raises(KvferryError) as refused:
            provider.adopt(engine_pb2.Memory(nbytes=nbytes, vmm=told), given)
        assert refused.value.code == code, (sizes, refused.value)
        assert refused.value.remedy
    assert free()[FAR] >= before[FAR] - 4 * MIB
    allocations.close()
    os.close(wrong)
    assert files() == held


def test_unmapping_waits_for_work_that_is_queued() -> None:
    gpu, nbytes = GPUS[FAR], 1 << 30
    with cuda_vmm.create(gpu, nbytes) as file, contextlib.closing(gpu.stream()) as stream:
        mapping = VmmMapping(gpu, [file.fileno()], [nbytes])
        for _ in range(100):
            stream.fill(mapping.address, nbytes)
        mapping.close()
        stream.synchronize()  # an illegal address would break the context, for every test behind this one


def test_a_mapping_stays_until_the_last_hold_is_over_and_cannot_be_held_then() -> None:
    gpu, nbytes = GPUS[FAR], 2 * MIB
    with cuda_vmm.create(gpu, nbytes) as file:
        mapping = VmmMapping(gpu, [file.fileno()], [nbytes])
        hold = mapping.hold()
        mapping.close()
        assert len(read(gpu, mapping.address, 1)) == 1
        hold.close()
        with refused("region_closed"):
            mapping.hold()
        other = VmmMapping(gpu, [file.fileno()], [nbytes])  # perhaps at the address that is free now
        hold.close()
        mapping.close()
        assert len(read(gpu, other.address, 1)) == 1
        other.close()


def test_a_hundred_adoptions_leave_nothing(memory: Vmm) -> None:
    provider = CudaProvider(memory.gpu.uuid)

    def adopt() -> None:
        allocations = cuda_vmm.export(memory.gpu, memory.address, memory.nbytes)
        told = engine_pb2.CudaAllocations(nbytes=allocations.nbytes, device_uuid=memory.gpu.uuid)
        region = provider.adopt(engine_pb2.Memory(nbytes=memory.nbytes, vmm=told), allocations.files)
        allocations.close()
        assert not region.owned
        assert (probe := region.probe()) and probe.held == read(memory.gpu, memory.address, len(probe.held))
        assert "0.5 GB/s" in region.slow_source
        region.close()

    adopt()
    before = free(), files()
    for _ in range(100):
        adopt()
    assert free()[FAR] >= before[0][FAR] - 8 * MIB
    assert files() == before[1]


# through daemons


async def engine_on(daemon: DaemonService, gpu: int, shape: Shape) -> tuple[GpuEngine, Vmm]:
    """An engine of one rank whose cache lies in several allocations of cuMemCreate."""
    engine_id, epoch, nbytes = f"vmm-{uuid.uuid4().hex[:4]}", uuid.uuid4().hex, shape.nbytes(0)
    memory = Vmm(GPUS[gpu], [2 * MIB] * -(-nbytes // (2 * MIB)))
    tensor = memory.tensor()[:nbytes].zero_()
    torch.cuda.synchronize(gpu)
    client = await EngineClient.connect(str(daemon.socket), engine_id=engine_id, epoch=epoch, timeout_s=30)
    await client.adopt(cuda_memory(tensor))
    mirror = Mirror(np.zeros(nbytes, dtype=np.uint8))
    rank = await registered(client, engine_id, epoch, shape, 0, mirror, tensor)
    order = list(range(shape.num_blocks))
    return GpuEngine(engine_id, epoch, shape, [daemon], [rank], itertools.cycle(order), itertools.cycle(order)), memory


async def end(engine: GpuEngine, memory: Vmm) -> None:
    """The session ends, the daemon lets go, and the memory is freed."""
    (router_of,) = engine.daemons
    await engine.close()

    async def gone() -> bool:
        async with RouterClient(router_of.url) as router:
            return engine.engine_id not in [each.engine_id for each in await router.engines()]

    await until(gone, "the engine is retired")
    engine.ranks.clear()
    memory.close()


async def moved(source: TestEngine, destination: GpuEngine, ways: tuple[str, ...]) -> dict[str, str]:
    """A request, compared; returns why each way cannot be taken."""
    request_id = uuid.uuid4().hex
    kv, given, taken = Kv.random(TOKENS), source.take(TOKENS), destination.take(TOKENS)
    source.write(kv, given)
    expected = destination.snapshot()
    destination.write_into(expected, kv, taken)
    await source.publish(request_id, given, TOKENS)
    (received,) = await destination.receive(request_id, taken, source=source.source())
    assert destination.differences(expected) == ""
    async with RouterClient(destination.daemons[0].url) as router:
        peers = {peer.engine_id: peer.ways for peer in await router.peers()}
        path = (await router.transfer(received.transfer_id)).path
    assert path in ways, (path, peers[source.engine_id])
    return peers[source.engine_id]


@pytest.mark.parametrize("way", ["mapped", "direct"])
async def test_it_is_filled_either_way(
    near: DaemonService, far: DaemonService, direct: DaemonService, way: str
) -> None:
    source = await GpuEngine.on("source", [near], [0], Shape(), adopted=False)
    destination, memory = await engine_on(far if way == "mapped" else direct, FAR, Shape(axes=HND, num_blocks=512))
    for _ in range(3):
        await moved(source, destination, (way,))
    await source.close()
    await end(destination, memory)


async def test_it_is_read_and_says_what_it_cannot(near: DaemonService, far: DaemonService) -> None:
    source, memory = await engine_on(near, 0, Shape(num_blocks=512))
    async with RouterClient(near.url) as router:
        (notes,) = [engine.notes for engine in await router.engines() if engine.engine_id == source.engine_id]
    assert any("VMM-backed" in note for note in notes)
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(axes=HND), adopted=False)
    ways = await moved(source, destination, ("staged", "direct"))
    assert "VMM-backed" in ways["mapped"]
    await destination.close()
    await end(source, memory)


def files_of(daemon: DaemonService) -> list[str]:
    return sorted(str(file.readlink()) for file in Path(f"/proc/{daemon.process.pid}/fd").iterdir())


async def test_everything_is_given_back(near: DaemonService, far: DaemonService) -> None:
    before: list[int] = []
    opened = 0
    for n in range(4):
        source, memory = await engine_on(near, 0, Shape(num_blocks=1024))
        destination = await GpuEngine.on("destination", [far], [FAR], Shape(), adopted=False)
        await moved(source, destination, ("staged", "direct"))
        await destination.close()
        await end(source, memory)
        del source, memory, destination

        async def back(before: Sequence[int] = before, opened: int = opened) -> bool:
            gc.collect()
            fits = all(now >= then - SLACK for now, then in zip(free(), before, strict=True))
            return fits and open_files(near) <= opened

        if n > 1:
            try:
                await until(back, "memory and files are as after the second")
            except AssertionError as never:
                raise AssertionError(f"free {free()}, was {before}; {opened} files were {files_of(near)}") from never
        else:
            await asyncio.sleep(2)
            before[:] = free()
            opened = open_files(near)


async def test_expandable_segments_of_torch_are_adopted_and_a_killed_engine_gives_them_back(
    near: DaemonService, far: DaemonService
) -> None:
    destination = await GpuEngine.on("destination", [far], [FAR], Shape(), adopted=False)
    before: list[int] = []
    for n in range(2):
        engine_id, request_id = f"victim-{n}", uuid.uuid4().hex
        command = [sys.executable, gpu_engine.__file__, str(near.socket), engine_id, request_id]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: ASYNC220
        try:
            assert await asyncio.to_thread(victim.stdout.readline) == "published\n"
            async with RouterClient(near.url) as router:
                (notes,) = [engine.notes for engine in await router.engines() if engine.engine_id == engine_id]
            source = TestEngine(engine_id, "", Shape(), [near], [], iter(()), iter(()))
            blocks = Blocks(tuple(range(30)), 1)
            expected = destination.snapshot()
            sevens = Kv.random(480)
            destination.write_into(expected, Kv(_sevens(sevens.paged), _sevens(sevens.state)), blocks)
            await destination.receive(request_id, blocks, (0, 480), source=source.source())
            assert destination.differences(expected) == ""
            assert any("VMM-backed" in note for note in notes), notes
        finally:
            victim.kill()
            victim.wait()
            victim.stdout.close()

        async def gone(engine_id: str = engine_id) -> bool:
            async with RouterClient(near.url) as router:
                return engine_id not in [each.engine_id for each in await router.engines()]

        await until(gone, "the engine is retired")
        await asyncio.sleep(1)
        if n:
            now = free()
            assert all(a >= b - SLACK for a, b in zip(now, before, strict=True)), (now, before)
        before = free()
    await destination.close()


def _sevens(like: np.ndarray) -> np.ndarray:
    return np.full_like(like, 0x0707)


# a peer that sees its own GPU only


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
async def test_a_reader_from_which_the_sources_gpu_is_hidden_still_reads(
    fleet: Fleet, near: DaemonService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, as it was measured, or direct with the reason in /v1/peers: never wrong, and never stuck."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS[FAR].uuid)
    alone = await daemon(fleet, "alone", 0)
    monkeypatch.undo()
    source = await GpuEngine.on("source", [near], [0], Shape(), adopted=False)
    client = await EngineClient.connect(str(alone.socket), engine_id="alone", epoch=uuid.uuid4().hex, timeout_s=30)
    shape = Shape(axes=HND)
    region = await client.allocate(shape.nbytes(0))
    tensor = region.tensor()
    assert tensor.device.index == FAR, "named by UUID, not by number"
    mirror = Mirror(np.zeros(shape.nbytes(0), dtype=np.uint8))
    rank: GpuRank = await registered(client, "alone", client.epoch, shape, 0, mirror, tensor)
    order = list(range(shape.num_blocks))
    destination = GpuEngine(
        "alone", client.epoch, shape, [alone], [rank], itertools.cycle(order), itertools.cycle(order)
    )
    for _ in range(3):
        ways = await moved(source, destination, ("mapped", "direct", "staged"))
    print("ways of a reader that sees its own GPU only:", ways)
    await asyncio.gather(source.close(), destination.close())
