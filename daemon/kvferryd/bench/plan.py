"""How long the planner takes: `plan` once per pair of engines, `bind` once per request."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.manifest import Manifest
from kvferry.tables import BlockTable
from kvferryd.plan import Bound, bind, plan

PLAN_BUDGET_MS, BIND_BUDGET_MS, SHARED_BUDGET_MS = 20.0, 0.3, 0.5
"""The budget on a machine of two cores."""


@dataclass(frozen=True, slots=True)
class Timing:
    """ms: the median over `repeats`; best_ms: the fastest, which a busy machine disturbs least."""

    name: str
    ms: float
    best_ms: float
    budget_ms: float | None
    repeats: int
    note: str

    @property
    def kept(self) -> bool:
        return self.budget_ms is None or self.ms <= self.budget_ms


def main() -> int:
    """Print a table; returns 0 when every budget is kept, else 1."""
    timings = measure()
    print(f"{'':34}{'median':>10}{'best':>10}{'budget':>10}")
    for timing in timings:
        mark = "" if timing.kept else "  over"
        budget = "-" if timing.budget_ms is None else f"{timing.budget_ms:.1f}ms"
        row = f"{timing.name:34}{timing.ms:>8.3f}ms{timing.best_ms:>8.3f}ms{budget:>10}{mark}"
        print(f"{row}   {timing.note}")
    return 0 if all(timing.kept for timing in timings) else 1


def measure(repeats: int = 50) -> list[Timing]:
    return [measure_plan(max(3, repeats // 5)), *measure_bind(repeats), *measure_shared(repeats)]


def measure_plan(repeats: int) -> Timing:
    """128 layers from 16 source ranks, two KV heads each, all to one rank: the most that one plan reads."""
    sources = [cache("prefill", layers=128, heads=(2 * rank, 2), total=32, rank=rank, of=16) for rank in range(16)]
    destination = cache("decode", layers=128, heads=(0, 32), total=32, order=("head", "slot"))
    chosen = plan(sources, destination)
    note = f"reads {len(chosen.reads_from)} ranks in {len(chosen.copies)} copies"
    return _timing("plan, 128 layers x 16 ranks", lambda: plan(sources, destination), PLAN_BUDGET_MS, repeats, note)


def measure_bind(repeats: int) -> list[Timing]:
    """80 layers of K and V, 512 blocks of 16 tokens in any order on both sides: 81,920 runs.

    Once to the segments, which is all that a copy kernel needs, and once to the runs, which are descriptors.
    """
    blocks = 512
    source, destination = (
        cache(engine, layers=80, heads=(0, 2), total=2, blocks=blocks) for engine in ("prefill", "decode")
    )
    chosen = plan([source], destination)
    random = np.random.default_rng(7)
    theirs, ours = (BlockTable.of(random.permutation(blocks)) for _ in range(2))

    def bound() -> Bound:
        return bind(chosen, {0: {"full": theirs}}, {"full": ours}, (0, blocks * 16))

    runs = sum(len(found) for found in bound().runs())
    note = f"{runs:,} runs, {bound().nbytes / 2**30:.2f} GiB"
    return [
        _timing("bind, 80 layers x 512 blocks", bound, BIND_BUDGET_MS, repeats, note),
        _timing("bind and runs, the same", lambda: bound().runs(), None, repeats, note),
    ]


def measure_shared(repeats: int) -> list[Timing]:
    """8,192 tokens between two ranks that take them by turns (context parallelism interleaved by one) and one that has
    all, either way; 80 layers."""
    blocks, random, timings = 512, np.random.default_rng(7), []
    for theirs, ours in ((2, 1), (1, 2)):
        sources, (destination, *_) = (
            [
                cache(engine, layers=80, heads=(0, 2), total=2, blocks=blocks, rank=rank, of=ranks, share_tokens=True)
                for rank in range(ranks)
            ]
            for engine, ranks in (("prefill", theirs), ("decode", ours))
        )
        chosen, own = plan(sources, destination), {"full": BlockTable.of(random.permutation(blocks))}
        tables = {rank: {"full": BlockTable.of(random.permutation(blocks))} for rank in range(theirs)}
        work = functools.partial(bind, chosen, tables, own, (0, blocks * 16))
        note = f"{work().segment_count:,} segments"
        timings.append(_timing(f"bind, 8,192 tokens, DCP{theirs} to DCP{ours}", work, SHARED_BUDGET_MS, repeats, note))
    return timings


def cache(
    engine: str,
    *,
    layers: int,
    heads: tuple[int, int],
    total: int,
    rank: int = 0,
    of: int = 1,
    blocks: int = 512,
    order: tuple[str, str] = ("slot", "head"),
    share_tokens: bool = False,
) -> Manifest:
    """A rank with heads (first, count) of 128 bfloat16, blocks of 16 tokens; K and V of every layer apart.

    share_tokens: the ranks take tokens by turns.
    """
    first, count = heads
    extents = {"slot": 16, "head": count}
    outer, inner = order
    strides = {"block": 16 * count * 256, outer: extents[inner] * 256, inner: 256, "dim": 2}
    extents |= {"block": blocks, "dim": 128}
    axes = [{"name": name, "extent": extents[name], "stride": strides[name]} for name in ("block", *order, "dim")]
    nbytes = blocks * strides["block"]
    shard = {"rank": rank, "size": of} if share_tokens else {}
    return Manifest.from_dict(
        {
            "engine_id": engine,
            "epoch": "1",
            "model": {"name": "benchmark", "fingerprint": "benchmark"},
            "rank": rank,
            "world_size": of,
            "regions": [{"id": 0, "kind": "host", "nbytes": 2 * layers * nbytes}],
            "groups": [{"name": "full", "block_size": 16, "num_blocks": blocks, "token_shard": shard}],
            "components": [
                {
                    "group": "full",
                    "layer": layer,
                    "name": name,
                    "dtype": "bfloat16",
                    "region": 0,
                    "offset": (2 * layer + i) * nbytes,
                    "axes": axes,
                    "shard": {"axis": "head", "start": first, "total": total},
                }
                for layer in range(layers)
                for i, name in enumerate(("k", "v"))
            ],
        }
    )


def _timing(name: str, work: Callable[[], object], budget_ms: float | None, repeats: int, note: str) -> Timing:
    work()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1e3)
    return Timing(name, statistics.median(took), min(took), budget_ms, repeats, note)


if __name__ == "__main__":
    raise SystemExit(main())
