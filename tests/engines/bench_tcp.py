"""Host memory between two processes over TCP alone: kvferry beside NIXL and beside Mooncake, in one run.

    make bench-tcp

Mooncake's package for machines without GPUs has TCP only, so all three have TCP only. Each reads as many bytes, in
permuted runs. NIXL and Mooncake know every address beforehand; kvferry moves a request, from its order to its engine's
event.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

os.environ["UCX_TLS"] = "tcp,self"  # for all of NIXL: here, and in the processes that are started

import numpy as np

from engines import PYTHON
from kvferry.router import RouterClient
from kvferryd.bench import host
from kvferryd.bench.raw import raw_pair
from kvferryd.demo.fleet import Fleet

NBYTES = 64 << 20
RUNS = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
SIDE = Path(__file__).with_name("mooncake_side.py")
START_S, READ_S = 60.0, 120.0
SOURCE_SEED, READER_SEED = 1, 2
AT_ONCE = 1024
"""Runs in one call of Mooncake: with thousands it fails without a word."""


class Side:
    """A process with a pool of its own."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.name, self.address = "", 0

    async def heard(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout
        async with asyncio.timeout(timeout_s):
            while line := await self._process.stdout.readline():
                if line.startswith(b"{"):  # Mooncake writes a log there, too
                    return dict(json.loads(line))
        raise RuntimeError("Mooncake's process ended: it needs libibverbs1, librdmacm1 and libnuma1")

    async def read(self, source: Side, there: np.ndarray, here: np.ndarray, nbytes: int) -> float:
        """Seconds to read the runs of these numbers; their bytes are compared."""
        expected = np.random.default_rng(SOURCE_SEED).integers(0, 255, host.POOL, dtype=np.uint8).reshape(-1, nbytes)
        seconds = 0.0
        for first in range(0, len(here), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            to, at = ((side.address + runs[part] * nbytes).tolist() for side, runs in ((self, here), (source, there)))
            assert self._process.stdin
            self._process.stdin.write(
                json.dumps({"from": source.name, "to": to, "at": at, "nbytes": nbytes}).encode() + b"\n"
            )
            answer = await self.heard(READ_S)
            assert not answer["failed"], answer
            assert answer["digest"] == hashlib.sha256(expected[there[part]]).hexdigest(), "bytes differ"
            seconds += answer["seconds"]
        return seconds


@asynccontextmanager
async def side(seed: int) -> AsyncIterator[Side]:
    process = await asyncio.create_subprocess_exec(
        PYTHON, SIDE, str(host.POOL), str(seed), stdin=PIPE, stdout=PIPE, limit=1 << 22
    )
    try:
        started = Side(process)
        said = await started.heard(START_S)
        started.name, started.address = said["name"], said["address"]
        yield started
    finally:
        process.kill()
        await process.wait()


async def main() -> None:
    print("| runs | Mooncake GB/s | NIXL GB/s | kvferry GB/s, order to done |\n|---|---|---|---|")
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet())
        theirs, ours = fleet.daemon("prefill"), fleet.daemon("decode")
        await fleet.ready(theirs, ours, timeout_s=START_S)
        router = await stack.enter_async_context(RouterClient(ours.url))
        target, initiator = [await stack.enter_async_context(side(seed)) for seed in (SOURCE_SEED, READER_SEED)]
        for nbytes in RUNS:
            source = await host.rank(theirs, "prefill", nbytes)
            reader = await host.rank(ours, "decode", nbytes)
            rng = np.random.default_rng(nbytes)
            source.region.array()[:] = rng.integers(0, 255, host.POOL, dtype=np.uint8)
            with raw_pair(source.region, reader.region) as raw:
                row = await host.compare(raw, router, source, reader, nbytes, NBYTES, "permuted")
            there, here = (rng.permutation(host.POOL // nbytes)[: NBYTES // nbytes] for _ in range(2))
            took = [await initiator.read(target, there, here, nbytes) for _ in range(host.REPEATS)]
            rates = (f"{NBYTES / seconds / 1e9:.2f}" for seconds in (min(took[1:]), row.raw_s, row.total_s))
            print(f"| {nbytes >> 10} KiB | {' | '.join(rates)} |", flush=True)
            await source.client.close()
            await reader.client.close()


if __name__ == "__main__":
    asyncio.run(main())
