"""The copy kernel on one or two GPUs: rates over numbers of programs, beside the copy ceiling of the same run.

    python -m kvferryd.bench.copy_gpu [--tiles] [--source-gpu 0]

The source pool belongs to a process of its own, on the first GPU; this process maps it, on the last. With one GPU the
figures are those of its memory. Every case is compared element by element before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvferry import cuda
from kvferry.manifest import Manifest
from kvferry.tables import BlockTable
from kvferryd.copy import Batch, Move, cut, mapped, moves
from kvferryd.copy.cuda import PROGRAMS, TILE, WARPS, Copier
from kvferryd.memory.cuda import CudaProvider
from kvferryd.plan import bind, plan
from kvferryd.plan.axes import Ints

LAYERS, HEADS, DIM, ITEM = 80, 2, 128, 2
ROWS = 2 * LAYERS
TOKENS = 4096 * 16
"""Of the pool: 4,096 blocks of 16 tokens, 5.4 GB."""
POOL = ROWS * TOKENS * HEADS * DIM * ITEM
WORDS = DIM * ITEM // 4
"""int32 words of one token of one head."""
GRIDS = (8, 12, 16, 20, 24, 32, 48, 64, 96, 132)
REPEATS = 9
MULTIPLIER = 2654435761
"""Word i of the source pool is i times this, modulo 2**32."""


@dataclass(frozen=True, slots=True)
class Layout:
    block: int
    order: str

    def manifest(self) -> Manifest:
        token = DIM * ITEM
        slot, head = (HEADS * token, token) if self.order == "NHD" else (token, self.block * token)
        strides = (("block", TOKENS // self.block, self.block * HEADS * token), ("slot", self.block, slot),
                   ("head", HEADS, head), ("dim", DIM, ITEM))  # fmt: skip
        axes = [{"name": name, "extent": extent, "stride": stride} for name, extent, stride in strides]
        component = {"group": "full", "dtype": "bfloat16", "region": 0, "axes": axes, "shard": None}
        return Manifest.from_dict(
            {
                "engine_id": "bench",
                "epoch": "1",
                "model": {"name": "bench", "fingerprint": "bench"},
                "rank": 0,
                "world_size": 1,
                "regions": [{"id": 0, "kind": "cuda", "nbytes": POOL}],
                "groups": [{"name": "full", "block_size": self.block, "num_blocks": TOKENS // self.block}],
                "components": [
                    {**component, "layer": row // 2, "name": "kv"[row % 2], "offset": row * (POOL // ROWS)}
                    for row in range(ROWS)
                ],
            }
        )

    def words(self, blocks: Ints, tokens: int, torch: Any, device: str) -> Any:
        """Index of every word of these tokens inside one row of the pool, shape (tokens, head, word)."""
        token = torch.arange(tokens, device=device)
        block, slot = torch.tensor(blocks, device=device)[token // self.block], token % self.block
        of_slot, of_head = (HEADS, 1) if self.order == "NHD" else (1, self.block)
        of_token = (block * self.block * HEADS + slot * of_slot)[:, None] + torch.arange(HEADS, device=device) * of_head
        return of_token[:, :, None] * WORDS + torch.arange(WORDS, device=device)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    source: Layout
    destination: Layout
    tokens: int


NHD, HND, WIDE = Layout(16, "NHD"), Layout(16, "HND"), Layout(64, "NHD")
CASES = (
    Case("same layout", NHD, NHD, 8192),
    Case("NHD to HND", NHD, HND, 8192),
    Case("HND to NHD", HND, NHD, 8192),
    Case("block 16 to 64", NHD, WIDE, 8192),
    Case("block 64 to 16, to HND", WIDE, HND, 8192),
    Case("same layout", NHD, NHD, 1024),
    Case("NHD to HND", NHD, HND, 1024),
    Case("same layout", NHD, NHD, 96),
)


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
        for programs in grids:
            gpu_s, host = self.gpu_s(lambda programs=programs: self.copier.copy(batches, self.stream, programs))  # type: ignore[misc]
            cells.append(f"{nbytes / gpu_s / 1e9:.0f}")
        print(f"| {name} | {nbytes / 1e6:.0f} MB | {' | '.join(cells)} | {host * 1e6:.0f} |", flush=True)


def wanted_moves(case: Case) -> tuple[list[Move], Ints, Ints]:
    rng = np.random.default_rng(case.tokens)
    ids = [
        rng.permutation(TOKENS // side.block)[: -(-case.tokens // side.block)]
        for side in (case.source, case.destination)
    ]
    tables = [{"full": BlockTable.of(blocks)} for blocks in ids]
    chosen = plan([case.source.manifest()], case.destination.manifest())
    return moves(bind(chosen, {0: tables[0]}, tables[1], (0, case.tokens))), ids[0], ids[1]


def check(case: Case, source: Ints, destination: Ints, pool: Any) -> None:
    """Compare every word with what was to arrive; knows nothing of plans."""
    import torch

    words = pool.view(torch.int32).view(ROWS, -1)
    from_words = case.source.words(source, case.tokens, torch, str(pool.device))
    to_words = case.destination.words(destination, case.tokens, torch, str(pool.device))
    for row in range(ROWS):
        expected = ((from_words + row * words.shape[1]) * MULTIPLIER).to(torch.int32)
        if not torch.equal(words[row][to_words], expected):
            raise AssertionError(f"{case.name}, {case.tokens} tokens: row {row} differs")
    if int((words != -1).sum()) != ROWS * case.tokens * HEADS * WORDS:
        raise AssertionError(f"{case.name}, {case.tokens} tokens: other words were touched")


@contextlib.contextmanager
def source_pool(device: cuda.Device, visible: str | None) -> Iterator[int]:
    """A pool of another process, on the first GPU it sees, mapped for `device`; its address."""
    command = [sys.executable, "-m", "kvferryd.bench.copy_gpu", "--source"]
    process = subprocess.Popen(  # noqa: S603  # this very module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})},
    )
    try:
        assert process.stdout is not None
        told = json.loads(next(line for line in process.stdout if line.startswith("{")))
        mapping = device.open(bytes.fromhex(told["handle"]))
        yield mapping.address
        mapping.close()
    finally:
        process.kill()
        process.wait()


def serve_source() -> None:
    import torch

    device = cuda.devices()[0]
    region = CudaProvider(device.uuid).allocate(POOL)
    pool = torch.as_tensor(_View(region.address), device=f"cuda:{device.index}")
    step = 1 << 27
    for first in range(0, POOL // 4, step):
        index = torch.arange(first, min(first + step, POOL // 4), device=pool.device)
        pool.view(torch.int32)[first : first + step] = (index * MULTIPLIER).to(torch.int32)
    torch.cuda.synchronize()
    print(json.dumps({"handle": region.handle.handle.hex()}), flush=True)
    sys.stdin.read()


class _View:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (POOL,), "typestr": "|u1", "data": (address, False), "version": 3}


def run(tiles: bool, source_gpu: str | None) -> None:
    import torch

    device = cuda.devices()[-1]
    region = CudaProvider(device.uuid).allocate(POOL)
    pool = torch.as_tensor(_View(region.address), device=f"cuda:{device.index}")
    stream, begin, end = device.stream(), device.event(timing=True), device.event(timing=True)
    print(f"{len(cuda.devices())} GPU(s), {torch.cuda.get_device_name(device.index)}, torch {torch.__version__}\n")
    with source_pool(device, source_gpu) as source:
        bench = Bench(Copier(device), stream, begin, end)
        one = 1 << 30
        ceiling = one / bench.gpu_s(lambda: stream.copy(region.address, source, one))[0] / 1e9
        print(f"copy ceiling (cuMemcpyAsync from the mapped pool, 1 GiB): {ceiling:.0f} GB/s\n")
        if tiles:
            sweep(bench, source, region.address)
        print(f"GB/s by programs (tiles of {TILE} words, {WARPS} warps); the last column: microseconds of the host")
        print(f"| mapped | bytes | {' | '.join(map(str, GRIDS))} | host |\n|{'---|' * (len(GRIDS) + 3)}")
        for case in CASES:
            wanted, from_ids, to_ids = wanted_moves(case)
            batches = mapped(wanted, {(0, 0): source}, {0: region.address})
            pool.fill_(0xFF)
            device.synchronize()  # torch's synchronize waits for its current GPU, which is another one here
            bench.copier.copy(batches, stream)
            stream.synchronize()
            check(case, from_ids, to_ids, pool)
            bench.grids(case.name, batches, sum(move.nbytes for move in wanted))
        print(f"\n| local | bytes | {' | '.join(map(str, GRIDS))} | host |\n|{'---|' * (len(GRIDS) + 3)}")
        for case in CASES[:2]:
            wanted = wanted_moves(case)[0]
            for slot_nbytes in (32 << 20, 128 << 20):
                slot = CudaProvider(device.uuid).allocate(slot_nbytes)
                chunk = cut(wanted, slot_nbytes)[0]
                gather, scatter = (
                    chunk.gather({0: region.address}, slot.address),
                    chunk.scatter(slot.address, {0: region.address}),
                )
                bench.grids(f"gather, {case.name}", gather, chunk.nbytes)
                bench.grids(f"scatter, {case.name}", scatter, chunk.nbytes)
                slot.close()
        wanted = wanted_moves(CASES[0])[0]
        batches, nbytes = mapped(wanted, {(0, 0): source}, {0: region.address}), sum(move.nbytes for move in wanted)
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
        bench.copier = Copier(bench.stream.device, tile=tile, warps=warps)
        for case in CASES[:2]:
            wanted = wanted_moves(case)[0]
            batches = mapped(wanted, {(0, 0): source}, {0: destination})
            nbytes = sum(move.nbytes for move in wanted)
            bench.grids(f"{tile}, {warps}, {case.name}", batches, nbytes, grids)
        bench.copier.close()
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
