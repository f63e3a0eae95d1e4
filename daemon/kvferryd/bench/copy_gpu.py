"""The copy kernel on one or two GPUs: rates over numbers of programs, beside the copy ceiling of the same run.

    python -m kvferryd.bench.copy_gpu [--tiles] [--source-gpu 0]

The source pool belongs to a process of its own, on the first GPU; this process maps it, on the last. With one GPU the
figures are those of its memory. Every case is compared element by element before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kvferry.memory import cuda
from kvferry.tables import BlockTable
from kvferryd.bench.child import child, tell
from kvferryd.bench.gpu_cases import HND, NHD, WIDE, Case, Layout, Model, Pair, Requests
from kvferryd.copy import Batch, Move, cut, mapped, moves
from kvferryd.copy import cuda as copying
from kvferryd.copy.cuda import PROGRAMS, TILE, WARPS, Copier
from kvferryd.memory.cuda import CudaProvider
from kvferryd.plan import bind, plan

TOKENS = 4096 * 16
"""The pool has 4,096 blocks of 16 tokens, 5.4 GB."""
MODEL = Model(80, "kv", 2, 128)
GRIDS = (8, 12, 16, 20, 24, 32, 48, 64, 96, 132)
REPEATS = 9


def pair(source: Layout, destination: Layout) -> Pair:
    return Pair(MODEL, source, destination, TOKENS)


CASES = (
    Case("same layout", pair(NHD, NHD), 8192),
    Case("NHD to HND", pair(NHD, HND), 8192),
    Case("HND to NHD", pair(HND, NHD), 8192),
    Case("block 16 to 64", pair(NHD, WIDE), 8192),
    Case("block 64 to 16, to HND", pair(WIDE, HND), 8192),
    Case("same layout", pair(NHD, NHD), 1024),
    Case("NHD to HND", pair(NHD, HND), 1024),
    Case("same layout", pair(NHD, NHD), 96),
)
CACHE = CASES[0].pair.sources()[0]


@dataclass(slots=True)
class Bench:
    copier: Copier
    stream: cuda.Stream
    begin: cuda.Event
    end: cuda.Event

    def gpu_s(self, work: Callable[[], object]) -> tuple[float, float]:
        """Medians: seconds between events around the work, seconds that the host spent in it."""
        on_gpu, on_host = [], []
        for _ in range(REPEATS):
            self.begin.record(self.stream)
            began = time.perf_counter()
            work()
            on_host.append(time.perf_counter() - began)
            self.end.record(self.stream)
            self.end.synchronize()
            on_gpu.append(self.end.ms_since(self.begin) / 1e3)
        return median(on_gpu[1:]), median(on_host[1:])

    def grids(self, name: str, batches: Sequence[Batch], nbytes: int, grids: Sequence[int] = GRIDS) -> None:
        cells, host = [], 0.0
        self.copier.prepare(batches)
        for programs in grids:
            gpu_s, host = self.gpu_s(lambda programs=programs: self.copier.copy(batches, self.stream, programs))  # type: ignore[misc]
            cells.append(f"{nbytes / gpu_s / 1e9:.0f}")
        print(f"| {name} | {nbytes / 1e6:.0f} MB | {' | '.join(cells)} | {host * 1e6:.0f} |", flush=True)


def wanted_moves(case: Case) -> tuple[list[Move], tuple[Requests, Requests]]:
    ids = case.ids()
    (source,), (destination,) = case.pair.sources(), case.pair.destinations()
    chosen = plan([source.manifest("source", "1", "cuda")], destination.manifest("destination", "1", "cuda"))
    tables = [{"full": BlockTable.of(each[0])} for each in ids]
    return moves(bind(chosen, {0: tables[0]}, tables[1], (0, case.tokens))), ids


@contextlib.contextmanager
def source_pool(device: cuda.Device, visible: str | None) -> Iterator[int]:
    """A pool of another process, on the first GPU it sees, mapped for `device`; its address."""
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with child("kvferryd.bench.copy_gpu", "--source", env=env) as told:
        mapping = device.open(bytes.fromhex(told["handle"]))
        yield mapping.address
        mapping.close()


def serve_source() -> None:
    import torch

    device = cuda.devices()[0]
    region = CudaProvider(device.uuid).allocate(CACHE.nbytes)
    pool = torch.as_tensor(_View(region.span.address), device=f"cuda:{device.index}")
    CACHE.fill(pool.view(torch.int32))
    device.synchronize()
    tell({"handle": region.told.cuda.handle.hex()})
    sys.stdin.read()


class _View:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (CACHE.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def run(tiles: bool, source_gpu: str | None) -> None:
    import torch

    device = cuda.devices()[-1]
    region = CudaProvider(device.uuid).allocate(CACHE.nbytes)
    pool = torch.as_tensor(_View(region.span.address), device=f"cuda:{device.index}")
    stream, begin, end = device.stream(), device.event(timing=True), device.event(timing=True)
    print(f"{len(cuda.devices())} GPU(s), {torch.cuda.get_device_name(device.index)}, torch {torch.__version__}\n")
    with source_pool(device, source_gpu) as source:
        bench = Bench(Copier(device), stream, begin, end)
        one = 1 << 30
        ceiling = one / bench.gpu_s(lambda: stream.copy(region.span.address, source, one))[0] / 1e9
        print(f"copy ceiling (cuMemcpyAsync from the mapped pool, 1 GiB): {ceiling:.0f} GB/s\n")
        if tiles:
            sweep(bench, source, region.span.address)
        print(f"GB/s by programs (tiles of {TILE} words, {WARPS} warps); the last column: microseconds of the host")
        print(f"| mapped | bytes | {' | '.join(map(str, GRIDS))} | host |\n|{'---|' * (len(GRIDS) + 3)}")
        for case in CASES:
            wanted, ids = wanted_moves(case)
            batches = mapped(wanted, {(0, 0): source}, {0: region.span.address})
            pool.fill_(0xFF)
            device.synchronize()  # torch's synchronize waits for its current GPU, which is another one here
            bench.copier.prepare(batches)
            bench.copier.copy(batches, stream)
            stream.synchronize()
            case.check(ids, 0, pool.view(torch.int32))
            bench.grids(case.name, batches, sum(move.batch.total_nbytes for move in wanted))
        print(f"\n| local | bytes | {' | '.join(map(str, GRIDS))} | host |\n|{'---|' * (len(GRIDS) + 3)}")
        for case in CASES[:2]:
            wanted = wanted_moves(case)[0]
            for slot_nbytes in (32 << 20, 128 << 20):
                slot = CudaProvider(device.uuid).allocate(slot_nbytes)
                chunk = cut(wanted, slot_nbytes)[1]  # the first is smaller
                gather, scatter = (
                    chunk.gather({0: region.span.address}, slot.span.address),
                    chunk.scatter(slot.span.address, {0: region.span.address}),
                )
                bench.grids(f"gather, {case.name}", gather, chunk.nbytes)
                bench.grids(f"scatter, {case.name}", scatter, chunk.nbytes)
                slot.close()
        wanted = wanted_moves(CASES[0])[0]
        batches, nbytes = (
            mapped(wanted, {(0, 0): source}, {0: region.span.address}),
            sum(move.batch.total_nbytes for move in wanted),
        )
        bench.copier.prepare(batches)
        rate = nbytes / bench.gpu_s(lambda: bench.copier.copy(batches, stream))[0] / 1e9
        print(
            f"\n{PROGRAMS} programs (the default), same layout: {rate:.0f} GB/s = {rate / ceiling:.0%} of the ceiling"
        )
        bench.copier.close()
    region.close()


def sweep(bench: Bench, source: int, destination: int) -> None:
    """Sizes of tiles and numbers of warps."""
    grids = (8, 12, 16, 20, 24, 32, 48, 132)
    print(f"| tile, warps | bytes | {' | '.join(map(str, grids))} | host |\n|{'---|' * (len(grids) + 3)}")
    kept = bench.copier
    for tile, warps in ((2048, 16), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 32)):
        copying.TILE, copying.WARPS = tile, warps
        bench.copier = Copier(bench.stream.device)
        for case in CASES[:2]:
            wanted = wanted_moves(case)[0]
            batches = mapped(wanted, {(0, 0): source}, {0: destination})
            nbytes = sum(move.batch.total_nbytes for move in wanted)
            bench.grids(f"{tile}, {warps}, {case.name}", batches, nbytes, grids)
        bench.copier.close()
    copying.TILE, copying.WARPS = TILE, WARPS
    bench.copier = kept
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="first sweep sizes of tiles and numbers of warps")
    parser.add_argument("--source-gpu", help="CUDA_VISIBLE_DEVICES of the source's process (default: as here)")
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        serve_source()
    else:
        run(options.tiles, options.source_gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
