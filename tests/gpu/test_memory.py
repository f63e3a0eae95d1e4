"""GPU memory between processes. This file is also the other process: `python test_memory.py ROLE` talks JSON lines."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from needs import GPUS

from kvferry.errors import KvferryError
from kvferry.memory import CudaRegion, cuda, open_cuda_region, torch_pool
from kvferry.memory.pools import segment_nbytes
from kvferry.v1 import engine_pb2
from kvferryd.memory import Region
from kvferryd.memory.cuda import CudaProvider
from support import refused

GPU = GPUS[-1]
pytestmark = pytest.mark.gpu
MIB = 1 << 20
SLACK = 8 * MIB
"""The driver itself takes and returns a little."""


@dataclass
class Other:
    """The process at the other end."""

    process: subprocess.Popen[str]

    def ask(self, **question: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"the other process ended with {self.process.wait(30)}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextlib.contextmanager
def other(role: str, **environment: str) -> Iterator[Other]:
    # It sees one GPU, and so counts them otherwise than we do.
    seen = {**os.environ, "CUDA_VISIBLE_DEVICES": GPU.uuid, **environment}
    process = subprocess.Popen(
        [sys.executable, __file__, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=seen
    )
    try:
        yield Other(process)
        if process.poll() is None:
            process.stdin.close()
            assert process.wait(30) == 0, "the other process did not end well"
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def told(memory: engine_pb2.Memory) -> dict[str, Any]:
    given = memory.cuda
    return {
        "handle": given.handle.hex(),
        "offset": given.offset,
        "nbytes": memory.nbytes,
        "allocation_nbytes": given.allocation_nbytes,
        "device_uuid": given.device_uuid,
    }


def memory_of(exported: dict[str, Any], nbytes: int, **changed: Any) -> engine_pb2.Memory:
    given = {**exported, **changed}
    handle = bytes.fromhex(given.pop("handle"))
    return engine_pb2.Memory(region=3, nbytes=nbytes, cuda=engine_pb2.CudaAllocation(handle=handle, **given))


def free() -> int:
    return GPU.memory()[0]


def write(address: int, values: bytes) -> None:
    _move(len(values), lambda pinned: (address, pinned), values)


def read(address: int, nbytes: int) -> bytes:
    return _move(nbytes, lambda pinned: (pinned, address))


def _move(nbytes: int, ends: Callable[[int], tuple[int, int]], values: bytes = b"") -> bytes:
    pinned, stream = GPU.pinned(nbytes), GPU.stream()
    ctypes.memmove(pinned.address, values, len(values))
    stream.copy(*ends(pinned.address), nbytes)
    stream.synchronize()
    held = ctypes.string_at(pinned.address, nbytes)
    pinned.close()
    stream.close()
    return held


@pytest.fixture(scope="module")
def provider() -> CudaProvider:
    return CudaProvider(GPU.uuid)


@pytest.fixture
def region(provider: CudaProvider) -> Iterator[Region]:
    region = provider.allocate(3 * MIB + 5)
    yield region
    region.close()


@pytest.fixture
def mapped() -> dict[tuple[int, bytes], list[int]]:
    """Mappings of this process before the test, by other modules' engines that live on."""
    return {key: [*entry] for key, entry in cuda._mappings.items()}


def test_a_region_is_zeroed_alone_in_whole_granules_and_exported(region: Region) -> None:
    assert region.owned and region.slow_source == ""
    assert (region.span.kind, region.span.device, region.span.nbytes) == ("cuda", GPU.index, 3 * MIB + 5)
    assert not any(read(region.span.address, 3 * MIB + 5))
    exported = region.exported(7)
    assert (exported.region, exported.nbytes, exported.cuda.offset) == (7, 3 * MIB + 5, 0)
    assert exported.cuda.allocation_nbytes == 4 * MIB
    assert GPU.attributes(region.span.address).legacy_ipc


def test_both_processes_see_what_the_other_writes(region: Region) -> None:
    write(region.span.address, b"from the daemon")
    with other("engine") as engine:
        assert engine.ask(do="open", **told(region.exported(0))) == {"index": 0}
        assert bytes.fromhex(engine.ask(do="read", at=0, count=15)["bytes"]) == b"from the daemon"
        engine.ask(do="write", at=3 * MIB, value=9, count=5)
        assert read(region.span.address + 3 * MIB, 5) == bytes([9] * 5)


def test_a_tensor_outlives_the_close_of_its_region(region: Region) -> None:
    write(region.span.address, bytes([5] * 100))
    with other("engine") as engine:
        engine.ask(do="open", **told(region.exported(0)))
        assert engine.ask(do="close_then_sum", count=100) == {"sum": 500, "mappings": 1, "after": 0}


