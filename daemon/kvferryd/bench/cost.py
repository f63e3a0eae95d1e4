"""The cost of a daemon at rest and at work: memory, threads, wake-ups, processor time for each request and each GB.

    kvferry bench cost [--quick] [--device cpu]

One pair of engines in this process, each with its daemon. Resting, the daemons are looked at for some seconds in which
nobody asks them for anything: just started, with an engine, and after all requests. Wake-ups are the voluntary context
switches of all threads (Linux counts one whenever a thread begins to wait), and are told by the names of threads. At
work, requests of one block, of 1,024 and of 16,384 tokens are published and received, alone and 64 at once; processor
time is user and system of each daemon, what it writes down afterwards included.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvferry.memory import cuda
from kvferry.tables import BlockTable
from kvferryd.bench.gpu import AUTO, engines, flags, machine, need_torch
from kvferryd.bench.gpu_cases import NHD, POISON, Case, Pair
from kvferryd.bench.gpu_engines import Engine, Stage, cpu_s
from kvferryd.bench.gpu_measure import publish, receive
from kvferryd.bench.trace import GPU_KIB, HOST_KIB, model
from kvferryd.demo.fleet import DaemonService, Fleet

POOL = 1 << 17
WORK = ((16, 1, 256), (16, 64, 8), (1024, 1, 128), (1024, 64, 4), (16384, 1, 16))
"""Tokens of a request, requests at once, how often."""
QUICK = 8
"""So many times less often."""
REST_S, QUICK_REST_S, AFTER_S, READY_S, WARM_UP = 10.0, 3.0, 1.0, 60.0, 2
LOOP = "its loop"
"""The first thread; others that no library has named have the program's name."""
AT_REST = "daemon", "state", "own MB", "RSS, MB", "threads", "descriptors", "CPU", "wake-ups a second", "of them"
AT_WORK = (
    "tokens", "MB", "at once", "requests", "order to done ms", "source's CPU ms a request", "reader's CPU ms a request",
    "CPU s a GB",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """At one process: when, its processor seconds, and how often each thread (id, name) has waited so far."""

    at: float
    cpu_s: float
    waited: dict[tuple[int, str], int]


def look(daemon: DaemonService) -> Look:
    waited = {}
    for task in Path(f"/proc/{daemon.process.pid}/task").iterdir():
        try:
            status, name = _status(task), (task / "comm").read_text().strip()
            if int(task.name) == daemon.process.pid:
                name = LOOP
        except OSError:  # a thread that has ended
            continue
        waited[int(task.name), name] = int(status.get("voluntary_ctxt_switches", "0"))
    return Look(time.perf_counter(), cpu_s([daemon]), waited)


def wakeups(before: Look, after: Look) -> Counter[str]:
    """A second, by the names of threads."""
    found = Counter[str]()
    for (task, name), count in after.waited.items():
        found[name] += count - before.waited.get((task, name), 0)
    return Counter({name: round(count / (after.at - before.at)) for name, count in found.items()})


async def rest(daemons: Sequence[DaemonService], state: str, seconds: float) -> None:
    """Print a row for each daemon that nobody asks for anything."""
    before = [look(daemon) for daemon in daemons]
    await asyncio.sleep(seconds)
    for daemon, earlier in zip(daemons, before, strict=True):
        print(f"| {' | '.join([daemon.name, state, *_resting(daemon, earlier)])} |", flush=True)


def _resting(daemon: DaemonService, before: Look) -> Iterator[str]:
    after, process = look(daemon), Path(f"/proc/{daemon.process.pid}")
    status, woken = _status(process), wakeups(before, after)
    for name in ("RssAnon", "VmRSS"):
        yield f"{int(status[name].split()[0]) / 1024:.0f}" if name in status else ""
    yield status["Threads"]
    yield str(len(list((process / "fd").iterdir())))
    yield f"{(after.cpu_s - before.cpu_s) / (after.at - before.at):.1%}"
    yield f"{woken.total()}"
    yield ", ".join(f"{name} {count}" for name, count in woken.most_common(3) if count)


def _status(process: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (process / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


async def work(case: Case, source: Engine, reader: Engine, times: int) -> list[str]:
    """The cells of a row; the last bytes to arrive are compared. Raises KvferryError (`wrong_bytes`)."""
    ids = case.ids()
    given, taken = ([{"full": BlockTable.of(blocks)} for blocks in side] for side in ids)
    for _ in range(WARM_UP):
        await receive(case, source, reader, await publish(case, source, given), taken)
    before = cpu_s(source.daemons), cpu_s(reader.daemons)
    took_s = []
    for number in range(times):
        requests = await publish(case, source, given)
        if number == times - 1:
            reader.wipe(POISON)
        took_s.append((await receive(case, source, reader, requests, taken)).seconds)
    await asyncio.sleep(AFTER_S)  # the work behind the end is part of it
    used = cpu_s(source.daemons) - before[0], cpu_s(reader.daemons) - before[1]
    reader.synchronize()
    case.check(ids, 0, reader.ranks[0].pool)
    count = times * case.requests
    return [
        f"{case.tokens:,}", f"{case.nbytes / case.requests / 1e6:.2f}", str(case.requests), str(count),
        f"{1e3 * median(took_s) / case.requests:.2f}", *(f"{1e3 * each / count:.2f}" for each in used),
        f"{sum(used) / (times * case.nbytes / 1e9):.2f}",
    ]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print both tables; 0 when every byte arrived: the figures are for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(
        prog="kvferry bench cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="look for 3 seconds instead of 10, an eighth of the work")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: host memory (default: cuda)")
    options = parser.parse_args(argv)
    need_torch()
    asyncio.run(_run(cuda.devices() if options.device == "cuda" else (), options.quick))
    return 0


async def _run(gpus: tuple[cuda.Device, ...], quick: bool) -> None:
    seconds, kib = QUICK_REST_S if quick else REST_S, GPU_KIB if gpus else HOST_KIB
    pair = Pair(model(kib), NHD, NHD, POOL)
    async with Fleet() as fleet:
        stage = Stage(fleet, gpus, 1)
        stage.add(AUTO, *flags(AUTO, 0), 1)
        (way,) = stage.ways
        daemons = [*way.sources, *way.readers]
        await fleet.ready(*daemons, timeout_s=READY_S)
        print(", ".join(f"{name} {value}" for name, value in machine(gpus).items()) + f", {kib} KiB a token\n")
        print(f"| {' | '.join(AT_REST)} |\n|{'---|' * len(AT_REST)}")
        await rest(daemons, "just started", seconds)
        await stage.ready()
        async with engines(stage, pair, way) as (source, reader):
            await rest(daemons, "with an engine", seconds)
            rows = [
                await work(Case(f"{tokens} tokens", pair, tokens, at_once), source, reader, _fewer(times, quick))
                for tokens, at_once, times in WORK
            ]
            await rest(daemons, "after all requests", seconds)
        print(f"\n| {' | '.join(AT_WORK)} |\n|{'---|' * len(AT_WORK)}")
        for row in rows:
            print(f"| {' | '.join(row)} |")


def _fewer(times: int, quick: bool) -> int:
    return max(1, times // QUICK) if quick else times
