"""GPU memory under a keeper: the daemon dies, and the next one is given the same memory under a living engine.

On two GPUs: `pytest -s -m gpu tests/gpu/test_kept_gpu.py` prints a line of figures; with one, both
sides share it. A daemon takes about 10 s to load torch and Triton; the one that stands by has done so.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from needs import GPUS

# isort: split
import torch

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from gpu_engine import Mirror, describe
from keepers import children, eventually, kill, serving
from load import SHAPE, Engine, Load
from ranks import Bytes

from kvferry.blocking import BlockingEngineClient
from kvferry.manifest import Manifest
from kvferry.memory import CudaRegion
from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = pytest.mark.gpu
WAIT_S = 120.0
MIB = 1 << 20
SLACK = 64 * MIB
"""Memory that the driver itself takes and returns."""
LARGE = 4096 * MIB
"""Contexts come and go beside it."""
Seen = Callable[[str, object], None]


class GpuEngine(Engine):
    """Its cache lies on a GPU; `memory` is what it writes there."""

    def _registered(self, epoch: str) -> Bytes:
        region = self.client.allocate(SHAPE.nbytes(0))
        assert isinstance(region, CudaRegion) and region.outlives_daemon
        mirror = Mirror(np.zeros(region.nbytes, dtype=np.uint8))
        described = describe(self.name, epoch, SHAPE, 0, mirror).model_dump()
        described["regions"][0]["kind"] = "cuda"
        self.notes = self.client.register(Manifest.from_dict(described))
        self.region, self.tensor = region, region.tensor()
        return mirror.held

    def written(self) -> None:
        self.tensor.copy_(torch.from_numpy(self.memory))
        torch.cuda.synchronize(self.tensor.device)

    def held(self) -> Bytes:
        held: Bytes = self.tensor.cpu().numpy()
        return held


@pytest.fixture
def pair(own_fleet: Fleet, request: pytest.FixtureRequest) -> list[DaemonService]:
    """A source's daemon on the first GPU and a reader's on the last, each under a keeper."""
    ways = ["--way", getattr(request, "param", "auto")]
    gpus = {"source": GPUS[0], "reader": GPUS[-1]}
    daemons = [
        own_fleet.daemon(name, kept=True, flags=["--device", f"cuda:{gpu.index}", *ways]) for name, gpu in gpus.items()
    ]
    asyncio.run(own_fleet.ready(*daemons, timeout_s=WAIT_S))
    for daemon in daemons:
        eventually(lambda daemon=daemon: len(children(daemon)) == 2, "another daemon stands by")
    return daemons


@pytest.fixture
def load(pair: list[DaemonService], request_id: str) -> Iterator[Load]:
    engines = [GpuEngine(f"{daemon.name}-{request_id[-8:]}", daemon, "1") for daemon in pair]
    yield Load(*engines)
    for engine in engines:
        engine.client.close()


def paths(daemon: DaemonService) -> set[str]:
    """Paths of transfers that are done, as the log of all its daemons says."""
    return {word for word in ("mapped", "staged", "direct") if f'"{word}"' in daemon.log.read_text()}


@pytest.mark.parametrize("pair", ["auto", "staged"], indirect=True)
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_memory_of_the_keeper_is_read_and_written_through_the_deaths_of_daemons(
    load: Load, pair: list[DaemonService], kills: int, record_property: Seen
) -> None:
    rng, recovered = random.Random(1), []
    with load.running():
        load.more()
        deaths = itertools.cycle([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
        for count, number in zip(range(kills), deaths, strict=False):
            victims = [pair, pair[:1], pair[1:]][count % 3]
            gone = [(daemon, kill(daemon, number)) for daemon in victims]
            recovered.append(load.more(1))
            for daemon, pid in gone:
                eventually(lambda daemon=daemon, pid=pid: serving(daemon) != pid, "another daemon serves")
            load.more(rng.randrange(5, 15))
    assert load.failed.total() >= kills // 4
    assert load.source.client.alive and load.reader.client.alive
    figures = f"{load.done} done, 0 wrong; failed: {dict(load.failed)}; paths {sorted(paths(pair[1]))}"
    print(f"{kills} kills: {figures}; back within {max(recovered):.1f} s, median {sorted(recovered)[kills // 2]:.1f}")


def test_what_lies_in_the_keepers_memory_stays_when_the_daemon_dies(load: Load, pair: list[DaemonService]) -> None:
    engine = load.source
    assert isinstance(engine, GpuEngine) and any("keeper" in note for note in engine.notes)
    engine.tensor.fill_(0x5A)
    torch.cuda.synchronize()
    pid = kill(pair[0], signal.SIGKILL)
    eventually(lambda: serving(pair[0]) != pid and engine.attached.is_set(), "another daemon serves")
    assert bool((engine.tensor == 0x5A).all())


@pytest.mark.parametrize("daemon_dies", [False, True])
def test_the_keeper_frees_what_nobody_holds(own_fleet: Fleet, request_id: str, daemon_dies: bool) -> None:
    gpu, said = GPUS[0], queue.Queue[str]()
    daemon = own_fleet.daemon("alone", kept=True, flags=["--device", f"cuda:{gpu.index}", "--way", "mapped"])
    asyncio.run(own_fleet.ready(daemon, timeout_s=WAIT_S))
    eventually(lambda: len(children(daemon)) == 2, "another daemon stands by")
    for nbytes in (MIB, LARGE):  # the first time all processes make their contexts
        client = BlockingEngineClient.connect(
            str(daemon.socket), engine_id=f"{request_id[-8:]}-{nbytes}", epoch="1", timeout_s=WAIT_S, say=said.put
        )
        before = gpu.memory()[0]
        region = client.allocate(nbytes)
        if daemon_dies:
            kill(daemon, signal.SIGKILL)
            while "there again" not in said.get(timeout=WAIT_S):
                pass
        assert nbytes < LARGE or before - gpu.memory()[0] > LARGE // 2, "the memory is there"
        region.close()
        client.close()
    eventually(lambda: gpu.memory()[0] >= before - SLACK, "the memory is back")


def test_a_keeper_that_dies_takes_the_memory_out_of_reach_and_the_engine_is_told(
    own_fleet: Fleet, load: Load, pair: list[DaemonService]
) -> None:
    engine, daemon = load.source, pair[0]
    os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.process.wait(WAIT_S)
    assert "has gone" in engine.said.get(timeout=WAIT_S)
    asyncio.run(own_fleet.ready(own_fleet.again(daemon), timeout_s=WAIT_S))
    eventually(lambda: "start the engine again" in "".join(engine.said.queue), "the engine is told")
