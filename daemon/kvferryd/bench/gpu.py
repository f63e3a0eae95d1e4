"""GPU memory: kvferry beside the copy ceiling and beside NIXL's own scattered reads, in one run, on one or two GPUs.

    kvferry bench gpu

The source's daemon runs beside the first GPU, the destination's beside the last. The request is that of an 80-layer
model, K and V, blocks of 16 tokens with 2 heads of 128 in bf16, at permuted ids on both sides: runs of 8 KiB.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvferry import cuda
from kvferry.engine import EngineClient
from kvferry.manifest import Manifest
from kvferry.memory import CudaRegion
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.bench.copy_gpu import HND, MULTIPLIER, NHD, POOL, TOKENS, WIDE, Case, Layout, check
from kvferryd.demo.fleet import DaemonService, Fleet
from kvferryd.memory.cuda import CudaProvider
from kvferryd.plan.axes import Ints
from kvferryd.transport.binding import load, make_agent

CASES = (
    Case("permuted blocks", NHD, NHD, 8192),
    Case("NHD to HND", NHD, HND, 8192),
    Case("block 16 to 64", NHD, WIDE, 8192),
    Case("permuted blocks", NHD, NHD, 1024),
    Case("permuted blocks", NHD, NHD, 96),
)
REPEATS, RAW_REPEATS, WARM_UP = 15, 5, 3
TOKEN_NBYTES = POOL // TOKENS
RUN_NBYTES = 8 << 10
ARENA = ("--arena-mb", "512")
"""A daemon's own default; that of a fleet for tests is less."""
CEILING_NBYTES = 1 << 30


@dataclass(slots=True)
class Side:
    """One engine of one rank, its cache as words on its GPU."""

    client: EngineClient
    region: CudaRegion
    pool: Any


def main() -> int:
    """Print the table; 0 when every byte arrived."""
    gpus = cuda.devices()
    print(f"{len(gpus)} GPU(s); source {gpus[0].uuid}, destination {gpus[-1].uuid}\n")
    print("| way | request | bytes | order to done ms | reading ms | GB/s | share of ceiling |")
    print("|---|---|---|---|---|---|---|", flush=True)
    ceiling = _ceiling()
    nbytes = CASES[0].tokens * TOKEN_NBYTES
    for name, default in (("NIXL READ, Python's defaults", True), ("NIXL READ, pthrDelay 10 ms, 8 threads", False)):
        seconds = _raw(default, nbytes)
        _row(name, "permuted blocks", nbytes, seconds, seconds, ceiling)
    asyncio.run(_kvferry(ceiling))
    return 0


def _row(way: str, request: str, nbytes: int, total_s: float, reading_s: float, ceiling: float) -> None:
    rate = nbytes / total_s
    print(
        f"| {way} | {request} | {nbytes / 1e6:.0f} MB | {1e3 * total_s:.2f} | {1e3 * reading_s:.2f} "
        f"| {rate / 1e9:.1f} | {rate / ceiling:.1%} |",
        flush=True,
    )


async def _kvferry(ceiling: float) -> None:
    async with Fleet() as fleet:
        gpus = cuda.devices()
        source, auto, direct, staged = (
            fleet.daemon(name, flags=["--device", f"cuda:{gpu.index}", *flags])
            for name, gpu, flags in (
                ("source", gpus[0], ARENA),
                ("auto", gpus[-1], ()),
                ("direct", gpus[-1], ("--way", "direct", "--nixl-threads", "8")),
                ("staged", gpus[-1], ("--way", "staged", *ARENA)),
            )
        )
        await fleet.ready(source, auto, direct, staged, timeout_s=60)
        await _measure("kvferry direct, 8 threads", source, direct, CASES[0], ceiling, RAW_REPEATS)
        for case in CASES:
            await _measure("kvferry auto", source, auto, case, ceiling, REPEATS)
            await _measure("kvferry staged", source, staged, case, ceiling, REPEATS)


