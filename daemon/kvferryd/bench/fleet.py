"""The cost of the fleet page: a proxy that knows so many pairs of engines, each with two daemons, and pages that look.

    kvferry bench fleet [--pairs 64] [--pages 4]

Every daemon is a process of its own with an engine, and every pair hands one request over before anybody looks. A page
asks as the fleet page does. Rows: nobody looks, one page, and so many pages. p99, of nobody's: a ratio, to the first
row's p99.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from statistics import median, quantiles

import httpx

from kvferry.tables import BlockTable
from kvferryd.bench.gpu_engines import SMALLEST, Engine, cpu_s
from kvferryd.demo.fleet import DaemonService, Fleet, Service

PAGE_S, PROBE_S, FOR_S, READY_S = 2.0, 0.05, 20.0, 120.0
STARTED_AT_ONCE = 4
COLUMNS = (
    "pages", "KB an answer", "answer p50 ms", "/healthz p50 ms", "p99 ms", "p99, of nobody's", "proxy's CPU",
    "CPU of each daemon", "pairs told", "daemons that do not answer",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 where a daemon or a pair was not told."""
    parser = argparse.ArgumentParser(
        prog="kvferry bench fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=64, metavar="N", help="of engines (default: 64)")
    parser.add_argument("--pages", type=int, default=4, metavar="N", help="in the last row (default: 4)")
    parser.add_argument("--seconds", type=float, default=FOR_S, metavar="S", help="of each row (default: 20)")
    options = parser.parse_args(argv)
    return asyncio.run(_measure(options.pairs, options.pages, options.seconds))


async def _measure(pairs: int, pages: int, seconds: float) -> int:
    async with Fleet() as fleet, AsyncExitStack() as stack:
        of_pairs: list[tuple[DaemonService, DaemonService]] = []
        while len(of_pairs) < pairs:
            some = range(len(of_pairs), min(len(of_pairs) + STARTED_AT_ONCE, pairs))
            started = [(fleet.daemon(f"p-{number}"), fleet.daemon(f"d-{number}")) for number in some]
            await fleet.ready(*chain(*started), timeout_s=READY_S)
            of_pairs += started
            print(f"{len(of_pairs)} of {pairs} pairs of daemons are up", file=sys.stderr, flush=True)
        for number, (there, here) in enumerate(of_pairs):
            await _hand_over(stack, there, here, number)
        proxy, daemons = _proxy(fleet, of_pairs), list(chain(*of_pairs))
        await fleet.ready(proxy, timeout_s=READY_S)
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        missing, of_nobody = 0, 0.0
        for looking in sorted({0, 1, pages}):
            cells, told, p99 = await _row(proxy, daemons, looking, seconds, of_nobody)
            of_nobody = of_nobody or p99
            print(f"| {' | '.join(cells)} |", flush=True)
            missing += looking > 0 and told != (pairs, 0)
    return 1 if missing else 0


async def _hand_over(stack: AsyncExitStack, there: DaemonService, here: DaemonService, number: int) -> None:
    """Two engines, which stay, and a request from one to the other."""
    source = await Engine.open(f"p-{number}", [there], [SMALLEST], [], False)
    stack.push_async_callback(source.close)
    reader = await Engine.open(f"d-{number}", [here], [SMALLEST], [], False)
    stack.push_async_callback(reader.close)
    table = {"full": BlockTable.of([0])}
    await source.ranks[0].client.publish("one", table, 16)
    await reader.ranks[0].client.receive("one", table, (0, 16), source=source.source)


def _proxy(fleet: Fleet, of_pairs: Sequence[tuple[DaemonService, DaemonService]]) -> Service:
    """It shows what daemons say; the engines that it names are not asked."""
    (there, here), *others = of_pairs
    flags = ["--fleet"]
    for number, pair in enumerate(others, 1):
        for role, daemon in zip(("prefill", "decode"), pair, strict=True):
            flags += [f"--{role}", f"http://{role}-{number}.invalid:8000,daemon={daemon.url}"]
    return fleet.proxy(
        "http://prefill-0.invalid:8000", "http://decode-0.invalid:8000", prefill_daemons=[there],
        decode_daemons=[here], flags=flags,
    )  # fmt: skip


async def _row(
    proxy: Service, daemons: Sequence[DaemonService], pages: int, seconds: float, of_nobody: float
) -> tuple[list[str], tuple[int, int], float]:
    """The cells; the pairs that the last answer told, and the daemons in it that did not answer; and p99 of /healthz.
    of_nobody: the same while nobody looks, 0 where this is it."""
    until, answers = time.monotonic() + seconds, list[tuple[float, httpx.Response]]()
    before, began = (cpu_s([proxy]), cpu_s(daemons)), time.monotonic()
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=30) as http:

        async def page() -> None:
            while time.monotonic() < until:
                asked = time.perf_counter()
                answer = await http.get("/v1/fleet")
                answers.append((time.perf_counter() - asked, answer.raise_for_status()))
                await asyncio.sleep(PAGE_S)

        probed: list[float] = []

        async def probe() -> None:
            while time.monotonic() < until:
                asked = time.perf_counter()
                (await http.get("/healthz")).raise_for_status()
                probed.append(time.perf_counter() - asked)
                await asyncio.sleep(PROBE_S)

        await asyncio.gather(probe(), *(page() for _ in range(pages)))
    took = time.monotonic() - began
    used = (cpu_s([proxy]) - before[0]) / took, (cpu_s(daemons) - before[1]) / took / len(daemons)
    last = answers[-1][1].json() if answers else {"pairs": [], "daemons": []}
    told = len(last["pairs"]), sum(row["error"] is not None for row in last["daemons"])
    p99 = quantiles(probed, n=100)[98]
    return list(_cells(pages, answers, (median(probed), p99), p99 / (of_nobody or p99), used, told)), told, p99


def _cells(
    pages: int, answers: Sequence[tuple[float, httpx.Response]], probed: tuple[float, float], ratio: float,
    used: tuple[float, float], told: tuple[int, int],
) -> Iterator[str]:  # fmt: skip
    yield str(pages)
    yield f"{median(len(answer.content) for _, answer in answers) / 1e3:.0f}" if answers else ""
    yield f"{1e3 * median(seconds for seconds, _ in answers):.1f}" if answers else ""
    yield from (f"{1e3 * each:.1f}" for each in probed)
    yield f"{ratio:.2f}"
    yield from (f"{share:.1%}" for share in used)
    yield from (str(each) if answers else "" for each in told)
