"""Host memory: direct beside staged for the short runs that a change of layout makes (NHD to HND, permuted blocks)."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvferry.engine import EngineClient
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import SharedRegion
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.demo.fleet import DaemonService, Fleet

POOL = 64 << 20
SLOTS, HEADS = 16, 8
RUNS = (128, 1 << 10, 4 << 10)
SIZES = (2 << 20, 32 << 20)
REPEATS = 7
WAYS = ("direct", "staged")
NHD, HND = ("block", "slot", "head", "dim"), ("block", "head", "slot", "dim")


@dataclass(frozen=True, slots=True)
class Row:
    """Median seconds of the reading phase and from the engine's order to its done event."""

    way: str
    run_nbytes: int
    nbytes: int
    reading_s: float
    total_s: float


@dataclass(slots=True)
class Rank:
    """An engine of one rank; `blocks` [block, slot, head, byte] are its cache, however that lies."""

    client: EngineClient
    region: SharedRegion
    axes: tuple[str, ...]
    run_nbytes: int

    def blocks(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        extents = {"block": -1, "slot": SLOTS, "head": HEADS, "dim": self.run_nbytes}
        lying = self.region.array().reshape([extents[axis] for axis in self.axes])
        return np.moveaxis(lying, [self.axes.index(axis) for axis in NHD], range(4))


async def _rank(daemon: DaemonService, engine_id: str, axes: tuple[str, ...], run_nbytes: int) -> Rank:
    client = await EngineClient.connect(str(daemon.socket), engine_id=engine_id, epoch=uuid.uuid4().hex)
    region = await client.allocate(POOL)
    assert isinstance(region, SharedRegion)
    rank = Rank(client, region, axes, run_nbytes)
    blocks = rank.blocks()
    manifest = (
        ManifestBuilder(engine_id, client.epoch, ModelInfo(name="bench", fingerprint="bench"))
        .region(0, "host", nbytes=POOL, address=rank.region.address)
        .group("pool", num_blocks=len(blocks), block_size=SLOTS)
        .component("pool", layer=0, name="kv", array=blocks, axes=NHD)
        .build()
    )
    await client.register(manifest)
    return rank


async def measure() -> list[Row]:
    """Every run and request size, direct and staged by turns."""
    rows = []
    async with Fleet() as fleet:
        pairs = {
            way: [fleet.daemon(f"{way}-{side}", flags=["--way", way]) for side in ("prefill", "decode")] for way in WAYS
        }
        await fleet.ready(*(daemon for pair in pairs.values() for daemon in pair), timeout_s=30)
        for run_nbytes in RUNS:
            for nbytes in SIZES:
                for way, (prefill, decode) in pairs.items():
                    rows.append(await _one(way, prefill, decode, run_nbytes, nbytes))
    return rows


async def _one(way: str, prefill: DaemonService, decode: DaemonService, run_nbytes: int, nbytes: int) -> Row:
    source = await _rank(prefill, "prefill", NHD, run_nbytes)
    reader = await _rank(decode, "decode", HND, run_nbytes)
    rng = np.random.default_rng(run_nbytes)
    source.region.array()[:] = rng.integers(0, 255, POOL, dtype=np.uint8)
    count, of = nbytes // (SLOTS * HEADS * run_nbytes), len(source.blocks())
    ids = [rng.permutation(of)[:count] for _ in range(2)]
    reading_s, total_s = [], []
    async with RouterClient(decode.url) as router:
        for _ in range(REPEATS):
            request_id = uuid.uuid4().hex
            await source.client.publish(request_id, {"pool": BlockTable.of(ids[0])}, count * SLOTS)
            began = time.perf_counter()
            received = await reader.client.receive(
                request_id,
                {"pool": BlockTable.of(ids[1])},
                source=SourceBody(engine_id="prefill", address=source.client.peer_address),
            )
            total_s.append(time.perf_counter() - began)
            record = await router.transfer(received.transfer_id)
            if record.path != way:
                raise AssertionError(f"it went {record.path}, not {way}")
            reading_s.append(record.phases_ms["reading"] / 1e3)
    if not np.array_equal(source.blocks()[ids[0]], reader.blocks()[ids[1]]):
        raise AssertionError(f"bytes differ: {way}, {count} blocks of runs of {run_nbytes}")
    await source.client.close()
    await reader.client.close()
    # The first pays for the handshake, the pairing and page faults.
    return Row(way, run_nbytes, nbytes, median(reading_s[1:]), median(total_s[1:]))


def main() -> int:
    """Print the table. There is no budget: `plan.crossover` is set by it."""
    print("| run | request | direct reading ms | staged reading ms | direct GB/s | staged GB/s | staged is |")
    print("|---|---|---|---|---|---|---|")
    rows = asyncio.run(measure())
    for direct, staged in zip(rows[::2], rows[1::2], strict=True):
        rates = " | ".join(f"{row.nbytes / row.reading_s / 1e9:.2f}" for row in (direct, staged))
        print(
            f"| {direct.run_nbytes} B | {direct.nbytes / 1e6:.0f} MB | {1e3 * direct.reading_s:.1f} "
            f"| {1e3 * staged.reading_s:.1f} | {rates} | {direct.reading_s / staged.reading_s:.1f}x |"
        )
    return 0
