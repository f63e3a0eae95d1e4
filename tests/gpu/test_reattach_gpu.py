"""A daemon beside a GPU that comes back: the engine's own memory is handed over again, the daemon's is gone."""

from __future__ import annotations

import asyncio
import queue
import signal
import uuid
from collections.abc import Iterator

import needs  # noqa: F401  skips without a GPU
import pytest

# isort: split
import torch

from kvferry.blocking import BlockingEngineClient
from kvferry.errors import KvferryError
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import cuda_memory
from kvferry.schemas import LeaseState
from kvferry.tables import BlockTable
from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = pytest.mark.gpu
WAIT_S = 60.0
CACHE = (16, 16, 2, 8)
"""Blocks, slots, heads, dim."""


@pytest.fixture
def daemon(own_fleet: Fleet) -> DaemonService:
    started = own_fleet.daemon("beside", flags=["--device", "cuda:0"])
    asyncio.run(own_fleet.ready(started, timeout_s=WAIT_S))
    return started


@pytest.fixture
def said() -> queue.Queue[str]:
    return queue.Queue()


@pytest.fixture
def client(daemon: DaemonService, said: queue.Queue[str]) -> Iterator[BlockingEngineClient]:
    with BlockingEngineClient.connect(
        str(daemon.socket), engine_id="e", epoch=uuid.uuid4().hex, timeout_s=WAIT_S, say=said.put
    ) as client:
        yield client


def restarted(own_fleet: Fleet, daemon: DaemonService, said: queue.Queue[str]) -> None:
    daemon.signal(signal.SIGKILL)
    daemon.process.wait(WAIT_S)
    assert "has gone" in said.get(timeout=WAIT_S)
    asyncio.run(own_fleet.ready(own_fleet.again(daemon), timeout_s=WAIT_S))


def test_memory_of_the_engine_and_new_fences_are_handed_to_the_next_daemon(
    own_fleet: Fleet, daemon: DaemonService, said: queue.Queue[str], client: BlockingEngineClient
) -> None:
    cache = torch.zeros(CACHE, dtype=torch.float16, device="cuda:0")
    memory = cuda_memory(cache)
    client.adopt(memory)
    client.open_fences(0)
    builder = ManifestBuilder("e", client.client.epoch, ModelInfo(name="m", fingerprint="f"))
    builder.region(0, "cuda", nbytes=memory.nbytes, address=memory.address)
    builder.group("full", num_blocks=CACHE[0], block_size=CACHE[1])
    builder.component("full", layer=0, name="k", array=cache, axes=("block", "slot", "head", "dim"))
    client.register(builder.build())
    restarted(own_fleet, daemon, said)
    assert "is there again" in said.get(timeout=WAIT_S)

    after = client.written(torch.cuda.current_stream())
    assert after is not None
    lease = client.publish("r", {"full": BlockTable.of([3, 1])}, 20, after=after)
    client.abort("r")
    assert lease.ended.result(WAIT_S) is LeaseState.REVOKED


def test_memory_of_the_daemon_that_has_gone_is_said_to_need_a_new_engine(
    own_fleet: Fleet, daemon: DaemonService, said: queue.Queue[str], client: BlockingEngineClient
) -> None:
    client.allocate(4 << 20)
    restarted(own_fleet, daemon, said)
    assert "start the engine again" in said.get(timeout=WAIT_S)
    with pytest.raises(KvferryError):
        client.publish("r", {"full": BlockTable.of([1])}, 10)
