"""A small engine for trying a deployment without a model: `engine.py prefill|decode REQUEST [PREFILL_DAEMON]`.

prefill writes a pattern into its blocks, publishes it, and ends when it has been read. decode has larger blocks in
another order: it reads the pattern from the daemon at PREFILL_DAEMON and compares every byte. ENGINE_SOCKET names
another socket than that of a container.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid

import numpy as np

from kvferry.engine import EngineClient
from kvferry.manifest import ManifestBuilder, ModelInfo, Shard
from kvferry.memory import SharedRegion
from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable

SOCKET = os.environ.get("ENGINE_SOCKET", "/run/kvferry/engine.sock")
TOKENS, LAYERS, HEADS, DIM = 500, 4, 8, 64
AXES = ("block", "slot", "head", "dim")
BLOCK_SIZE = {"prefill": 16, "decode": 24}


async def main(role: str, request_id: str, source: str = "") -> None:
    size = BLOCK_SIZE[role]
    count = -(-TOKENS // size)
    epoch = uuid.uuid4().hex
    async with await EngineClient.connect(SOCKET, engine_id=role, epoch=epoch, timeout_s=60) as client:
        shape = (LAYERS, count + 3, size, HEADS, DIM)
        region = await client.allocate(int(np.prod(shape)) * 4)
        assert isinstance(region, SharedRegion), "the daemon runs beside a GPU: this engine is for host memory"
        cache = region.array().view(np.float32).reshape(shape)
        builder = ManifestBuilder(role, epoch, ModelInfo(name="pattern", fingerprint="1"), rank=0, world_size=1)
        builder.region(0, "host", nbytes=region.nbytes, address=region.address)
        builder.group("full", num_blocks=count + 3, block_size=size)
        for layer in range(LAYERS):
            builder.component(
                "full",
                layer=layer,
                name="k",
                array=cache[layer],
                axes=AXES,
                shard=Shard(axis="head", start=0, total=HEADS),
            )
        await client.register(builder.build())
        blocks = np.random.default_rng(len(role)).permutation(count + 3)[:count]
        tables = {"full": BlockTable.of(blocks.tolist())}
        if role == "prefill":
            for layer in range(LAYERS):
                padded = np.zeros((count * size, HEADS, DIM), np.float32)
                padded[:TOKENS] = pattern(layer)
                cache[layer, blocks] = padded.reshape(count, size, HEADS, DIM)
            lease = await client.publish(request_id, tables, TOKENS, ttl_s=60)
            print(f"published {TOKENS} tokens", flush=True)
            await lease.ended()
            print("they have been read")
            return
        began = time.perf_counter()
        given = SourceBody(engine_id="prefill", address=source)
        received = await client.receive(request_id, tables, (0, TOKENS), source=given)
        took_ms = (time.perf_counter() - began) * 1000
        for layer in range(LAYERS):
            found = cache[layer, blocks].reshape(-1, HEADS, DIM)[:TOKENS]
            if not np.array_equal(found, pattern(layer)):
                sys.exit(f"layer {layer} differs from what was published")
        print(f"received {received.nbytes} bytes in {took_ms:.0f} ms, handshake included; every byte is right")


def pattern(layer: int) -> np.ndarray:
    return np.random.default_rng(layer).random((TOKENS, HEADS, DIM), np.float32)


asyncio.run(main(*sys.argv[1:]))
