"""Two engines in miniature: a cache in memory of the daemon's, and one request that travels from one to the other.

    python examples/engine.py prefill SOCKET     writes the KV of one request, publishes it, ends when it has been read
    python examples/engine.py decode SOCKET      reserves blocks for it, waits for a router's order, compares what came

SOCKET is the `engine_socket` of the daemon beside the engine; the two engines have a daemon each. examples/router.py
gives the order. There is no model here: the KV is numbers that both know. Their layouts differ, as those of engines do.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from kvferry import BlockTable, EngineClient, KvferryError, ManifestBuilder, ModelInfo, Shard, SharedRegion

LAYERS, HEADS, DIM, TOKENS, BLOCKS = 2, 4, 64, 41, 64
REQUEST = "req-1"

Cache = npt.NDArray[np.float32]


@asynccontextmanager
async def engine(
    socket: str, engine_id: str, block_size: int, axes: tuple[str, ...]
) -> AsyncIterator[tuple[EngineClient, Cache]]:
    """A session with the daemon, memory from it, and what lies where in that memory. It ends with the block."""
    epoch = uuid.uuid4().hex  # epoch of this start of the engine; the same on all of its ranks
    async with await EngineClient.connect(socket, engine_id=engine_id, epoch=epoch, timeout_s=120) as client:
        sizes = {"block": BLOCKS, "slot": block_size, "head": HEADS, "dim": DIM}
        shape = (LAYERS, 2, *(sizes[axis] for axis in axes))

        region = await client.allocate(int(np.prod(shape)) * 4)  # owned by the daemon, mapped here
        assert isinstance(region, SharedRegion), "this daemon runs beside a GPU; start one with --device cpu"
        cache = region.array().view(np.float32).reshape(shape)

        builder = ManifestBuilder(engine_id, epoch, ModelInfo(name="example", fingerprint="example-1"))
        builder.region(0, "host", nbytes=region.nbytes, address=region.address)
        builder.group("full", num_blocks=BLOCKS, block_size=block_size)
        heads = Shard(axis="head", start=0, total=HEADS)  # all of them: this engine has one rank
        for layer in range(LAYERS):
            for index, name in enumerate(("k", "v")):
                builder.component("full", layer=layer, name=name, array=cache[layer, index], axes=axes, shard=heads)
        await client.register(builder.build())
        yield client, cache


def computed() -> Cache:
    """The cache that the model would have computed: [layer, k or v, token, head, dim]."""
    return np.random.default_rng(7).random((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)


async def prefill(socket: str) -> None:
    async with engine(socket, "prefill", 16, ("block", "slot", "head", "dim")) as (client, cache):
        for token in range(TOKENS):
            cache[:, :, (7, 3, 9)[token // 16], token % 16] = computed()[:, :, token]

        tables = {"full": BlockTable.of([7, 3, 9])}  # the blocks of this request, in the order of its tokens
        lease = await client.publish(REQUEST, tables, num_tokens=TOKENS, metadata=b"first token: 42")
        print(f"published {TOKENS} tokens of {REQUEST}", flush=True)
        state = await lease.ended()  # from now on these blocks may be used again
        print(f"{REQUEST} was read: its lease is {state}")


async def decode(socket: str) -> None:
    async with engine(socket, "decode", 24, ("block", "head", "slot", "dim")) as (client, cache):
        tables = {"full": BlockTable.of([12, 5])}  # free blocks, reserved for this request
        # Without source= it waits for a router's order. It returns when the KV is here, and whole.
        received = await client.receive(REQUEST, tables, tokens=(0, TOKENS), deadline_s=120)

        expected = computed()
        for token in range(TOKENS):
            assert np.array_equal(cache[:, :, (12, 5)[token // 24], :, token % 24], expected[:, :, token]), token
        print(f"received {received.nbytes} bytes, {received.metadata.decode()}; all {TOKENS} tokens are right")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("prefill", "decode"):
        sys.exit(__doc__)
    try:
        asyncio.run({"prefill": prefill, "decode": decode}[sys.argv[1]](sys.argv[2]))
    except KvferryError as error:
        sys.exit(f"{error.code}: {error}")
