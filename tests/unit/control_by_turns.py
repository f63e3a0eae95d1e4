"""The control path of several commits, by turns: python tests/unit/control_by_turns.py [--rounds N] BEFORE NOW ...

Each is a folder with a checkout. All fleets stand beside each other, and blocks of 256 transfers go to one after the
other: what else the machine does falls on all of them. Figures are those of `kvferry bench control`, and the processor
time of both daemons, user and system, with that of the half second after a block. A ratio is the median over the
rounds, to the first folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

BLOCK, WARM = 256, 512
SERIES = (1, 64)
"""Transfers at once."""


async def work() -> None:
    """A fleet of the commit that is on PYTHONPATH: for each line of stdin, which says how many at once, a block."""
    from kvferryd.bench import control as c
    from kvferryd.bench.gpu_engines import cpu_s

    async with c._Fleet() as fleet:
        daemons = [fleet.daemon(name) for name in ("source", "reader")]
        await fleet.ready(*daemons, timeout_s=60)
        engine = await asyncio.create_subprocess_exec(
            sys.executable, c.__file__, "source", str(daemons[0].socket),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert engine.stdin is not None and engine.stdout is not None
        try:
            address = (await engine.stdout.readline()).decode().strip()
            rank = await c.host.rank(daemons[1], c.READER, c.RUN_NBYTES)
            pair = c._Pair(fleet, engine, rank, c.SourceBody(engine_id=c.SOURCE, address=address))
            for at_once in SERIES:
                await pair.series(at_once, WARM)
            print("ready", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                before = cpu_s(daemons)
                costs, took_ms = await pair.series(int(line), BLOCK)
                told = {f"{where}, us": cost["us"] / BLOCK for where, cost in costs.items()}
                told["both daemons, all threads, us"] = 1e6 * (cpu_s(daemons) - before) / BLOCK
                print(json.dumps({"order to done, ms": took_ms, **told}), flush=True)
            await rank.client.close()
        finally:
            engine.stdin.close()
            await engine.wait()


def begun(folder: Path) -> subprocess.Popen[str]:
    """A worker of this checkout, whose fleet is warm."""
    named = os.environ | {"PYTHONPATH": f"{folder / 'daemon'}:{folder / 'clients'}", "NIXL_LOG_LEVEL": "ERROR"}
    worker = subprocess.Popen(
        [sys.executable, __file__, "--work", str(folder)], env=named, cwd="/", text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert worker.stdout is not None
    if worker.stdout.readline() != "ready\n":
        raise SystemExit(f"{folder}: its daemons did not start")
    return worker


def block(worker: subprocess.Popen[str], at_once: int) -> dict[str, float]:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{at_once}\n")
    worker.stdin.flush()
    told: dict[str, float] = json.loads(worker.stdout.readline())
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("folders", nargs="+", type=lambda folder: Path(folder).resolve())
    said = parser.parse_args()
    if said.work:
        asyncio.run(work())
        return
    workers = [begun(folder) for folder in said.folders]
    found: dict[tuple[int, str], list[list[float]]] = defaultdict(lambda: [[] for _ in workers])
    for number in range(said.rounds):
        turns = list(enumerate(workers))
        for at_once in SERIES:
            for which, worker in turns if number % 2 else reversed(turns):
                for name, figure in block(worker, at_once).items():
                    found[at_once, name][which].append(figure)
    print(
        f"| at once | figure | {' | '.join(folder.name for folder in said.folders)} |\n|{'---|' * (2 + len(workers))}"
    )
    for (at_once, name), figures in found.items():
        ratios = [median(now / first for first, now in zip(figures[0], each, strict=True)) for each in figures]
        cells = [f"{median(each):.2f} ({ratio:.2f})" for each, ratio in zip(figures, ratios, strict=True)]
        print(f"| {at_once} | {name} | {' | '.join(cells)} |")
    for worker in workers:
        worker.communicate()


if __name__ == "__main__":
    main()