async def _measure(
    way: str, source: DaemonService, destination: DaemonService, case: Case, ceiling: float, repeats: int
) -> None:
    """A new engine on each side; what arrived last is compared word by word."""
    import torch

    sides = [await _side("bench-source", source, case.source), await _side("bench", destination, case.destination)]
    _fill(sides[0].pool, torch)
    rng = np.random.default_rng(case.tokens)
    ids: list[Ints] = [
        rng.permutation(TOKENS // layout.block)[: -(-case.tokens // layout.block)]
        for layout in (case.source, case.destination)
    ]
    tables = [{"full": BlockTable.of(blocks)} for blocks in ids]
    body = SourceBody(engine_id="bench-source", address=sides[0].client.peer_address)
    total, reading, path = [], [], ""
    async with RouterClient(destination.url) as router:
        for _ in range(repeats + WARM_UP):
            sides[1].pool.fill_(-1)
            torch.cuda.synchronize(sides[1].pool.device)
            request_id = uuid.uuid4().hex
            await sides[0].client.publish(request_id, tables[0], case.tokens)
            began = time.perf_counter()
            received = await sides[1].client.receive(request_id, tables[1], (0, case.tokens), source=body)
            total.append(time.perf_counter() - began)
            record = await router.transfer(received.transfer_id)
            reading.append(record.phases_ms["reading"] / 1e3)
            path = record.path
    check(case, ids[0], ids[1], sides[1].pool)
    _row(
        f"{way} ({path})",
        case.name,
        case.tokens * TOKEN_NBYTES,
        median(total[WARM_UP:]),
        median(reading[WARM_UP:]),
        ceiling,
    )
    for side in sides:
        await side.client.close()
        side.region.close()


async def _side(engine_id: str, daemon: DaemonService, layout: Layout) -> Side:
    import torch

    client = await EngineClient.connect(str(daemon.socket), engine_id=engine_id, epoch=uuid.uuid4().hex, timeout_s=30)
    region = await client.allocate(POOL)
    assert isinstance(region, CudaRegion)
    described = {**layout.manifest().model_dump(), "engine_id": engine_id, "epoch": client.epoch}
    await client.register(Manifest.from_dict(described))
    return Side(client, region, region.tensor().view(torch.int32))


def _fill(pool: Any, torch: Any) -> None:
    """Every word of the pool a value of its own, as `check` expects."""
    step = 1 << 27
    for first in range(0, len(pool), step):
        index = torch.arange(first, min(first + step, len(pool)), device=pool.device)
        pool[first : first + step] = (index * MULTIPLIER).to(torch.int32)
    torch.cuda.synchronize(pool.device)


def _ceiling() -> float:
    """Bytes per second of one plain copy between the GPUs, from memory of another process."""
    device = cuda.devices()[-1]
    with _target(CEILING_NBYTES) as told:
        mapping = device.open(bytes.fromhex(told["handle"]))
        room, stream = device.alloc(CEILING_NBYTES), device.stream()
        began, ended = device.event(timing=True), device.event(timing=True)
        seconds = []
        for _ in range(REPEATS):
            began.record(stream)
            stream.copy(room, mapping.address, CEILING_NBYTES)
            ended.record(stream)
            stream.synchronize()
            seconds.append(ended.ms_since(began) / 1e3)
        device.free(room)
        mapping.close()
    taken = median(seconds)
    ceiling = CEILING_NBYTES / taken
    _row("plain copy, the ceiling", "contiguous", CEILING_NBYTES, taken, taken, ceiling)
    return ceiling


def _raw(default: bool, nbytes: int) -> float:
    """Seconds of one READ of permuted runs by NIXL alone, prepared lists and indices."""
    device = cuda.devices()[-1]
    with _target(POOL) as told, device:
        address = device.alloc(POOL)
        if default:
            api = load()
            agent: Any = api.nixl_agent("raw-default", api.nixl_agent_config(backends=["UCX"]))
        else:
            agent = make_agent("raw-tuned", threads=8, ucx={})
        registered = agent.register_memory(np.array([(address, POOL, device.index)], dtype=np.uint64), "VRAM")
        peer = agent.add_remote_agent(bytes.fromhex(told["metadata"])).decode()
        runs, count = POOL // RUN_NBYTES, nbytes // RUN_NBYTES
        local, remote = (
            agent.prep_xfer_dlist(
                whose, np.array([(start, RUN_NBYTES, gpu, RUN_NBYTES, runs)], dtype=np.uint64), "VRAM"
            )
            for whose, start, gpu in (
                ("NIXL_INIT_AGENT", address, device.index),
                (peer, told["address"], told["device"]),
            )
        )
        rng, seconds = np.random.default_rng(1), []
        for _ in range(RAW_REPEATS + 1):
            indices = [rng.permutation(runs)[:count].astype(np.int32) for _ in range(2)]
            began = time.perf_counter()
            handle = agent.make_prepped_xfer("READ", local, indices[0], remote, indices[1])
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            seconds.append(time.perf_counter() - began)
            handle.release()
        local.release()
        remote.release()
        agent.remove_remote_agent(peer)
        agent.deregister_memory(registered)
        del agent
        device.free(address)
    return median(seconds[1:])


@contextmanager
def _target(nbytes: int) -> Iterator[dict[str, Any]]:
    """Memory of another process on the first GPU: its handle, address, and NIXL metadata."""
    process = subprocess.Popen(  # noqa: S603  # this very module
        [sys.executable, "-m", "kvferryd.bench.gpu", str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"},
    )
    try:
        assert process.stdout is not None
        yield json.loads(next(line for line in process.stdout if line.startswith("{")))
    finally:
        process.kill()
        process.wait()


def _serve(nbytes: int) -> None:
    device = cuda.devices()[0]
    with device:
        region = CudaProvider(device.uuid).allocate(nbytes)
        agent = make_agent("raw-target", threads=0, ucx={})
        agent.register_memory(np.array([(region.address, region.nbytes, device.index)], dtype=np.uint64), "VRAM")
        told = {
            "handle": region.handle.handle.hex(),
            "address": region.address,
            "device": device.index,
            "metadata": agent.get_agent_metadata().hex(),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        sys.stdin.read()  # until the reader ends


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
