"""The cost of being watched: /healthz beside open status pages, with a full history of transfers of 3 ranks.

A page asks as the status page does where all of it is in view. `whole`: for everything each time; `changes`: for what
has changed since its last answer. p99, of nobody's: a ratio, to p99 while nobody looks.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean, median, quantiles

import httpx
import numpy as np

from kvferry.engine import EngineClient
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.memory import SharedRegion
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody, SourceBody
from kvferryd.demo.fleet import DaemonService, Fleet

RANKS, RECORDS, PAGES = 3, 1000, 4
PAGE_S, PROBE_S, FOR_S = 1.0, 0.02, 20.0
SECTIONS, SECTIONS_EVERY = ("/v1/engines?manifests=false", "/v1/leases?ended=25", "/v1/peers"), 4
HISTORY, HISTORY_EVERY = "/v1/history?span_s=300&step_s=5&since={since}", 5
"""The plots of 5 minutes, in steps of 5 s: they are asked for at every fifth poll, from the last step on."""
WAYS = {"nobody": "", "whole": "limit=10000", "changes": "since={cursor}"}


def main() -> int:
    """Print the table; 0 always: there is no budget."""
    asyncio.run(_measure())
    return 0


async def _measure() -> None:
    async with Fleet() as fleet, AsyncExitStack() as stack:
        daemons = fleet.daemons("watched", RANKS)
        await fleet.ready(*daemons, timeout_s=60)
        epoch = uuid.uuid4().hex
        for rank, daemon in enumerate(daemons):
            await stack.enter_async_context(_engine(daemon, epoch, rank))
        await fleet.ready(*daemons, timeout_s=60, path="/readyz")
        await _fill(daemons[0])
        print(
            f"| {PAGES} pages ask for | MB a page and poll | /healthz p50 ms | p99 ms | p99, of nobody's | worst ms | "
            "CPU of the daemon |"
        )
        print("|---|---|---|---|---|---|---|")
        of_nobody = None
        for way, query in WAYS.items():
            megabytes, took_ms, share = await _watched(daemons[0], query)
            p99 = quantiles(took_ms, n=100)[98]
            of_nobody = of_nobody or p99
            print(
                f"| {way} | {megabytes:.3f} | {median(took_ms):.1f} | {p99:.1f} | {p99 / of_nobody:.2f} | "
                f"{max(took_ms):.1f} | {share:.0%} |",
                flush=True,
            )


@asynccontextmanager
async def _engine(daemon: DaemonService, epoch: str, rank: int) -> AsyncIterator[None]:
    told = {"engine_id": "watched", "epoch": epoch, "rank": rank, "world_size": RANKS}
    async with await EngineClient.connect(str(daemon.socket), **told) as client:  # type: ignore[arg-type]
        region = await client.allocate(1 << 12)
        assert isinstance(region, SharedRegion)  # the daemon has no GPU
        manifest = ManifestBuilder("watched", epoch, ModelInfo(name="m", fingerprint="f"), rank=rank, world_size=RANKS)
        manifest.region(0, "host", nbytes=region.nbytes, address=region.address)
        manifest.group("full", num_blocks=16, block_size=16)
        keys = region.array().view(np.uint8).reshape(16, 16, 16)
        manifest.component("full", layer=0, name="k", array=keys, axes=("block", "slot", "dim"), encoding="uint8")
        await client.register(manifest.build())
        yield


async def _fill(daemon: DaemonService) -> None:
    """Orders for which nobody reserves: each leaves a record of all ranks, with their errors."""
    source = SourceBody(engine_id="nobody", address="127.0.0.1:9")
    async with RouterClient(daemon.url, timeout_s=60) as router:
        for first in range(0, RECORDS, 50):
            bodies = [OrderBody(request_id=f"r{first + i}", source=source, deadline_ms=500) for i in range(50)]
            ordered = await asyncio.gather(*(router.order(body) for body in bodies))
            await asyncio.gather(*(router.wait(each.transfer_id) for each in ordered))


async def _watched(daemon: DaemonService, query: str) -> tuple[float, list[float], float]:
    """MB of a page and poll, ms of each /healthz, and the daemon's share of a core, while pages ask by this query."""
    piped = asyncio.subprocess.PIPE
    pages = await asyncio.create_subprocess_exec(sys.executable, __file__, daemon.url, query, stdin=piped, stdout=piped)
    assert pages.stdout is not None
    try:
        await pages.stdout.readline()  # every page has asked once
        cpu_s, began = _cpu_s(daemon), time.monotonic()
        took_ms = await _probe(daemon)
        share = (_cpu_s(daemon) - cpu_s) / (time.monotonic() - began)
    finally:
        said, _ = await pages.communicate(b"")  # the end of its stdin
    return float(said), took_ms, share


async def _probe(daemon: DaemonService) -> list[float]:
    took_ms, until = [], time.monotonic() + FOR_S
    async with httpx.AsyncClient(base_url=daemon.url, trust_env=False) as http:
        while time.monotonic() < until:
            began = time.perf_counter()
            await http.get("/healthz")
            took_ms.append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(PROBE_S)
    return took_ms


def _cpu_s(daemon: DaemonService) -> float:
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _pages(url: str, query: str) -> None:
    """Open pages until stdin ends; then print the bytes of a later poll, in MB."""
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        opened = [asyncio.Event() for _ in range(PAGES if query else 0)]
        nbytes: list[int] = []
        pages = [asyncio.create_task(_page(http, query, nbytes, each)) for each in opened]
        for each in opened:
            await each.wait()
        print("open", flush=True)
        await ended
        for page in pages:
            page.cancel()
    print(fmean(nbytes[PAGES:] or [0]) / 1e6)


async def _page(http: httpx.AsyncClient, query: str, nbytes: list[int], opened: asyncio.Event) -> None:
    cursor, since = "", 0
    for poll in itertools.count():
        paths = [f"/v1/transfers?{query.format(cursor=cursor)}", "/v1/totals"]
        if poll % SECTIONS_EVERY == 0:
            paths.extend(SECTIONS)
        if plots := poll % HISTORY_EVERY == 0:
            paths.append(HISTORY.format(since=since))
        answers = await asyncio.gather(*(http.get(path) for path in paths))
        nbytes.append(sum(len(answer.raise_for_status().content) for answer in answers))
        cursor = answers[0].json()["cursor"]
        if plots:
            since = int(answers[-1].json()["now"]) // 5 * 5
        opened.set()
        await asyncio.sleep(PAGE_S)


if __name__ == "__main__":
    asyncio.run(_pages(*sys.argv[1:]) if sys.argv[1:] else _measure())
