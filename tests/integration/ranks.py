"""An engine for tests: every rank a real client of a real daemon, its cache a numpy array in any layout.

A request's KV does not depend on how an engine holds it: `Kv` is the whole logical array, and an engine writes its
share of it, or is compared with it, element by element.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fleet import TIMEOUT_S

from kvferry.engine import EngineClient, Lease, Received
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo, Shard
from kvferry.memory import SharedRegion
from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.demo.fleet import DaemonService

LAYERS, HEADS, DIM, STATE = 3, 6, 8, 5
NHD, HND = ("block", "slot", "head", "dim"), ("block", "head", "slot", "dim")
ITEM = 2
"""Bytes of one element: a KV cache of 16-bit numbers."""
TOKEN_NBYTES = LAYERS * 2 * HEADS * DIM * ITEM
STATE_NBYTES = HEADS * STATE * ITEM
Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Kv:
    """A request's KV: `paged` [layer, k or v, token, head, dim], and the state of a recurrent layer [head, n]."""

    paged: Array
    state: Array

    @classmethod
    def random(cls, tokens: int, seed: int | None = None) -> Kv:
        rng = np.random.default_rng(seed)
        paged = rng.integers(0, 1 << 16, (LAYERS, 2, tokens, HEADS, DIM), dtype=np.uint16)
        return cls(paged, rng.integers(0, 1 << 16, (HEADS, STATE), dtype=np.uint16))

    @property
    def tokens(self) -> int:
        return self.paged.shape[2]


