"""Pages in no order, by the rules of kv-transfer of InferenceX's CollectiveX: kvferry beside NIXL and one bulk copy.

    kvferry bench paged [--quick] [--preset mla gqa] [--tokens 8192 32768] [--pages 16] [--batch 1 4 16]

A request has so many tokens in pages at random places of its pool, on both sides, over all layers: `mla` 61 layers of
704 bytes a token (fp8), `gqa` 94 layers of 2,048 (bf16). A batch of requests is asked for at once, and over when all
are there; 2 warm-ups, 8 repetitions, 3 trials, the median. The pool is twice as large as a request and 8 pages more,
or 1.25 times as large as the largest batch. The score is a share of one bulk copy: a plain copy of a request's bytes,
2 GiB at most, in one piece. kvferry's time is from the engine's order to its done event, planning and all; NIXL's
begins with prepared requests, as those rules have it, on memory of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np

from kvferry.memory import cuda
from kvferryd.bench.child import child, tell
from kvferryd.bench.gpu import AUTO, DIRECT, MAPPED, STAGED, engines, machine, need_torch, staged_for
from kvferryd.bench.gpu_cases import ITEM, Case, Layout, Model, Pair
from kvferryd.bench.gpu_measure import measure
from kvferryd.bench.gpu_raw import Ends, best_agent, ends
from kvferryd.bench.gpu_table import Row, said
from kvferryd.bench.raw import connected
from kvferryd.transport.ucx import SEGMENTS

PRESETS = {"mla": (61, 704), "gqa": (94, 2048)}
"""Layers, and bytes of a token in one of them."""
TOKENS, PAGES, BATCHES = (8192, 32768, 131072), (16, 64), (1, 2, 4, 8, 16, 64)
QUICK_TOKENS, QUICK_BATCHES = (8192,), (1, 4, 16)
SLACK, ROOM, MORE, SEED = 2.0, 1.25, 8, 67
WARM_UP, REPEATS, TRIALS, QUICK_TRIALS = 2, 8, 3, 1
NIXL_REPEATS, NIXL_WARM_UP, NIXL_PAGES = 3, 1, 130_000
"""A page takes NIXL microseconds between GPUs: there fewer repetitions, and nothing of larger batches."""
POOL_GIB, ONE_GPU_GIB, HOST_GIB = 32, 20, 2
BULK_NBYTES, HOST_BULK_NBYTES = 2 << 30, 256 << 20
"""On host memory a bulk copy has at least so many bytes: fewer stay in a processor's cache."""
HOST_LAYERS, CASE_S = 1, 120.0
COLUMNS = (
    "preset", "tokens", "page", "batch", "pages", "MB", "bulk GB/s", "kvferry ms", "GB/s", "share", "reading share",
    "CPU ms", "path", "NIXL read ms", "share", "NIXL write ms", "share",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """A geometry, and the batches that its pool has room for."""

    preset: str
    layers: int
    tokens: int
    page: int
    batches: tuple[int, ...]

    @property
    def page_nbytes(self) -> int:
        return self.page * PRESETS[self.preset][1]

    @property
    def pages(self) -> int:
        """A request's, over all layers."""
        return self.layers * -(-self.tokens // self.page)

    @property
    def pool_pages(self) -> int:
        return int(-(-self.tokens // self.page) * max(SLACK, ROOM * self.batches[-1])) + MORE

    @property
    def pool_nbytes(self) -> int:
        return self.layers * self.pool_pages * self.page_nbytes

    @property
    def nbytes(self) -> int:
        """A request's bytes."""
        return self.pages * self.page_nbytes

    def case(self, batch: int) -> Case:
        model = Model(self.layers, "c", 0, PRESETS[self.preset][1] // ITEM)
        layout = Layout(self.page)
        pair = Pair(model, layout, layout, self.pool_pages * self.page)
        return Case(f"{self.preset}, {self.tokens} tokens, pages of {self.page}", pair, self.tokens, batch, SEED)

    def within(self, pool_nbytes: int) -> Point | None:
        """The same with those batches, from the smallest on, for which such a pool is enough; None: for no batch."""
        for count in range(len(self.batches), 0, -1):
            point = replace(self, batches=self.batches[:count])
            if point.pool_nbytes <= pool_nbytes:
                return point
        return None


@dataclass(frozen=True, slots=True)
class Peer:
    """Others with the same: bytes a second of a bulk copy; NIXL's seconds for READ and WRITE, by batch."""

    bulk: float
    nixl_s: dict[int, tuple[float, float]]
    error: str = ""


def beside(point: Point, device: str) -> Peer:
    """Measured by a process of its own: UCX keeps what it has mapped of a peer's GPU memory until its process ends."""
    # NIXL's best: between GPUs writes of many pages in one call, on host memory reads without a look at TCP after each.
    env = {"NIXL_UCX_SGL_ENABLE": "y", "UCX_CMA_TX_QUOTA": SEGMENTS}
    with child("kvferryd.bench.paged", json.dumps(asdict(point)), device, env=env) as told:
        return Peer(told["bulk"], {batch: (read, write) for batch, read, write in told["nixl_s"]}, told["error"])


def _beside(point: Point, gpus: tuple[cuda.Device, ...]) -> dict[str, object]:
    """A bulk copy, and NIXL with its best settings: batches of at most NIXL_PAGES pages, at least the first."""
    few = [batch for batch in point.batches if batch == point.batches[0] or batch * point.pages <= NIXL_PAGES]
    own = replace(point, batches=tuple(few))
    size = min(max(point.nbytes, 0 if gpus else HOST_BULK_NBYTES), BULK_NBYTES)
    with ends(gpus, max(own.pool_nbytes, size)) as between:
        bulk, nixl_s, error = size / between.copy(size), [], ""
        try:
            nixl_s = _nixl(own, between, *((8, NIXL_REPEATS) if gpus else (0, REPEATS)))
        except Exception as failed:  # noqa: BLE001  NIXL's are of many kinds; the row says it
            error = said(failed)
    return {"bulk": bulk, "nixl_s": nixl_s, "error": error}


def _nixl(point: Point, between: Ends, threads: int, repeats: int) -> list[tuple[int, float, float]]:
    """In a function of its own: the agent ends with it, before the memory."""
    found = []
    with connected(best_agent(threads), between.told, between.local) as pair:
        for batch in point.batches:
            rows = np.arange(point.layers)[:, None] * point.pool_pages
            given, taken = point.case(batch).ids()
            requests = [
                ((rows + come).ravel().astype(np.int32), (rows + go).ravel().astype(np.int32))
                for come, go in zip(given, taken, strict=True)
            ]
            read, write = (
                median(pair.bursts(op, point.page_nbytes, requests, NIXL_WARM_UP + repeats)[NIXL_WARM_UP:])
                for op in ("READ", "WRITE")
            )
            found.append((batch, read, write))
    return found


def points(options: argparse.Namespace, gpus: Sequence[cuda.Device]) -> list[Point]:
    pool_gib = options.pool_gib or ((POOL_GIB if len(gpus) > 1 else ONE_GPU_GIB) if gpus else HOST_GIB)
    tokens = options.tokens or (TOKENS if gpus and not options.quick else QUICK_TOKENS)
    batches = tuple(sorted(options.batch or (QUICK_BATCHES if options.quick else BATCHES)))
    wanted = [
        Point(preset, options.layers or (PRESETS[preset][0] if gpus else HOST_LAYERS), count, page, batches)
        for preset in options.preset
        for count in tokens
        for page in options.pages
    ]
    return [room for point in wanted if (room := point.within(int(pool_gib * 2**30)))]


def main(argv: Sequence[str]) -> int:
    """Print a row for each batch; 0 when all were measured and every byte arrived."""
    parser = argparse.ArgumentParser(
        prog="kvferry bench paged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="8,192 tokens, batches of 1, 4 and 16, one trial, unless they are named")
    add("--preset", nargs="+", choices=PRESETS, default=list(PRESETS), help="(default: both)")
    add("--tokens", type=int, nargs="+", metavar="N", help="(default: 8192 32768 131072; on host memory 8192)")
    add("--pages", type=int, nargs="+", default=PAGES, metavar="N", help="tokens in a page (default: 16 64)")
    add("--batch", type=int, nargs="+", metavar="N", help="requests at once (default: 1 2 4 8 16 64)")
    add("--layers", type=int, metavar="N", help="fewer layers (default: all; on host memory 1)")
    add("--pool-gib", type=float, metavar="N", help="larger batches are left out (default: 32, host memory 2)")
    add("--way", choices=(AUTO, STAGED, MAPPED, DIRECT), default=AUTO, help="(default: auto)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: host memory (default: cuda)")
    options = parser.parse_args(argv)
    need_torch()
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    gpus = cuda.devices() if options.device == "cuda" else ()
    trials, failures = QUICK_TRIALS if options.quick else TRIALS, 0
    async with staged_for(options.way, gpus) as (stage, way):
        print(", ".join(f"{name} {value}" for name, value in machine(gpus).items()))
        print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for point in points(options, gpus):
            batch = point.batches[0]
            try:
                peer = await asyncio.to_thread(beside, point, options.device)
                failures += bool(peer.error)
                async with engines(stage, point.case(1).pair, way) as (source, reader):
                    for batch in point.batches:
                        async with asyncio.timeout(CASE_S):
                            case = point.case(batch)
                            rows = [
                                await measure(case, way.name, source, reader, REPEATS, WARM_UP) for _ in range(trials)
                            ]
                        _show(point, batch, *_kvferry(rows, peer), *_nixl_cells(point, batch, peer))
            except Exception as error:  # noqa: BLE001  an error is a row, and the next point is measured
                failures += 1
                _show(point, batch, f"FAILED: {said(error)}")
    print("\nevery word that was asked for has arrived, and no other" if not failures else f"\n{failures} FAILED")
    return 1 if failures else 0


def _show(point: Point, batch: int, *cells: str) -> None:
    shown = [" ".join(cell.split()).replace("|", "/") for cell in (*_what(point, batch), *cells)]
    print(f"| {' | '.join(shown)} |", flush=True)


def _what(point: Point, batch: int) -> Iterator[str]:
    yield from (point.preset, f"{point.tokens:,}", str(point.page), str(batch))
    yield f"{batch * point.pages:,}"
    yield f"{batch * point.nbytes / 1e6:.0f}"


def _kvferry(rows: Sequence[Row], peer: Peer) -> Iterator[str]:
    total_s = median(row.total_s or 0.0 for row in rows)
    yield f"{peer.bulk / 1e9:.1f}"
    rate = rows[0].nbytes / total_s
    yield f"{1e3 * total_s:.2f}"
    yield f"{rate / 1e9:.1f}"
    yield f"{rate / peer.bulk:.0%}"
    reading = [row.reading_rate for row in rows if row.reading_rate]
    yield f"{median(reading) / peer.bulk:.0%}" if reading else ""
    yield f"{1e3 * median(row.cpu_s or 0.0 for row in rows):.2f}"
    yield rows[0].path


def _nixl_cells(point: Point, batch: int, peer: Peer) -> Iterator[str]:
    if peer.error:
        yield from (f"FAILED: {peer.error}", "", "", "")
    else:
        for seconds in peer.nixl_s.get(batch, ()):
            yield f"{1e3 * seconds:.2f}"
            yield f"{batch * point.nbytes / seconds / peer.bulk:.1%}"
        if batch not in peer.nixl_s:
            yield from [""] * 4


if __name__ == "__main__":
    tell(_beside(Point(**json.loads(sys.argv[1])), cuda.devices() if sys.argv[2] == "cuda" else ()))
