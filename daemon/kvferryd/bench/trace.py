"""A public request trace, replayed through one pair of engines and their daemons.

    kvferry bench trace mooncake_conversation_trace.jsonl.gz [--speed 1 5 20 40] [--seconds 60]

Each request of the trace is published, ordered and moved at its time, at so many bytes a token, from and to blocks in
no order. Latency is from the moment at which it was to arrive until the reader's engine knows that it is done, waiting
for free blocks included. Beside it is what an ideal link of the measured ceiling would take for the same arrivals: one
that all requests under way share equally, and one that serves one after another. Needs no download: the trace is a
file, whose lines have `timestamp` (ms) and `input_length` (tokens), such as the Mooncake project publishes.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import heapq
import itertools
import json
import math
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvferry.errors import Internal, KvferryError, Malformed
from kvferry.memory import cuda
from kvferry.router import RouterClient
from kvferry.schemas import TransferState
from kvferry.tables import BlockTable
from kvferryd.bench.gpu import AUTO, DIRECT, MAPPED, STAGED, engines, machine, need_torch, staged_for
from kvferryd.bench.gpu_cases import ITEM, NHD, POISON, Model, Pair
from kvferryd.bench.gpu_engines import Engine, cpu_s
from kvferryd.bench.gpu_raw import ends
from kvferryd.observe.spans import PHASES

BATCH_S = 3.0
"""The stamps of the trace come in batches this far apart: an arrival lies somewhere in the time that follows."""
DIM, LAYER_KIB = 128, 4
"""A layer of 8 KV heads of 128 in bf16, K and V, has 4 KiB a token."""
GPU_KIB, HOST_KIB, KIB = 128, 1, (1, 2, 4, 8, 16, 32, 64, 128)
POOL = 1 << 18
"""Tokens in each engine's cache, half of them where both have one GPU: the trace's longest request has 126,195."""
CEILING_NBYTES, HOST_CEILING_NBYTES = 512 << 20, 64 << 20
SPEEDS, QUICK_SPEEDS, SECONDS, QUICK_SECONDS = (1.0, 5.0, 20.0, 40.0), (1.0, 20.0), 60.0, 20.0
WARM_UP, DEADLINE_S, DRAIN_S, SHOW_S = 8, 30.0, 30.0, 5.0
SPIN_S = 3e-3
"""Before each arrival the loop turns without sleeping: a sleep is good to a millisecond or two."""
COLUMNS = (
    "speed", "requests", "GB/s", "p50 ms", "p99 ms", "shared link p50", "p99", "one by one p50", "p99",
    "p99 over shared's", "under way mean", "most", "waited for blocks p99 ms", "begun late p99 ms", "failed",
    "CPU s source", "CPU s reader", "CPU ms a request",
)  # fmt: skip


PARTS = ("speed", "publish", *PHASES, "words")
"""A request's time by where it goes, in ms: its publish call, the phases of its record, and what its receive call takes
beyond them."""
RECORDS = 1000


class Arrival(NamedTuple):
    """size: tokens, or bytes for a link."""

    at_s: float
    size: int


def read(path: Path, seed: int) -> list[Arrival]:
    """The requests of a trace, in their order. Raises KvferryError (`malformed`)."""
    rng = np.random.default_rng(seed)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            asked = [json.loads(line) for line in lines]
        return sorted(
            Arrival(each["timestamp"] / 1e3 + rng.uniform(0, BATCH_S), int(each["input_length"])) for each in asked
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Malformed(
            "malformed", f"the trace cannot be read: {error}", field="PATH", value=path,
            remedy="give lines of JSON, each with timestamp and input_length",
        ) from None  # fmt: skip


def faster(trace: Sequence[Arrival], speed: float, seconds: float) -> list[Arrival]:
    """The arrivals in the first `seconds` of a replay that is so many times as fast."""
    sped = [Arrival(each.at_s / speed, each.size) for each in trace]
    return [each for each in sped if each.at_s < seconds]


def shared(arrivals: Sequence[Arrival], rate: float) -> list[float]:
    """Seconds that each takes on a link of `rate` bytes a second, which all that are under way share equally."""
    took = [0.0] * len(arrivals)
    under_way: list[tuple[float, int]] = []
    served = now = 0.0
    """Bytes that one who was there from the beginning would have had."""
    for number, (at_s, size) in enumerate([*arrivals, Arrival(math.inf, 0)]):
        while under_way and (end := now + (under_way[0][0] - served) * len(under_way) / rate) <= at_s:
            (served, ended), now = heapq.heappop(under_way), end
            took[ended] = now - arrivals[ended].at_s
        if under_way:
            served += (at_s - now) * rate / len(under_way)
        now = at_s
        heapq.heappush(under_way, (served + size, number))
    return took


def one_by_one(arrivals: Sequence[Arrival], rate: float) -> list[float]:
    """The same on a link that serves them one after another, as they came."""
    took, free_s = [], 0.0
    for at_s, size in arrivals:
        free_s = max(free_s, at_s) + size / rate
        took.append(free_s - at_s)
    return took


class Room:
    """The reader's free blocks, given out in the order in which they are asked for."""

    def __init__(self, blocks: int, rng: np.random.Generator) -> None:
        self._free = deque(rng.permutation(blocks).tolist())
        self._turn, self._more = asyncio.Lock(), asyncio.Event()

    async def take(self, count: int) -> list[int]:
        async with self._turn:
            while len(self._free) < count:
                self._more.clear()
                await self._more.wait()
            return [self._free.popleft() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        self._free.extend(blocks)
        self._more.set()


@dataclass(slots=True)
class Found:
    """Seconds of each request that is done, and what became of the others, by code."""

    took_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    parts_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For each transfer: its publish, and its receive, from the call to its end."""
    under_way: list[int] = field(default_factory=list)
    """At each arrival: how many others were."""
    failed: Counter[str] = field(default_factory=Counter)


class Replay:
    """A pair, with the oracle of its reader's blocks."""

    def __init__(self, pair: Pair, source: Engine, reader: Engine, seed: int) -> None:
        self.pair, self._source, self._reader = pair, source, reader
        self._rng = np.random.default_rng(seed)
        self._blocks = pair.tokens // NHD.block
        self._order = self._rng.permutation(self._blocks)
        self._room = Room(self._blocks, self._rng)
        self._came = np.full(self._blocks, -1)
        """The source's block that each of the reader's is a copy of; -1: it is none, or in part."""

    async def run(self, arrivals: Sequence[Arrival], label: str) -> tuple[Found, tuple[float, float]]:
        """(what became of them, CPU seconds of the source's daemon and of the reader's)."""
        found, tasks = Found(), set[asyncio.Task[None]]()
        before = self._cpu_s()
        began = shown = time.perf_counter()
        for number, arrival in enumerate(arrivals):
            while (ahead := began + arrival.at_s - time.perf_counter()) > 0:
                await asyncio.sleep(min(max(ahead - SPIN_S, 0.0), SHOW_S))
                if (now := time.perf_counter()) - shown > SHOW_S:
                    shown, left_s = now, arrivals[-1].at_s - now + began
                    come = f"{label}: {number} of {len(arrivals)} have come, {len(tasks)} under way"
                    print(f"{come}, {found.failed.total()} failed, {left_s:.0f} s to go", file=sys.stderr, flush=True)
            found.under_way.append(len(tasks))
            tasks.add(task := asyncio.create_task(self._one(began + arrival.at_s, arrival.size, found)))
            task.add_done_callback(tasks.discard)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            found.failed.update({"not_done": len(late)} if late else {})
        source_s, reader_s = (after - earlier for after, earlier in zip(self._cpu_s(), before, strict=True))
        return found, (source_s, reader_s)

    def check(self) -> int:
        """Compare all whole blocks that have arrived and are not given out again; returns how many they are.

        Raises KvferryError (`wrong_bytes`).
        """
        import torch

        (there,) = np.nonzero(self._came >= 0)
        sent, arrived = (
            side.ranks[0].pool.view(self.pair.model.rows, self._blocks, -1) for side in (self._source, self._reader)
        )
        for row in range(self.pair.model.rows):
            come, go = sent[row][self._came[there]], arrived[row][there]
            if not torch.equal(come, go.to(come.device)):
                raise Internal("wrong_bytes", f"row {row} of the reader's blocks is not what the source published")
        return len(there)

    async def _one(self, at: float, tokens: int, found: Found) -> None:
        began = time.perf_counter()
        count = -(-tokens // NHD.block)
        given = self._order.take(range(first := int(self._rng.integers(self._blocks)), first + count), mode="wrap")
        request_id, reader = uuid.uuid4().hex, self._reader.ranks[0].client
        try:
            await self._source.ranks[0].client.publish(request_id, {"full": BlockTable.of(given)}, tokens)
            published = time.perf_counter()
            taken = await self._room.take(count)
            waited_s = time.perf_counter() - published
            self._came[taken] = -1
            try:
                asked = time.perf_counter()
                received = await reader.receive(
                    request_id, {"full": BlockTable.of(taken)}, (0, tokens), source=self._source.source,
                    deadline_s=DEADLINE_S,
                )  # fmt: skip
                told = time.perf_counter()
                found.took_s.append(told - at)
                found.parts_s[received.transfer_id] = published - began, told - asked
                self._came[taken[: tokens // NHD.block]] = given[: tokens // NHD.block]
            finally:
                await reader.quiesced(request_id)
                self._room.give(taken)
        except KvferryError as error:
            found.failed[error.code] += 1
        else:
            found.waited_s.append(waited_s)
            found.late_s.append(began - at)

    async def parts(self, found: Found) -> list[float]:
        """Medians in ms over the transfers whose records the reader's daemon still has, as in PARTS."""
        router = RouterClient(self._reader.daemons[0].url)
        try:
            records = await router.transfers(state=TransferState.DONE, limit=RECORDS)
        finally:
            await router.close()
        each = [
            (
                1e3 * found.parts_s[record.transfer_id][0],
                *(record.phases_ms.get(phase, 0.0) for phase in PHASES),
                1e3 * found.parts_s[record.transfer_id][1] - record.phases_ms["total"],
            )
            for record in records
            if record.transfer_id in found.parts_s
        ]
        return [float(np.median(part)) for part in zip(*each, strict=True)]

    def _cpu_s(self) -> tuple[float, float]:
        return cpu_s(self._source.daemons), cpu_s(self._reader.daemons)


def model(kib: int) -> Model:
    """A model of so many KiB a token, a power of two: 128 are 32 layers of 8 KV heads; below 4 a layer has fewer."""
    layers = max(kib // LAYER_KIB, 1)
    return Model(layers, "kv", (kib << 10) // (2 * layers * DIM * ITEM), DIM)


def main(argv: Sequence[str]) -> int:
    """Print a row for each speed; 0 when nothing failed and every byte arrived."""
    parser = argparse.ArgumentParser(
        prog="kvferry bench trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="the trace, .jsonl or .jsonl.gz")
    add("--speed", type=_positive, nargs="+", metavar="N", help="times as fast, a row each (default: 1 5 20 40)")
    add("--seconds", type=_positive, metavar="S", help="how long a row takes, and 40 s more at most (default: 60)")
    add("--quick", action="store_true", help="1 and 20 times, 20 seconds each, unless they are named")
    add("--seed", type=int, default=67, metavar="N", help="of arrivals and blocks (default: 67)")
    add("--way", choices=(AUTO, STAGED, MAPPED, DIRECT), default=AUTO, help="(default: auto)")
    add("--kib", type=int, choices=KIB, help="KiB a token (default: 128 on GPUs, 1 on host memory)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: host memory, scaled down (default: cuda)")
    options = parser.parse_args(argv)
    need_torch()
    trace = read(options.path, options.seed)
    return asyncio.run(_run(options, trace))


async def _run(options: argparse.Namespace, trace: list[Arrival]) -> int:
    gpus = cuda.devices() if options.device == "cuda" else ()
    kib = options.kib or (GPU_KIB if gpus else HOST_KIB)
    pair = Pair(model(kib), NHD, NHD, POOL // 2 if len(gpus) == 1 else POOL)
    speeds = options.speed or (QUICK_SPEEDS if options.quick else SPEEDS)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    failures, parts = 0, list[str]()
    async with staged_for(options.way, gpus) as (stage, way):
        ceiling_nbytes = CEILING_NBYTES if gpus else HOST_CEILING_NBYTES
        with ends(gpus, ceiling_nbytes) as between:
            rate = ceiling_nbytes / between.copy(ceiling_nbytes)
        async with engines(stage, pair, way) as (source, reader):
            reader.wipe(POISON)
            replay = Replay(pair, source, reader, options.seed)
            await replay.run([Arrival(0.0, each.size) for each in trace[:WARM_UP]], "warm-up")
            print(", ".join(f"{name} {value}" for name, value in machine(gpus).items()))
            said = f"{options.way}, {kib} KiB a token, a plain copy {rate / 1e9:.1f} GB/s, seed {options.seed}"
            print(f"{said}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
            for speed in speeds:
                arrivals = faster(trace, speed, seconds)
                if not arrivals:
                    raise Malformed(
                        "no_request", f"no request comes in {seconds:g} s", field="--seconds", value=seconds
                    )
                found, used = await replay.run(arrivals, f"{speed:g} times")
                sized = [Arrival(at_s, size * pair.model.token_nbytes) for at_s, size in arrivals]
                print(f"| {' | '.join(_row(speed, sized, found, used, rate))} |", flush=True)
                failures += found.failed.total()
                shares = (f"{share:.2f}" for share in await replay.parts(found))
                parts.append(f"| {' | '.join((f'{speed:g}', *shares))} |")
            source.synchronize()
            reader.synchronize()
            whole = replay.check()
    print("\nmedians in ms", f"| {' | '.join(PARTS)} |", f"|{'---|' * len(PARTS)}", *parts, sep="\n")
    print(f"\n{whole:,} whole blocks hold what the source published")
    return 1 if failures else 0


def _row(speed: float, sized: Sequence[Arrival], found: Found, used: tuple[float, float], rate: float) -> Iterator[str]:
    def ms(seconds: Sequence[float], percent: int) -> float:
        return float(1e3 * np.percentile(seconds or [math.nan], percent))

    ideal, queued = shared(sized, rate), one_by_one(sized, rate)
    nbytes, lasted_s = sum(each.size for each in sized), sized[-1].at_s
    yield f"{speed:g}"
    yield f"{len(sized):,}"
    yield f"{nbytes / max(lasted_s, BATCH_S / speed) / 1e9:.2f}"
    for took, percent in itertools.product((found.took_s, ideal, queued), (50, 99)):
        yield f"{ms(took, percent):.2f}"
    yield f"{ms(found.took_s, 99) / ms(ideal, 99):.2f}"
    yield f"{np.mean(found.under_way):.1f}"
    yield f"{max(found.under_way)}"
    yield f"{ms(found.waited_s, 99):.1f}"
    yield f"{ms(found.late_s, 99):.1f}"
    yield ", ".join(f"{count} {code}" for code, count in found.failed.items()) or "0"
    yield from (f"{each:.2f}" for each in used)
    yield f"{1e3 * sum(used) / len(sized):.2f}"


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError("it must be more than 0")
    return value
