"""An engine for tests whose cache lies on GPUs: `TestEngine` of the integration tests, with a mirror on the host.

This file is also an engine of its own process: `python gpu_engine.py SOCKET ENGINE_ID REQUEST_ID [fenced]` adopts torch
memory, publishes (behind a fence that its stream will not reach), says so, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "integration"))

import numpy as np
import torch
from ranks import HND, NHD, Blocks, Bytes, Kv, Shape, TestEngine, describe

from kvferry.engine import EngineClient
from kvferry.manifest import Manifest
from kvferry.memory import cuda_memory
from kvferryd.demo.fleet import DaemonService

SHAPES = {
    "same layout": (Shape(), Shape()),
    "NHD to HND": (Shape(axes=NHD), Shape(axes=HND)),
    "block 16 to 64": (Shape(block_size=16), Shape(block_size=64, num_blocks=16)),
    "block 24 to 16, HND to NHD": (Shape(block_size=24, axes=HND), Shape(block_size=16)),
}
"""Caches of a source and of a destination."""


@dataclass
class Mirror:
    """The cache as it should be, in host memory, at the addresses that the manifest is built from."""

    held: Bytes

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def address(self) -> int:
        return int(self.held.__array_interface__["data"][0])

    def array(self) -> Bytes:
        return self.held


@dataclass
class GpuRank:
    client: EngineClient
    manifest: Manifest
    mirror: Mirror
    tensor: torch.Tensor

    @property
    def memory(self) -> Bytes:
        torch.cuda.synchronize(self.tensor.device)
        return self.tensor.cpu().numpy()


@dataclass
class GpuEngine(TestEngine):
    """`write` puts KV onto the GPUs; `differences` compares what is there."""

    @classmethod
    async def on(
        cls, engine_id: str, daemons: Sequence[DaemonService], gpus: Sequence[int], shape: Shape, *, adopted: bool
    ) -> GpuEngine:
        """A rank on each of these GPUs. adopted: torch allocates the cache; otherwise the daemon does."""
        epoch, ranks = uuid.uuid4().hex, []
        for rank, (daemon, gpu) in enumerate(zip(daemons, gpus, strict=True)):
            client = await EngineClient.connect(
                str(daemon.socket), engine_id=engine_id, epoch=epoch, rank=rank, world_size=len(gpus), timeout_s=30
            )
            ranks.append(await _rank(client, engine_id, epoch, shape, rank, gpu, adopted))
        order = np.random.default_rng(7).permutation(shape.num_blocks).tolist()
        return cls(engine_id, epoch, shape, daemons, ranks, itertools.cycle(order), itertools.cycle(order))

    def write_into(self, memories: Any, kv: Kv, blocks: Blocks, tokens: Any = None, *, state: bool = True) -> None:
        super().write_into(memories, kv, blocks, tokens, state=state)

    def write(self, kv: Kv, blocks: Blocks, tokens: Any = None, *, state: bool = True) -> None:
        held = self.snapshot()
        self.write_into(held, kv, blocks, tokens, state=state)
        for rank, wanted in zip(self.ranks, held, strict=True):
            rank.tensor.copy_(torch.from_numpy(wanted))
            torch.cuda.synchronize(rank.tensor.device)


async def _rank(
    client: EngineClient, engine_id: str, epoch: str, shape: Shape, rank: int, gpu: int, adopted: bool
) -> GpuRank:
    mirror = Mirror(np.zeros(shape.nbytes(rank), dtype=np.uint8))
    if adopted:
        tensor = torch.zeros(mirror.nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")
        torch.cuda.synchronize(gpu)
        await client.adopt(cuda_memory(tensor))
    else:
        region = await client.allocate(mirror.nbytes)
        tensor = region.tensor()
        assert tensor.device.index == gpu
    return await registered(client, engine_id, epoch, shape, rank, mirror, tensor)


async def registered(
    client: EngineClient, engine_id: str, epoch: str, shape: Shape, rank: int, mirror: Mirror, tensor: torch.Tensor
) -> GpuRank:
    described = describe(engine_id, epoch, shape, rank, mirror).model_dump()
    described["regions"][0]["kind"] = "cuda"
    manifest = Manifest.from_dict(described)
    await client.register(manifest)
    return GpuRank(client, manifest, mirror, tensor)


async def publish_and_wait(socket: str, engine_id: str, request_id: str, fenced: str = "") -> None:
    shape = Shape(num_blocks=8192)
    client = await EngineClient.connect(socket, engine_id=engine_id, epoch=uuid.uuid4().hex, timeout_s=30)
    rank = await _rank(client, engine_id, client.epoch, shape, 0, 0, True)
    rank.tensor.fill_(7)
    torch.cuda.synchronize()
    blocks = Blocks(tuple(range(100)), 3)
    fence = None
    if fenced:
        await client.open_fences()
        torch.cuda._sleep(1 << 40)
        fence = await client.fence(torch.cuda.current_stream())
    await client.publish(request_id, blocks.tables(), 1600, after=fence)
    sys.stdout.write("published\n")
    sys.stdout.flush()
    await client.closed.wait()


if __name__ == "__main__":
    asyncio.run(publish_and_wait(*sys.argv[1:]))
