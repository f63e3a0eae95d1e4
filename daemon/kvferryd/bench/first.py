"""The first request between two engines that have never met, beside later ones: each pair has two daemons of its own.

    kvferry bench first

On host memory, and on GPUs where there are any (one or two of them). A request is timed as the decode engine sees it,
from its call to the done event; `connecting` and the others are phases of the records. `order` names what comes when:

- engine: the decode engine names the source itself; nothing is known before
- router: the order comes first, and the engine reserves blocks when its prefill is over, AHEAD_S later
- known: the decode daemon was given the source's address as a setting, and has met it before
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

from kvferry.errors import KvferryError
from kvferry.memory import cuda
from kvferry.router import RouterClient
from kvferry.schemas import OrderBody
from kvferry.tables import BlockTable
from kvferryd.bench.gpu_cases import NHD, Cache, Model
from kvferryd.bench.gpu_engines import Engine
from kvferryd.config import OPTIONS
from kvferryd.demo.fleet import DaemonService, Fleet

PAIRS, LATER = 3, 12
UP_S, WHOLE_S, ONE_S = 60.0, 400.0, 20.0
REST_S = 2.0
"""Engines are up for so long before the first request."""
AHEAD_S = 0.3
TOKENS = 1024
HOST, GPU = Model(16, "kv", 2, 128), Model(32, "kv", 8, 128)
"""Models of 16 KiB and 128 KiB a token: caches of 64 MiB and 8 GiB, requests of 16 and 134 MB."""
HOST_TOKENS, GPU_TOKENS = 4096, 65536
PHASES = ("connecting", "reading", "verifying")
MET = "peer met"


@dataclass(frozen=True, slots=True)
class _Taken:
    ms: float
    phases_ms: dict[str, float]
    path: str


def main() -> int:
    """Print the table; 0 always: the ratios are for docs/benchmarks.md."""
    asyncio.run(_measure())
    return 0


async def _measure() -> None:
    try:
        gpus: Sequence[cuda.Device] = cuda.devices()
    except KvferryError:
        gpus = ()
    orders = ["engine", "router", *(["known"] if "known_peers" in OPTIONS else [])]
    print("| memory | order | pair | first ms | later p50 | max | first later than others by | path |", *PHASES, "|")
    print("|" + "---|" * 9)
    async with asyncio.timeout(WHOLE_S):
        for on in [(), *([(gpus[0].index, gpus[-1].index)] if gpus else [])]:
            async with Fleet() as fleet:
                os.environ["TRITON_CACHE_DIR"] = str(fleet.directory / "kernels")  # empty for the first pair
                for order in orders:
                    for number in range(PAIRS):
                        await _pair(fleet, order, number, on)


async def _pair(fleet: Fleet, order: str, number: int, on: tuple[int, ...]) -> None:
    """on: the GPUs of source and reader; empty for host memory."""
    name, model, tokens = (
        f"{order}-{number}-{'gpu' if on else 'host'}",
        *((GPU, GPU_TOKENS) if on else (HOST, HOST_TOKENS)),
    )
    devices = [("--device", f"cuda:{each}") for each in on] or [("--device", "cpu")] * 2
    source_daemon = fleet.daemon(f"source-{name}", flags=devices[0])
    known = ("--known-peers", source_daemon.peer) if order == "known" else ()
    reader_daemon = fleet.daemon(f"reader-{name}", flags=[*devices[1], *known])
    began = time.perf_counter()
    cache = Cache(model, NHD, tokens)
    async with AsyncExitStack() as stack:
        stack.callback(_end, fleet, source_daemon, reader_daemon)
        await fleet.ready(source_daemon, reader_daemon, timeout_s=UP_S)
        async with asyncio.timeout(UP_S):
            source, reader = await asyncio.gather(
                Engine.open(f"source-{name}", [source_daemon], [cache], on[:1], False),
                Engine.open(f"reader-{name}", [reader_daemon], [cache], on[1:], False),
            )
        stack.push_async_callback(source.close)
        stack.push_async_callback(reader.close)
        router = await stack.enter_async_context(RouterClient(reader_daemon.url))
        up_s = time.perf_counter() - began
        await asyncio.sleep(REST_S)
        every = [await _take(order, source, reader, router) for _ in range(1 + LATER)]
        first, later = every[0], [each.ms for each in every[1:]]
        p50 = median(later)
        phases = [f"{first.phases_ms.get(phase, 0.0):.1f}" for phase in PHASES]
        print(
            f"| {'GPU' if on else 'host'} | {order} | {number} | {first.ms:.1f} | {p50:.1f} | {max(later):.1f} "
            f"| {first.ms - p50:.1f} | {first.path} |", " ".join(phases), "|", f"up after {up_s:.1f} s", flush=True,
        )  # fmt: skip
        if True:
            print("  first:", json.dumps(first.phases_ms), "met:", _met(reader_daemon), flush=True)
            print("  later:", json.dumps(every[-1].phases_ms), flush=True)


async def _take(order: str, source: Engine, reader: Engine, router: RouterClient) -> _Taken:
    """Publish, order and receive a request."""
    request_id, blocks = uuid.uuid4().hex, {"full": BlockTable.of(range(TOKENS // NHD.block))}
    async with asyncio.timeout(ONE_S):
        if order == "router":
            await router.order(OrderBody(request_id=request_id, source=source.source))
            await asyncio.sleep(AHEAD_S)  # the prefill
        await source.ranks[0].client.publish(request_id, blocks, TOKENS)
        named = None if order == "router" else source.source
        began = time.perf_counter()
        received = await reader.ranks[0].client.receive(request_id, blocks, (0, TOKENS), source=named)
        ms = 1e3 * (time.perf_counter() - began)
        record = await router.transfer(received.transfer_id)
        return _Taken(ms, record.phases_ms, record.path)


def _met(daemon: DaemonService) -> str:
    """How long each step of the daemon's handshakes took, as its log says."""
    return " ".join(line for line in daemon.log.read_text(errors="replace").splitlines() if MET in line)


def _end(fleet: Fleet, *daemons: DaemonService) -> None:
    for daemon in daemons:
        daemon.process.kill()
        daemon.process.wait()
        fleet.services.remove(daemon)


if __name__ == "__main__":
    main()