@dataclass(frozen=True)
class Shape:
    """How an engine holds the model. `heads`: the KV heads of each rank; `axes`: the cache's, outermost first.
    `layers`: of each stage of a pipeline, the last of which has the states; all, and the states, on every rank where
    there is none."""

    heads: tuple[tuple[int, int], ...] = ((0, HEADS),)
    axes: tuple[str, ...] = NHD
    block_size: int = 16
    num_blocks: int = 64
    layers: tuple[tuple[int, int], ...] = ()

    @classmethod
    def pp(cls, *stages: int, **more: Any) -> Shape:
        """So many layers on each."""
        edges = [0, *itertools.accumulate(stages)]
        return cls(((0, HEADS),) * len(stages), layers=tuple(itertools.pairwise(edges)), **more)

    def layers_of(self, rank: int) -> range:
        return range(*self.layers[rank]) if self.layers else range(LAYERS)

    def has_states(self, rank: int) -> bool:
        return not self.layers or rank == len(self.layers) - 1

    @classmethod
    def tp(cls, ranks: int, **more: Any) -> Shape:
        edges = np.linspace(0, HEADS, ranks + 1).round().astype(int).tolist()
        return cls(tuple(itertools.pairwise(edges)), **more)

    def nbytes(self, rank: int) -> int:
        return self._paged(rank) + self.num_blocks * self._width(rank) * STATE * ITEM

    def _of(self, rank: int, kv: Kv) -> Array:
        layers = self.layers_of(rank)
        return kv.paged[layers.start : layers.stop]

    def _width(self, rank: int) -> int:
        start, stop = self.heads[rank]
        return stop - start

    def _paged(self, rank: int) -> int:
        return len(self.layers_of(rank)) * 2 * self.num_blocks * self.block_size * self._width(rank) * DIM * ITEM

    def arrays(self, rank: int, memory: Bytes) -> tuple[Array, Array]:
        """Views of a rank's memory: [layer, k or v, *axes], and [block, head, n] of the states."""
        extents = {"block": self.num_blocks, "slot": self.block_size, "head": self._width(rank), "dim": DIM}
        cut = self._paged(rank)
        layers = len(self.layers_of(rank))
        paged = memory[:cut].view(np.uint16).reshape(layers, 2, *(extents[axis] for axis in self.axes))
        state = memory[cut:].view(np.uint16).reshape(self.num_blocks, self._width(rank), STATE)
        return paged, state

    def write(self, rank: int, memory: Bytes, kv: Kv, blocks: Blocks, tokens: tuple[int, int], state: bool) -> None:
        """Put this rank's share of the tokens into the blocks."""
        start, stop = self.heads[rank]
        paged, states = self.arrays(rank, memory)
        lying = np.moveaxis(paged, [2 + self.axes.index(axis) for axis in NHD], [2, 3, 4, 5])
        at = np.arange(max(tokens[0], blocks.first_token), tokens[1]) - blocks.first_token
        if len(blocks.ids):
            ids = np.asarray(blocks.ids)[at // self.block_size]
            lying[:, :, ids, at % self.block_size] = self._of(rank, kv)[:, :, at + blocks.first_token, start:stop]
        if state and blocks.state is not None and self.has_states(rank):
            states[blocks.state] = kv.state[start:stop]

    def wrong(self, rank: int, memory: Bytes, kv: Kv, blocks: Blocks) -> int:
        """How many elements of this rank's share are not in the blocks."""
        start, stop = self.heads[rank]
        paged, states = self.arrays(rank, memory)
        lying = np.moveaxis(paged, [2 + self.axes.index(axis) for axis in NHD], [2, 3, 4, 5])
        at = np.arange(blocks.first_token, kv.tokens) - blocks.first_token
        ids = np.asarray(blocks.ids, dtype=int)[at // self.block_size]
        held = lying[:, :, ids, at % self.block_size]
        wrong = np.count_nonzero(held != self._of(rank, kv)[:, :, blocks.first_token :, start:stop])
        of_states = self.has_states(rank) and np.count_nonzero(states[blocks.state] != kv.state[start:stop])
        return int(wrong + of_states)


@dataclass(frozen=True)
class Blocks:
    """The blocks of one request; `state` None and no `ids` mean that nothing of the group is held or wanted."""

    ids: tuple[int, ...]
    state: int | None
    first_token: int = 0

    def tables(self) -> dict[str, BlockTable]:
        state = [] if self.state is None else [self.state]
        return {"full": BlockTable.of(self.ids, self.first_token), "state": BlockTable.of(state)}

    def json(self) -> dict[str, Any]:
        state = [] if self.state is None else [self.state]
        return {
            "full": {"block_ids": list(self.ids), "first_token": self.first_token},
            "state": {"block_ids": state, "first_token": 0},
        }


@dataclass
class Rank:
    client: EngineClient
    region: SharedRegion
    manifest: Manifest

    @property
    def memory(self) -> Bytes:
        return self.region.array()


@dataclass
class TestEngine:
    """All ranks of one engine start. Make it with `start`, end it with `close`."""

    __test__ = False
    engine_id: str
    epoch: str
    shape: Shape
    daemons: Sequence[DaemonService]
    ranks: list[Rank]
    _ring: itertools.cycle[int] = field(repr=False)
    _states: itertools.cycle[int] = field(repr=False)
    _leases: itertools.count[int] = field(default_factory=lambda: itertools.count(1), repr=False)
    _attempts: itertools.count[int] = field(default_factory=lambda: itertools.count(1), repr=False)
    _published: dict[str, list[Lease]] = field(default_factory=dict, repr=False)
    """Keyed by request: its last lease, as each rank knows it."""

    @classmethod
    async def start(
        cls,
        engine_id: str,
        daemons: Sequence[DaemonService],
        shape: Shape,
        *,
        epoch: str = "",
        fingerprint: str = "f",
        **more: Any,
    ) -> TestEngine:
        """more: for `EngineClient.connect`."""
        epoch = epoch or uuid.uuid4().hex
        starting = [
            start_rank(engine_id, daemon.socket, shape, rank, epoch, fingerprint, **more)
            for rank, daemon in enumerate(daemons)
        ]
        started = await asyncio.gather(*starting, return_exceptions=True)
        ranks = [rank for rank in started if isinstance(rank, Rank)]
        for failed in started:
            if isinstance(failed, BaseException):
                await asyncio.gather(*(rank.client.close() for rank in ranks), return_exceptions=True)
                raise failed
        # Neighbouring tokens in blocks far apart: what a cache looks like after a while.
        order = np.random.default_rng(7).permutation(shape.num_blocks).tolist()
        return cls(engine_id, epoch, shape, daemons, ranks, itertools.cycle(order), itertools.cycle(order))

    async def close(self) -> None:
        await asyncio.gather(*(rank.client.close() for rank in self.ranks))

    @property
    def address(self) -> str:
        return self.daemons[0].peer

    def source(self, rank: int = 0, epoch: str | None = None) -> SourceBody:
        """How others name this engine as a source, at the daemon of any of its ranks."""
        return SourceBody(engine_id=self.engine_id, address=self.daemons[rank].peer, epoch=epoch)

    def take(self, tokens: int, first_token: int = 0, *, paged: bool = True, state: bool = True) -> Blocks:
        """Blocks for tokens [first_token, tokens). A ring: they are given out again only after all others."""
        count = -(-(tokens - first_token) // self.shape.block_size) if paged else 0
        assert count <= self.shape.num_blocks
        ids = tuple(next(self._ring) for _ in range(count))
        return Blocks(ids, next(self._states) if state else None, first_token if paged else 0)

    def write(self, kv: Kv, blocks: Blocks, tokens: tuple[int, int] | None = None, *, state: bool = True) -> None:
        """Do as prefill does: the KV of the tokens (all by default) into the blocks."""
        self.write_into([rank.memory for rank in self.ranks], kv, blocks, tokens, state=state)

    def write_into(
        self, memories: Sequence[Bytes], kv: Kv, blocks: Blocks, tokens: tuple[int, int] | None = None, *,
        state: bool = True,
    ) -> None:  # fmt: skip
        for rank, memory in enumerate(memories):
            self.shape.write(rank, memory, kv, blocks, tokens or (0, kv.tokens), state)

    def snapshot(self) -> list[Bytes]:
        """A copy of every rank's memory: what it must look like later, once `write_into` has added to it."""
        return [rank.memory.copy() for rank in self.ranks]

    def expecting(
        self, kv: Kv, blocks: Blocks, tokens: tuple[int, int] | None = None, *, state: bool = True
    ) -> list[Bytes]:
        """As every rank's memory is once these blocks have got that, and nothing else has changed."""
        memories = self.snapshot()
        self.write_into(memories, kv, blocks, tokens, state=state)
        return memories

    def filled(self, tokens: int) -> tuple[Kv, Blocks]:
        """KV, and the blocks in which it lies."""
        kv, blocks = Kv.random(tokens), self.take(tokens)
        self.write(kv, blocks)
        return kv, blocks

    def differences(self, expected: Sequence[Bytes]) -> str:
        """The place where memory is not as expected, to the element; empty if nowhere."""
        said = []
        for i, (rank, wanted) in enumerate(zip(self.ranks, expected, strict=True)):
            for name, have, want in zip(
                ("paged", "state"), self.shape.arrays(i, rank.memory), self.shape.arrays(i, wanted), strict=True
            ):
                wrong = np.argwhere(have != want)
                if len(wrong):
                    said.append(f"rank {i} {name}: {len(wrong)} of {have.size} elements, first at {wrong[0].tolist()}")
        return "; ".join(said)

    async def publish(self, request_id: str, blocks: Blocks, num_tokens: int, **more: Any) -> list[Lease]:
        """In the lease that goes on, or in another. On all ranks."""
        leases = self._published.get(request_id, [])
        if len(self.ranks) > 1:  # an engine of one rank leaves it to its client
            more = {"lease": leases[0].number if any(not lease.over for lease in leases) else self.next_lease()} | more
        publishes = (rank.client.publish(request_id, blocks.tables(), num_tokens, **more) for rank in self.ranks)
        self._published[request_id] = leases = await asyncio.gather(*publishes)
        return leases

    def next_lease(self) -> int:
        """The number of another lease, for all ranks."""
        return next(self._leases)

    def next_attempt(self) -> int:
        """The number of another attempt at any request, for all ranks."""
        return next(self._attempts)

    def lease(self, request_id: str) -> int:
        """The number of the request's last lease."""
        return self._published[request_id][0].number

    async def receive(
        self, request_id: str, blocks: Blocks, tokens: tuple[int, int] | None = None, **more: Any
    ) -> list[Received]:
        """On every rank, in another attempt; raises the first failure when all have ended."""
        outcomes = await self.outcomes(request_id, blocks, tokens, **more)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Received)]

    async def gets(
        self, request_id: str, kv: Kv, blocks: Blocks | None = None, tokens: tuple[int, int] | None = None, **more: Any
    ) -> list[Received]:
        """As `receive`, into other blocks where none are named. Just this KV comes, and nothing else changes."""
        blocks = self.take(kv.tokens) if blocks is None else blocks
        expected = self.expecting(kv, blocks, tokens)
        received = await self.receive(request_id, blocks, tokens, **more)
        assert not self.differences(expected)
        return received

    async def outcomes(
        self, request_id: str, blocks: Blocks, tokens: tuple[int, int] | None = None, **more: Any
    ) -> list[Received | BaseException]:
        numbered = {"attempt": self.next_attempt()} | more if len(self.ranks) > 1 else more
        return await asyncio.gather(
            *(rank.client.receive(request_id, blocks.tables(), tokens, **numbered) for rank in self.ranks),
            return_exceptions=True,
        )


async def start_rank(
    engine_id: str, socket: Path, shape: Shape, rank: int, epoch: str, fingerprint: str = "f", **more: Any
) -> Rank:
    client = await EngineClient.connect(
        str(socket),
        engine_id=engine_id,
        epoch=epoch,
        rank=rank,
        world_size=len(shape.heads),
        timeout_s=TIMEOUT_S,
        **more,
    )
    try:
        region = await client.allocate(shape.nbytes(rank))
        manifest = describe(engine_id, epoch, shape, rank, region, fingerprint)
        await client.register(manifest)
    except BaseException:
        await client.close()
        raise
    return Rank(client, region, manifest)


def describe(
    engine_id: str, epoch: str, shape: Shape, rank: int, region: SharedRegion, fingerprint: str = "f"
) -> Manifest:
    builder = ManifestBuilder(
        engine_id,
        epoch,
        ModelInfo(name="m", fingerprint=fingerprint),
        rank=rank,
        world_size=len(shape.heads),
        parallel={"tp": len(shape.heads)},
    )
    builder.region(0, "host", nbytes=region.nbytes, address=region.address)
    builder.group("full", block_size=shape.block_size, num_blocks=shape.num_blocks)
    builder.group("state", kind="state", num_blocks=shape.num_blocks)
    paged, state = shape.arrays(rank, region.array())
    shard = Shard(axis="head", start=shape.heads[rank][0], total=HEADS)
    for at, layer in enumerate(shape.layers_of(rank)):
        for i, name in enumerate("kv"):
            keys_or_values, meant = paged[at, i], {"encoding": "bf16", "shard": shard}
            builder.component("full", layer=layer, name=name, array=keys_or_values, axes=shape.axes, **meant)
    axes = "block", "head", "n"
    if not shape.has_states(rank):
        return builder.build()
    builder.component("state", layer=LAYERS, name="ssm", array=state, axes=axes, encoding="bf16", shard=shard)
    return builder.build()
