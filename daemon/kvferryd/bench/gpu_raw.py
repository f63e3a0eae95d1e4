"""The rows that kvferry is measured against: the copy ceiling, and the same request read with NIXL alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvferry.memory import cuda, memfd_region
from kvferryd.bench.gpu_cases import Case
from kvferryd.bench.gpu_table import Row, Table
from kvferryd.bench.raw import RawPair, connected, target
from kvferryd.memory.cuda import CudaProvider
from kvferryd.transport.nixl import load, make_agent
from kvferryd.transport.read import Span

CEILING_REPEATS, CONTIGUOUS_REPEATS, PERMUTED_REPEATS, WARM_UP = 9, 7, 4, 1
CEILING, DEFAULTS, BEST = "plain copy, the ceiling", "NIXL, defaults", "NIXL, best knobs"


@dataclass(frozen=True, slots=True)
class Ends:
    """The memory of a process of its own, as it was `told`, and as much of ours. copy: median seconds of a plain copy
    of so many bytes from there to here."""

    told: dict[str, Any]
    local: Span
    copy: Callable[[int], float]


@contextmanager
def ends(gpus: Sequence[cuda.Device], nbytes: int) -> Iterator[Ends]:
    """The source is on the first GPU, we are on the last; without GPUs all of it is host memory."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # its lines would go into the table
    with ExitStack() as stack:
        if gpus:
            os.environ.setdefault("UCX_CUDA_IPC_CACHE", "y")  # as UCX comes; our daemons, which run by now, do without
            told = stack.enter_context(target(f"cuda:{gpus[0].index}", nbytes))
            local = stack.enter_context(_gpu_memory(gpus[-1], nbytes))
            stack.enter_context(gpus[-1])  # UCX finds its GPU by the current context
            yield Ends(told, local, lambda size: _copied(gpus[-1], bytes.fromhex(told["handle"]), local, size))
        else:
            remote, room = (stack.enter_context(closing(memfd_region(nbytes))) for _ in range(2))
            remote.populate()
            room.populate()
            told = stack.enter_context(target(remote.path, nbytes))
            local = Span(room.address, room.nbytes, "host")
            yield Ends(told, local, lambda size: _copied_on_host(remote.array(), room.array(), size))


def measure(case: Case, gpus: tuple[cuda.Device, ...], table: Table) -> None:
    """Add a row each; `case` is the large request, between caches of one size."""
    with ends(gpus, case.pair.sources()[0].nbytes) as between:
        with table.failing(CEILING, "contiguous"):
            seconds = between.copy(case.nbytes)
            table.ceiling = case.nbytes / seconds
            table.add(Row(CEILING, "contiguous", case.nbytes, seconds, seconds, repeats=CEILING_REPEATS, path="copy"))
        for name, best in ((DEFAULTS, False), (BEST, True)):
            with table.failing(name, "all of it"):
                _nixl(name, best, between, case, table)


def _nixl(name: str, best: bool, between: Ends, case: Case, table: Table) -> None:
    """In a function of its own: the agent ends with it, before the memory."""
    # 8 KiB: what one block of 16 tokens with 2 heads of 128 is in one row.
    run_nbytes = case.pair.source.block * case.pair.model.token_nbytes // case.pair.model.rows
    with connected(best_agent() if best else _default_agent(), between.told, between.local) as pair:
        for what, permuted, repeats in (
            ("contiguous blocks", False, CONTIGUOUS_REPEATS), (case.name, True, PERMUTED_REPEATS)
        ):  # fmt: skip
            taken = _read(pair, run_nbytes, case.nbytes // run_nbytes, permuted, repeats)
            table.add(Row(name, what, case.nbytes, taken, taken, taken, repeats=repeats, path="direct"))


def best_agent(threads: int = 8) -> Any:
    """A progress thread that sleeps 10 ms (as every agent of ours has) and, between GPUs, 8 threads: the fastest."""
    return make_agent("raw-best", threads=threads)


def _default_agent() -> Any:
    api = load()
    return api.nixl_agent("raw-defaults", api.nixl_agent_config(backends=["UCX"]))


@contextmanager
def _gpu_memory(device: cuda.Device, nbytes: int) -> Iterator[Span]:
    region = CudaProvider(device.uuid).allocate(nbytes)
    yield region.span
    region.close()


def _copied(device: cuda.Device, handle: bytes, local: Span, nbytes: int) -> float:
    """Median seconds of a plain copy out of another process's memory."""
    mapping, stream = device.open(handle), device.stream()
    began, ended = device.event(timing=True), device.event(timing=True)
    seconds = []
    for _ in range(CEILING_REPEATS + WARM_UP):
        began.record(stream)
        stream.copy(local.address, mapping.address, nbytes)
        ended.record(stream)
        stream.synchronize()
        seconds.append(ended.ms_since(began) / 1e3)
    for each in (began, ended, stream, mapping):
        each.close()
    return median(seconds[WARM_UP:])


def _copied_on_host(source: Any, destination: Any, nbytes: int) -> float:
    seconds = []
    for _ in range(CEILING_REPEATS + WARM_UP):
        began = time.perf_counter()
        np.copyto(destination[:nbytes], source[:nbytes])
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:])


def _read(pair: RawPair, run_nbytes: int, count: int, permuted: bool, repeats: int) -> float:
    """Median seconds of reading `count` runs, the same number of them on either side, prepared lists and indices."""
    rng, runs = np.random.default_rng(1), pair.local.nbytes // run_nbytes
    seconds = []
    for _ in range(repeats + WARM_UP):
        source, destination = (
            (rng.permutation(runs)[:count] if permuted else np.arange(count)).astype(np.int32) for _ in range(2)
        )
        seconds.append(pair.read(run_nbytes, source, destination))
    return median(seconds[WARM_UP:])