@pytest.mark.parametrize(
    ("nbytes", "changed", "code"),
    [
        (4 * MIB + 1, {}, "region_out_of_bounds"),
        (MIB, {"offset": 3 * MIB + 1}, "region_out_of_bounds"),
        (5 * MIB, {"allocation_nbytes": 1 << 40}, "region_out_of_bounds"),
        (0, {}, "region_out_of_bounds"),
        (MIB, {"handle": "00" * 63}, "malformed_handle"),
        (MIB, {"handle": "11" * 64}, "cuda_ipc_failed"),
        (MIB, {"device_uuid": "GPU-00000000-0000-0000-0000-000000000000"}, "wrong_gpu"),
    ],
)
def test_what_is_not_inside_the_engines_allocation_is_not_adopted(
    provider: CudaProvider, mapped: dict[tuple[int, bytes], list[int]], nbytes: int, changed: dict[str, Any], code: str
) -> None:
    with other("engine") as engine:
        exported = engine.ask(do="alloc", nbytes=4 * MIB)
        with refused(code) as caught:
            provider.adopt(memory_of(exported, nbytes, **changed))
        assert caught.value.remedy
    assert cuda._mappings == mapped


def test_host_memory_is_not_adopted_beside_a_gpu(provider: CudaProvider) -> None:
    with pytest.raises(KvferryError, match="adopts CUDA memory only"):
        provider.adopt(engine_pb2.Memory(nbytes=1, handed=engine_pb2.HandedFile(ticket="t")))


