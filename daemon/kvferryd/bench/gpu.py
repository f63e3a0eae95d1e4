"""GPU memory: every way of kvferry beside the copy ceiling and NIXL's own reads, one table from one run.

    kvferry bench gpu [--quick] [--case TEXT] [--checksum] [--json rows.jsonl]

Runs on one GPU, on two, or on four (sources on the first ones, readers on the last ones). The large request is that of
an 80-layer model, K and V, blocks of 16 tokens with 2 heads of 128 in bf16, at permuted ids on both sides: 671 MB in
runs of 8 KiB. All that arrives is compared word by word with an oracle.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvferry.errors import Internal, KvferryError, Malformed
from kvferry.memory import cuda
from kvferryd.bench import Options, gpu_raw, rpc
from kvferryd.bench.gpu_cases import FULL, TINY, Case, Pair, cases
from kvferryd.bench.gpu_engines import Engine, Stage, Way
from kvferryd.bench.gpu_measure import measure
from kvferryd.bench.gpu_table import Row, Table
from kvferryd.demo.fleet import Fleet

REPEATS, QUICK_REPEATS, SLOW_REPEATS, WARM_UP, SLOW_WARM_UP = 15, 5, 3, 3, 1
CASE_S, CLOSE_S, WHOLE_S = 30.0, 10.0, 280.0
AUTO, STAGED, MAPPED, DIRECT = "auto", "staged", "mapped", "direct"
SLOW = frozenset({DIRECT})
"""Ways that are measured for the first case alone, with few repeats: it takes 280 ms each."""
QUICK = 7
"""How many cases a quick run has; the first are the ones to know."""


def flags(way: str, arena_mb: int, *of_readers: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags of a way's source daemons, and of its readers."""
    staged = ("--way", STAGED, "--arena-mb", str(arena_mb))
    sources, readers = {
        AUTO: ((), ()),
        STAGED: (staged, staged),
        MAPPED: ((), ("--way", MAPPED)),
        DIRECT: ((), ("--way", DIRECT, "--nixl-threads", "8")),
    }[way]
    return sources, (*readers, *of_readers)


@asynccontextmanager
async def staged_for(way: str, gpus: tuple[cuda.Device, ...]) -> AsyncIterator[tuple[Stage, Way]]:
    """Daemons of one rank on each side, ready, for one way. Raises KvferryError (`not_ready`)."""
    async with Fleet() as fleet:
        stage = Stage(fleet, gpus, 1)
        stage.add(way, *flags(way, 1536 if gpus else 16), 1)
        await stage.ready()
        (only,) = stage.ways
        if only.refused:
            raise Internal("not_ready", only.refused[0])
        yield stage, only


@asynccontextmanager
async def engines(stage: Stage, pair: Pair, way: Way) -> AsyncIterator[tuple[Engine, Engine]]:
    """A source, filled, and a reader."""
    sources, readers = await stage.open(pair, [way])
    try:
        yield opened(sources[way.source]), opened(readers[way.name])
    finally:
        await closed([*readers.values(), *sources.values()])


def main(options: Options) -> int:
    """Print the table; 0 when every row was measured and every byte arrived."""
    need_torch()
    gpus = cuda.devices() if options.device == "cuda" else ()
    table = Table(options.json)
    try:
        with table.failing("the run", "all of it"):
            asyncio.run(_run(options, gpus, table))
        with table.failing("grpc.aio", "all of it"):
            found = rpc.measure()
            print()
            rpc.show(found)
            for each in found:
                table.keep({"round_trip": each.what, "median_us": each.median_us})
    finally:
        table.close()
    if table.failures:
        print(f"\n{table.failures} rows FAILED")
    return 1 if table.failures else 0


def need_torch() -> None:
    """Raises ModuleNotFoundError once, rather than in every row."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")


def machine(gpus: Sequence[cuda.Device]) -> dict[str, object]:
    """The machine, and the load that it had already."""
    import torch

    names = [torch.cuda.get_device_name(gpu.index) for gpu in gpus] or ["host memory"]
    counted = [f"{len(list(same))} x {name}" for name, same in itertools.groupby(names)]
    return {
        "on": " and ".join(counted),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


async def _run(options: Options, gpus: tuple[cuda.Device, ...], table: Table) -> None:
    every = cases(FULL, len(gpus)) if gpus else cases(TINY, 4)
    wanted = [case for case in every[: QUICK if options.quick else None] if options.case in case.name]
    if not wanted:
        raise Malformed(
            "unknown_case",
            "no case has that in its name",
            field="--case",
            value=options.case,
            remedy=f"cases here: {', '.join(case.name for case in every)}",
        )
    async with asyncio.timeout(WHOLE_S), Fleet() as fleet:
        stage = Stage(fleet, gpus, max(case.pair.source.tp for case in wanted))
        ranks = max(case.pair.destination.tp for case in wanted)
        more = ("--checksum",) if options.checksum else ()
        for name in (DIRECT, AUTO, STAGED, MAPPED):
            stage.add(
                name,
                *flags(name, 1536 if gpus else 16, *more),
                wanted[0].pair.destination.tp if name in SLOW else ranks,
            )
        # Importing torch takes seconds, here as in the daemons.
        await asyncio.gather(stage.ready(), asyncio.to_thread(lambda: table.head(machine(gpus))))
        with table.failing("raw", "all of it"):
            gpu_raw.measure(every[0], gpus, table)
        for way in stage.ways:
            if way.refused:
                table.add(Row(way.name, "not measured", error=way.refused[0]))
        usable = [way for way in stage.ways if not way.refused]
        for number, (pair, same) in enumerate(itertools.groupby(wanted, key=lambda case: case.pair)):
            ways = [way for way in usable if number == 0 or way.name not in SLOW]
            await _pair(pair, list(same), ways, stage, options.quick, table)


async def _pair(pair: Pair, wanted: list[Case], ways: list[Way], stage: Stage, quick: bool, table: Table) -> None:
    """All cases of a pair of engines, which are made once for each way."""
    sources, readers = await stage.open(pair, ways)
    try:
        for case in wanted:
            for way in ways:
                slow = way.name in SLOW
                if slow and case is not wanted[0]:
                    continue
                with table.failing(way.name, case.name):
                    source, reader = opened(sources[way.source]), opened(readers[way.name])
                    repeats = SLOW_REPEATS if slow else QUICK_REPEATS if quick else REPEATS
                    async with asyncio.timeout(CASE_S):
                        row = await measure(case, way.name, source, reader, repeats, SLOW_WARM_UP if slow else WARM_UP)
                    table.add(row)
    finally:
        await closed([*readers.values(), *sources.values()])


def opened(engine: Engine | BaseException) -> Engine:
    if isinstance(engine, BaseException):
        raise engine
    return engine


async def closed(engines: Sequence[Engine | BaseException]) -> None:
    """End those that were opened."""
    for engine in engines:
        if isinstance(engine, Engine):
            with contextlib.suppress(KvferryError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await engine.close()
