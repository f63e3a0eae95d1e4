"""Every way that a pair can take beside what `plan.cost` expects of it, and the one that `auto` takes.

On host memory, and on a GPU where there is one: there without the mapped way, which engines on one host take before all
others. The short runs are those of a change of layout (NHD to HND), the long ones whole blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvferry.engine import EngineClient
from kvferry.errors import KvferryError
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import cuda
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.plan.cost import COSTS, Cost, cheapest

POOL = 1 << 28
SLOTS, HEADS = 16, 8
NHD, HND = ("block", "slot", "head", "dim"), ("block", "head", "slot", "dim")
WAYS = ("direct", "staged")
REPEATS, WARM_UP = 5, 1
READY_S, CASE_S = 60.0, 60.0
FAR = 3.0
"""So many times as long as expected, or as the best way took, is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """`blocks` blocks of tokens whose heads have `dim` bytes each. `axes`: of the reader; the source has NHD.

    permuted: no two blocks follow one another on both sides; otherwise all do.
    """

    name: str
    dim: int
    blocks: int
    axes: tuple[str, ...] = NHD
    permuted: bool = True

    @property
    def block_nbytes(self) -> int:
        return SLOTS * HEADS * self.dim

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_nbytes

    @property
    def runs(self) -> int:
        if self.axes is HND:
            return self.blocks * SLOTS * HEADS
        return self.blocks if self.permuted else 1

    def ids(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
        """The source's blocks and the reader's: every other block if no two may follow one another."""
        if not self.permuted:
            return np.arange(self.blocks), np.arange(self.blocks)
        every, rng = np.arange(0, POOL // self.block_nbytes, 2), np.random.default_rng(self.blocks)
        return rng.permutation(every)[: self.blocks], rng.permutation(every)[: self.blocks]


CASES = [
    Case("2 bytes, few", 2, 2, HND),
    Case("2 bytes, many", 2, 2048, HND),
    Case("128 bytes, few", 128, 2, HND),
    Case("128 bytes, many", 128, 1024, HND),
    Case("1 KiB, many", 1 << 10, 128, HND),
    Case("4 KiB, few", 32, 128),
    Case("4 KiB, many", 32, 8192),
    Case("64 KiB, few", 512, 32),
    Case("64 KiB, many", 512, 1024),
    Case("1 MiB, few", 8192, 8),
    Case("1 MiB, many", 8192, 64),
    Case("2 KiB blocks that follow one another", 16, 32768, permuted=False),
]


@dataclass(slots=True)
class Rank:
    """An engine of one rank; `blocks` [block, slot, head, byte] are its cache, however that lies: a torch tensor."""

    client: EngineClient
    source: SourceBody
    region: Any
    blocks: Any

    async def close(self) -> None:
        await self.client.close()
        self.blocks = None
        await self.client.unmap(self.region)


async def _rank(daemon: DaemonService, kind: str, dim: int, axes: tuple[str, ...]) -> Rank:
    extents = {"block": -1, "slot": SLOTS, "head": HEADS, "dim": dim}
    client = await EngineClient.connect(str(daemon.socket), engine_id=daemon.name, epoch=uuid.uuid4().hex)
    region = await client.allocate(POOL)
    lying = region.tensor().view([extents[axis] for axis in axes])
    blocks = lying.permute([axes.index(axis) for axis in NHD])
    builder = ManifestBuilder(daemon.name, client.epoch, ModelInfo(name="bench", fingerprint="bench"))
    builder.region(0, kind, nbytes=POOL, address=region.address)
    builder.group("pool", num_blocks=len(blocks), block_size=SLOTS)
    builder.component("pool", layer=0, name="kv", array=blocks, axes=NHD, encoding="uint8")
    await client.register(builder.build())
    return Rank(client, SourceBody(engine_id=daemon.name, address=client.peer_address), region, blocks)


async def measure(kind: str, gpus: Sequence[cuda.Device]) -> bool:
    """Print the table of one kind of memory; whether nothing was wrong. gpus: the source is on the first, the reader on
    the last; none for host memory."""
    devices = [f"cuda:{gpu.index}" for gpu in (gpus[0], gpus[-1])] if gpus else ["cpu", "cpu"]
    print(f"\n{kind} memory: milliseconds from order to done, and what was expected\n")
    print("| runs of | runs | MB | direct | expected | staged | expected | auto takes | times the best |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    right = True
    async with Fleet() as fleet:
        pairs = {
            way: [
                fleet.daemon(f"{way}-{side}", flags=["--way", way, "--device", device])
                for side, device in zip(("prefill", "decode"), devices, strict=True)
            ]
            for way in WAYS
        }
        await fleet.ready(*(daemon for pair in pairs.values() for daemon in pair), timeout_s=READY_S)
        for (dim, axes), cases in itertools.groupby(CASES, key=lambda case: (case.dim, case.axes)):
            engines = {
                way: (await _rank(prefill, kind, dim, NHD), await _rank(decode, kind, dim, axes))
                for way, (prefill, decode) in pairs.items()
            }
            for case in cases:
                took_ms = {way: 1e3 * await _one(case, *engines[way], pairs[way][1].url, way) for way in WAYS}
                right &= _show(case, took_ms, COSTS[kind])
            for rank in itertools.chain(*engines.values()):
                await rank.close()
    return right


async def _one(case: Case, source: Rank, reader: Rank, url: str, way: str) -> float:
    """Seconds, the median of REPEATS."""
    import torch

    source.blocks.copy_(torch.randint(256, source.blocks.shape, dtype=torch.uint8, device=source.blocks.device))
    come, go = case.ids()
    took_s = []
    async with asyncio.timeout(CASE_S), RouterClient(url) as router:
        for _ in range(WARM_UP + REPEATS):
            request_id = uuid.uuid4().hex
            await source.client.publish(request_id, {"pool": BlockTable.of(come)}, case.blocks * SLOTS)
            began = time.perf_counter()
            received = await reader.client.receive(request_id, {"pool": BlockTable.of(go)}, source=source.source)
            took_s.append(time.perf_counter() - began)
            record = await router.transfer(received.transfer_id)
            assert record.path == way, f"{case.name} went {record.path}, not {way}"
    if not torch.equal(source.blocks[torch.tensor(come)].cpu(), reader.blocks[torch.tensor(go)].cpu()):
        raise AssertionError(f"bytes differ: {case.name}, {way}")
    return median(took_s[WARM_UP:])


def _show(case: Case, took_ms: dict[str, float], costs: dict[str, Cost]) -> bool:
    """Print one row. Returns whether every figure is within FAR times what is expected."""
    expected = {way: costs[way].ms(case.runs, case.nbytes, case.blocks) for way in WAYS}
    chosen = cheapest(costs, WAYS, case.runs, case.nbytes, case.blocks)
    over = took_ms[chosen] / min(took_ms.values())
    wrong = [way for way in WAYS if not 1 / FAR <= took_ms[way] / expected[way] <= FAR]
    figures = " | ".join(f"{took_ms[way]:.1f} | {expected[way]:.1f}{' WRONG' * (way in wrong)}" for way in WAYS)
    bad = " WRONG" * (over > FAR)
    print(
        f"| {case.name} | {case.runs:,} | {case.nbytes / 1e6:.2f} | {figures} | {chosen} | {over:.1f}{bad} |",
        flush=True,
    )
    return not wrong and over <= FAR


def main() -> int:
    """Print the tables. Returns 0 when every figure is within FAR times what is expected, otherwise 1."""
    right = asyncio.run(measure("host", ()))
    try:
        gpus = cuda.devices()
    except KvferryError as none:
        print(f"\nno table for GPUs: {none.message}")
    else:
        right &= asyncio.run(measure("cuda", gpus))
    return 0 if right else 1
