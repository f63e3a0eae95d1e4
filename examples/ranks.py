"""Two engines of two ranks each: every rank has a daemon of its own, holds half of the heads, and moves its own share.

    python examples/ranks.py prefill SOCKET SOCKET                writes and publishes the KV of one request
    python examples/ranks.py decode SOCKET SOCKET PREFILL_PEER    reads it from there and compares what came

A SOCKET is the `engine_socket` of the daemon beside one rank, rank 0 first; PREFILL_PEER is the peer address of any
daemon of prefill. The daemons of an engine find each other by `roster`, the peer address of rank 0's daemon. Here the
ranks are tasks of one process; in an engine each is a process, and its scheduler gives them what they have to agree on:

- one `epoch` for this start of the engine,
- one number for each lease (`publish`), and one for each attempt to receive (`receive`),
- every rank publishes and receives by itself, with tables of its own blocks. An order at any of them is for all.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry import BlockTable, EngineClient, KvferryError, ManifestBuilder, ModelInfo, Shard, SharedRegion, SourceBody

LAYERS, HEADS, DIM, TOKENS, BLOCKS = 2, 4, 64, 41, 64
REQUEST = "req-1"
Cache = npt.NDArray[np.float32]


@dataclass
class Rank:
    client: EngineClient
    cache: Cache
    heads: slice
    """Heads that it holds, of all heads of the model."""


@asynccontextmanager
async def engine(
    sockets: Sequence[str], engine_id: str, block_size: int, axes: tuple[str, ...]
) -> AsyncIterator[list[Rank]]:
    """All ranks, attached and registered; their sessions end with the block, whatever happens in it."""
    epoch = uuid.uuid4().hex
    async with AsyncExitStack() as stack:
        ranks = [rank_of(stack, sockets, rank, engine_id, epoch, block_size, axes) for rank in range(len(sockets))]
        yield await asyncio.gather(*ranks)


async def rank_of(
    stack: AsyncExitStack, sockets: Sequence[str], rank: int, engine_id: str, epoch: str, block_size: int,
    axes: tuple[str, ...],
) -> Rank:  # fmt: skip
    world_size = len(sockets)
    client = await stack.enter_async_context(
        await EngineClient.connect(
            sockets[rank], engine_id=engine_id, epoch=epoch, rank=rank, world_size=world_size, timeout_s=120
        )
    )
    share = HEADS // world_size
    shard = Shard(axis="head", start=rank * share, total=HEADS)  # which of the model's heads lie in this rank's cache
    sizes = {"block": BLOCKS, "slot": block_size, "head": share, "dim": DIM}
    shape = (LAYERS, 2, *(sizes[axis] for axis in axes))
    region = await client.allocate(int(np.prod(shape)) * 4)
    assert isinstance(region, SharedRegion), "this daemon runs beside a GPU; start one with --device cpu"
    cache = region.array().view(np.float32).reshape(shape)

    model, parallel = ModelInfo(name="example", fingerprint="example-1"), {"tp": world_size}
    builder = ManifestBuilder(engine_id, epoch, model, rank=rank, world_size=world_size, parallel=parallel)
    builder.region(0, "host", nbytes=region.nbytes, address=region.address)
    builder.group("full", num_blocks=BLOCKS, block_size=block_size)
    for layer in range(LAYERS):
        for index, name in enumerate(("k", "v")):
            builder.component("full", layer=layer, name=name, array=cache[layer, index], axes=axes, shard=shard)
    await client.register(builder.build())
    return Rank(client, cache, slice(shard.start, shard.start + share))


def computed() -> Cache:
    """The cache that the model would have computed: [layer, k or v, token, head, dim]."""
    return np.random.default_rng(7).random((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)


async def prefill(*sockets: str) -> None:
    async with engine(sockets, "prefill", 16, ("block", "slot", "head", "dim")) as ranks:
        for rank in ranks:
            for token in range(TOKENS):
                rank.cache[:, :, (7, 3, 9)[token // 16], token % 16] = computed()[:, :, token, rank.heads]

        tables = {"full": BlockTable.of([7, 3, 9])}  # here both ranks have taken the same blocks; they need not
        publishing = (rank.client.publish(REQUEST, tables, num_tokens=TOKENS, lease=1) for rank in ranks)
        leases = await asyncio.gather(*publishing)
        print(f"published {TOKENS} tokens of {REQUEST} on {len(ranks)} ranks", flush=True)
        states = await asyncio.gather(*(lease.ended() for lease in leases))  # each rank reuses its own blocks then
        print(f"{REQUEST} was read: its leases are {', '.join(states)}")


async def decode(first: str, second: str, prefill_peer: str) -> None:
    async with engine((first, second), "decode", 24, ("block", "head", "slot", "dim")) as ranks:
        tables = {"full": BlockTable.of([12, 5])}
        source = SourceBody(engine_id="prefill", address=prefill_peer)  # without it: by a router's order
        receiving = (
            rank.client.receive(REQUEST, tables, (0, TOKENS), source=source, attempt=1, deadline_s=120)
            for rank in ranks
        )
        received = await asyncio.gather(*receiving)

        expected = computed()
        for rank in ranks:
            for token in range(TOKENS):
                came = rank.cache[:, :, (12, 5)[token // 24], :, token % 24]
                assert np.array_equal(came, expected[:, :, token, rank.heads]), token
        nbytes = " + ".join(str(each.nbytes) for each in received)
        print(f"received {nbytes} bytes; all {TOKENS} tokens are right on {len(ranks)} ranks")


if __name__ == "__main__":
    if (sys.argv[1:2], len(sys.argv)) not in ((["prefill"], 4), (["decode"], 5)):
        sys.exit(__doc__)
    try:
        asyncio.run({"prefill": prefill, "decode": decode}[sys.argv[1]](*sys.argv[2:]))
    except KvferryError as error:
        sys.exit(f"{error.code}: {error}")