def test_adopted_memory_is_the_engines_own_and_said_to_be_slow(
    provider: CudaProvider, mapped: dict[tuple[int, bytes], list[int]]
) -> None:
    with other("engine") as engine:
        exported = engine.ask(do="tensor", nbytes=MIB // 2, value=6)
        adopted = provider.adopt(memory_of(exported, MIB // 2))
        assert not adopted.owned
        assert "staged or mapped" in adopted.slow_source
        assert read(adopted.span.address, MIB // 2) == bytes([6]) * (MIB // 2)
        assert adopted.exported(3) == memory_of(exported, MIB // 2), "a peer gets the engine's own handle"
        adopted.close()
        adopted.close()
    assert cuda._mappings == mapped


def test_vmm_memory_has_no_handle_and_says_so() -> None:
    with other("engine", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as engine:
        answer = engine.ask(do="tensor", nbytes=32 * MIB, value=1)
        assert answer["code"] == "not_exportable"
        assert "expandable_segments" in answer["message"]


def test_opens_of_one_allocation_share_a_mapping_until_the_last_close(
    provider: CudaProvider, mapped: dict[tuple[int, bytes], list[int]]
) -> None:
    with other("engine") as engine:
        exported = engine.ask(do="alloc", nbytes=4 * MIB)
        first, second = (provider.adopt(memory_of(exported, MIB, offset=offset)) for offset in (0, MIB))
        assert second.span.address == first.span.address + MIB
        first.close()
        first.close()
        assert len(read(second.span.address, MIB)) == MIB
        second.close()
        assert cuda._mappings == mapped


def test_a_hundred_opens_and_allocations_leave_no_memory_taken(provider: CudaProvider) -> None:
    with other("engine") as engine:
        exported = engine.ask(do="alloc", nbytes=64 * MIB)
        provider.adopt(memory_of(exported, MIB)).close()
        provider.allocate(64 * MIB).close()
        before = free()
        for _ in range(100):
            provider.adopt(memory_of(exported, 64 * MIB)).close()
            provider.allocate(64 * MIB).close()
        assert abs(free() - before) <= SLACK


def test_an_importer_killed_in_the_middle_leaves_the_memory_to_its_owner(provider: CudaProvider) -> None:
    before = free()
    region = provider.allocate(256 * MIB)
    with other("engine") as engine:
        engine.ask(do="open", **told(region.exported(0)))
        engine.ask(do="write", at=0, value=4, count=MIB)
        engine.kill()
    assert read(region.span.address, MIB) == bytes([4]) * MIB
    region.close()
    assert abs(free() - before) <= SLACK


def test_memory_of_a_killed_engine_is_readable_and_taken_until_it_is_closed(provider: CudaProvider) -> None:
    before = free()
    with other("engine") as engine:
        exported = engine.ask(do="alloc", nbytes=256 * MIB)
        adopted = provider.adopt(memory_of(exported, 256 * MIB))
        engine.kill()
    assert len(read(adopted.span.address, MIB)) == MIB
    assert before - free() >= 256 * MIB - SLACK
    adopted.close()
    assert abs(free() - before) <= SLACK


def test_any_thread_may_call(provider: CudaProvider) -> None:
    outcome: list[bytes] = []

    def work() -> None:
        region = provider.allocate(MIB)
        outcome.append(read(region.span.address, 8))
        region.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcome == [bytes(8)] * 4


def test_too_much_memory_is_refused_with_what_is_free(provider: CudaProvider) -> None:
    with refused("out_of_memory", match=r"are free"):
        provider.allocate(1 << 42)


def test_errors_carry_the_drivers_own_name() -> None:
    with pytest.raises(KvferryError) as caught:
        GPU.free(12345)
    assert caught.value.value == "CUDA_ERROR_INVALID_VALUE"
    with refused("unknown_gpu", match="visible here") as caught:
        cuda.device("cuda:99")


def test_torch_places_a_cache_inside_a_region(provider: CudaProvider) -> None:
    region = provider.allocate(segment_nbytes(30 * MIB) + segment_nbytes(1000))
    with other("engine") as engine:
        engine.ask(do="open", **told(region.exported(0)))
        answer = engine.ask(do="pool", sizes=[30 * MIB, 500, 400], value=8)
        assert answer["inside"] == [True, True, True]
        assert answer["outside"] is False, "what is allocated after the pool lies elsewhere"
        assert read(region.span.address + answer["offsets"][0], 30 * MIB) == bytes([8]) * (30 * MIB)
        assert engine.ask(do="drop_pool") == {"mappings": 0}
    region.close()


def test_a_region_too_small_for_torchs_segments_is_an_error_that_says_so(provider: CudaProvider) -> None:
    region = provider.allocate(4 * MIB)
    with other("engine") as engine:
        engine.ask(do="open", **told(region.exported(0)))
        answer = engine.ask(do="pool", sizes=[3 * MIB], value=1)
        assert answer["code"] == "region_full"
        assert str(20 * MIB) in answer["message"]
    region.close()


class Engine:
    """The work of the other process; it keeps what it made until told otherwise."""

    def __init__(self) -> None:
        self.region: CudaRegion | None = None
        self.kept: list[Any] = []

    def open(self, handle: str, **where: Any) -> dict[str, Any]:
        self.region = open_cuda_region(bytes.fromhex(handle), **where)
        return {"index": self.region.device.index}

    def read(self, at: int, count: int) -> dict[str, Any]:
        return {"bytes": bytes(self.region.tensor()[at : at + count].tolist()).hex()}

    def write(self, at: int, value: int, count: int) -> dict[str, Any]:
        self.region.tensor()[at : at + count] = value
        cuda.devices()[0].synchronize()
        return {}

    def close_then_sum(self, count: int) -> dict[str, Any]:
        tensor = self.region.tensor()
        self.region.close()
        held = len(cuda._mappings)
        total = int(tensor[:count].sum())
        del tensor
        return {"sum": total, "mappings": held, "after": len(cuda._mappings)}

    def alloc(self, nbytes: int) -> dict[str, Any]:
        device = cuda.devices()[0]
        return self._exported(device.export(device.alloc(nbytes)))

    def tensor(self, nbytes: int, value: int) -> dict[str, Any]:
        import torch

        self.kept.append(torch.full((1000,), 1, dtype=torch.uint8, device="cuda"))
        tensor = torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.kept.append(tensor)
        return self._exported(cuda.devices()[0].export(tensor.data_ptr()))

    @staticmethod
    def _exported(exported: cuda.Exported) -> dict[str, Any]:
        return {
            "handle": exported.handle.hex(),
            "offset": exported.offset,
            "allocation_nbytes": exported.allocation_nbytes,
            "device_uuid": exported.device_uuid,
        }

    def pool(self, sizes: list[int], value: int) -> dict[str, Any]:
        import torch

        with torch_pool(self.region):
            made = [torch.full((size,), value, dtype=torch.uint8, device="cuda") for size in sizes]
        later = torch.full((MIB,), value, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.kept += [later, *made]
        return {
            "inside": [self._inside(tensor) for tensor in made],
            "outside": self._inside(later),
            "offsets": [tensor.data_ptr() - self.region.address for tensor in made],
        }

    def _inside(self, tensor: Any) -> bool:
        at = tensor.data_ptr() - self.region.address
        return 0 <= at <= self.region.nbytes - tensor.numel()

    def drop_pool(self) -> dict[str, Any]:
        import gc

        import torch

        self.kept.clear()
        self.region.close()
        gc.collect()
        torch.cuda.empty_cache()
        return {"mappings": len(cuda._mappings)}


def serve() -> None:
    engine = Engine()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = getattr(engine, question.pop("do"))(**question)
        except KvferryError as problem:
            answer = {"code": problem.code, "message": str(problem)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
