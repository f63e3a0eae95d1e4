"""Models, layouts and requests of the GPU benchmarks, and the oracle that knows what must have arrived.

Words of the source ranks' pools are counted through, and word i is i * MULTIPLIER: none stands for another. The oracle
computes for every token, head and word where it lay and where it must be, element by element, and knows no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvferry.errors import Internal, KvferryError
from kvferry.manifest import Manifest
from kvferryd.plan.axes import Ints

ITEM, WORD = 2, 4
"""Bytes of a bf16 element and of the int32 words that pools are filled and compared in."""
MULTIPLIER = 2654435761
"""Odd: different words have different values, up to 2^32 of them."""
POISON = -1
"""Every destination word before a transfer."""
FILL_WORDS = 1 << 27

Requests: TypeAlias = list[Ints]
"""The block ids of every request, one array each."""


@dataclass(frozen=True, slots=True)
class Model:
    """`names`: one letter for each component of a layer. `heads`: KV heads in all; 0 for latents, which have none."""

    layers: int
    names: str
    heads: int
    dim: int

    @property
    def rows(self) -> int:
        return self.layers * len(self.names)

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token, over all layers, components and heads."""
        return self.rows * max(self.heads, 1) * self.dim * ITEM


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine holds a model: tokens in a block, the order of slots and heads in it, and ranks."""

    block: int
    order: str = "NHD"
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Cache:
    """A rank's cache for `tokens` tokens, row by row: layer 0's keys, layer 0's values, layer 1's keys, ..."""

    model: Model
    layout: Layout
    tokens: int
    rank: int = 0

    @property
    def heads(self) -> tuple[int, int]:
        """The KV heads [start, stop) that this rank holds; parts differ in size where they must."""
        edges = np.linspace(0, max(self.model.heads, 1), self.layout.tp + 1).round().astype(int)
        return int(edges[self.rank]), int(edges[self.rank + 1])

    @property
    def width(self) -> int:
        start, stop = self.heads
        return stop - start

    @property
    def row_nbytes(self) -> int:
        return self.tokens * self.width * self.model.dim * ITEM

    @property
    def nbytes(self) -> int:
        return self.model.rows * self.row_nbytes

    @property
    def first_word(self) -> int:
        """How many words the ranks before have."""
        return self.heads[0] * self.nbytes // self.width // WORD

    def manifest(self, engine_id: str, epoch: str, kind: str) -> Manifest:
        """`kind`: of its only region, cuda or host."""
        block, model, blocks = self.layout.block, self.model, self.tokens // self.layout.block
        token = model.dim * ITEM
        slot, head = (self.width * token, token) if self.layout.order == "NHD" else (token, block * token)
        strides = [
            ("block", blocks, block * self.width * token), ("slot", block, slot),
            *([("head", self.width, head)] if model.heads else []), ("dim", model.dim, ITEM),
        ]  # fmt: skip
        axes = [{"name": name, "extent": extent, "stride": stride} for name, extent, stride in strides]
        shard = {"axis": "head", "start": self.heads[0], "total": model.heads} if model.heads else None
        component = {"group": "full", "dtype": "bfloat16", "region": 0, "axes": axes, "shard": shard}
        names, pitch = len(model.names), self.row_nbytes
        return Manifest.from_dict(
            {
                "engine_id": engine_id,
                "epoch": epoch,
                "model": {"name": "bench", "fingerprint": "bench"},
                "rank": self.rank,
                "world_size": self.layout.tp,
                "regions": [{"id": 0, "kind": kind, "nbytes": self.nbytes}],
                "groups": [{"name": "full", "block_size": block, "num_blocks": blocks}],
                "components": [
                    {**component, "layer": row // names, "name": model.names[row % names], "offset": row * pitch}
                    for row in range(model.rows)
                ],
            }
        )

    def words(self, blocks: Ints, tokens: int, heads: tuple[int, int], device: str) -> Any:
        """Index inside one row of every word of these tokens and global heads: a tensor (tokens, head, word)."""
        import torch

        words, block = self.model.dim * ITEM // WORD, self.layout.block
        token = torch.arange(tokens, device=device)
        held, slot = torch.tensor(blocks, device=device)[token // block], token % block
        of_slot, of_head = (self.width, 1) if self.layout.order == "NHD" else (1, block)
        head = torch.arange(heads[0] - self.heads[0], heads[1] - self.heads[0], device=device)
        run = (held * block * self.width + slot * of_slot)[:, None] + head * of_head
        return run[:, :, None] * words + torch.arange(words, device=device)

    def fill(self, pool: Any) -> None:
        """Give every word of a source rank's pool (a tensor of int32) its own value."""
        import torch

        for first in range(0, len(pool), FILL_WORDS):
            last = min(first + FILL_WORDS, len(pool))
            index = torch.arange(self.first_word + first, self.first_word + last, device=pool.device)
            pool[first:last] = index.mul_(MULTIPLIER).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines over one model, each with room for `tokens`. `adopted`: the source brings its own memory."""

    model: Model
    source: Layout
    destination: Layout
    tokens: int
    adopted: bool = False

    def sources(self) -> list[Cache]:
        return [Cache(self.model, self.source, self.tokens, rank) for rank in range(self.source.tp)]

    def destinations(self) -> list[Cache]:
        return [Cache(self.model, self.destination, self.tokens, rank) for rank in range(self.destination.tp)]


@dataclass(frozen=True, slots=True)
class Case:
    """`requests` of `tokens` tokens each, all at once, at permuted block ids on both sides, which `seed` draws; without
    one, the number of tokens."""

    name: str
    pair: Pair
    tokens: int
    requests: int = 1
    seed: int | None = None

    @property
    def nbytes(self) -> int:
        return self.requests * self.tokens * self.pair.model.token_nbytes

    def ids(self) -> tuple[Requests, Requests]:
        """Blocks of the source and of the destination; no two requests share any."""
        rng = np.random.default_rng(self.tokens if self.seed is None else self.seed)
        source, destination = (
            self._cut(rng.permutation(self.pair.tokens // layout.block), layout.block)
            for layout in (self.pair.source, self.pair.destination)
        )
        return source, destination

    def _cut(self, order: Ints, block: int) -> Requests:
        each = -(-self.tokens // block)
        assert each * self.requests <= len(order)
        return [order[each * i : each * (i + 1)] for i in range(self.requests)]

    def check(self, ids: tuple[Requests, Requests], rank: int, pool: Any) -> None:
        """Compare every word of a destination rank's pool, a tensor of int32. Raises KvferryError (`wrong_bytes`)."""
        import torch

        cache = self.pair.destinations()[rank]
        device, rows = str(pool.device), pool.view(self.pair.model.rows, -1)
        parts = []
        for source in self.pair.sources():
            heads = max(cache.heads[0], source.heads[0]), min(cache.heads[1], source.heads[1])
            if heads[0] < heads[1]:
                come, go = (
                    torch.cat([of.words(blocks, self.tokens, heads, device).flatten() for blocks in whose])
                    for of, whose in ((source, ids[0]), (cache, ids[1]))
                )
                parts.append((come + source.first_word, go, source.row_nbytes // WORD))
        written = 0
        for row in range(self.pair.model.rows):
            for come, go, step in parts:
                expected = ((come + row * step) * MULTIPLIER).to(torch.int32)
                if not torch.equal(rows[row][go], expected):
                    raise self._wrong(rank, f"row {row} differs")
                written += int((expected != POISON).sum())
        # In parts, for torch makes words of 8 bytes of what it sums: all at once need twice the pool beside the pool.
        if sum(int((part != POISON).sum()) for part in pool.view(-1).split(FILL_WORDS)) != written:
            raise self._wrong(rank, "words that nobody asked for were written")

    def _wrong(self, rank: int, what: str) -> KvferryError:
        return Internal("wrong_bytes", f"{self.name}, {self.tokens} tokens, destination rank {rank}: {what}")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large it all is: layers of the two models, tokens of a pool and of the three sizes of request."""

    layers: int
    latent_layers: int
    pool: int
    large: int
    middle: int
    small: int
    crowd: int
    """So many small requests at once."""


FULL = Scale(layers=80, latent_layers=61, pool=16384, large=8192, middle=1024, small=96, crowd=64)
"""Pools of 1.3 GB, requests of 671, 84 and 8 MB."""
TINY = Scale(layers=2, latent_layers=3, pool=1024, large=500, middle=60, small=20, crowd=24)
"""The same cases for tests and for host memory; requests end inside a block."""
NHD, HND, WIDE = Layout(16), Layout(16, "HND"), Layout(64)
MANY = 16


def cases(scale: Scale, gpus: int) -> list[Case]:
    """Every case that `gpus` GPUs have room for; those of one Pair follow each other."""
    model, pool = Model(scale.layers, "kv", 2, 128), scale.pool
    same, split = Pair(model, NHD, NHD, pool), Layout(16, tp=2)
    thirds = Model(scale.layers, "kv", 4, 128)  # half the tokens: as many bytes
    shared = "" if gpus >= 4 else " (a side's ranks on 1 GPU)"

    def ranks(name: str, pair: Pair) -> Case:
        return Case(name + shared, pair, scale.large * pair.tokens // pool)

    return [
        Case("permuted blocks", same, scale.large),
        Case("permuted blocks, medium", same, scale.middle),
        Case("permuted blocks, small", same, scale.small),
        Case(f"{MANY} requests at once", same, scale.middle, MANY),
        Case(f"{scale.crowd} small ones at once", same, scale.small, scale.crowd),
        Case("NHD to HND", Pair(model, NHD, HND, pool), scale.large),
        Case("block 16 to 64", Pair(model, NHD, WIDE, pool), scale.large),
        Case("block 64 to 16", Pair(model, WIDE, NHD, pool), scale.large),
        ranks("TP2 to TP1", Pair(model, split, NHD, pool)),
        ranks("TP1 to TP2", Pair(model, NHD, split, pool)),
        ranks("TP2 to TP2", Pair(model, split, split, pool)),
        ranks("TP2 to TP2, NHD to HND, block 16 to 64", Pair(model, split, Layout(64, "HND", tp=2), pool)),
        ranks("TP3 to TP1", Pair(thirds, Layout(16, tp=3), NHD, pool // 2)),
        Case("adopted source", Pair(model, NHD, NHD, pool, adopted=True), scale.large),
        Case("MLA, block 64", Pair(Model(scale.latent_layers, "c", 0, 576), WIDE, WIDE, pool), scale.large),
    ]
