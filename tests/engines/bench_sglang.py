"""Handover between two real SGLang engines: kvferry beside SGLang's own NIXL backend, in one run.

    make bench-sglang                       # on the CPU: three starts each, half an hour
    make bench-sglang BENCH="--starts 1"
    make bench-sglang-gpu                   # on two GPUs, with SGLang for CUDA: one start, 8 minutes

Handover: from the moment at which prefill has computed the prompt, as it says itself, until decode's first token is
with the client. Both legs are sent at once, as SGLang's router does. The prompts differ: no prefix cache helps.
On the CPU each backend has the machine to itself, in turns: kvferry, nixl, nixl, kvferry, ...: what drifts, drifts for
both. On GPUs the pairs of both are up at once, for their starts take longer than all requests; one alone has requests,
in turns. There CUDA graphs and the overlap scheduler are on (--eager: off), weights are dummy ones, the same in every
engine, and free pages are in no order, as they are after an hour's traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import ClassVar

import httpx
from bench_gpu import MODEL as LARGE
from bench_handover import ROUNDS, Cell, Row, cells, measure, print_table
from sglang_engines import PYTHON, START_S, SglangFleet, SglangPair, body_of, generate, room, sglang_fleet

from engines import MODEL, events_of, fleet_of, prompt

BACKENDS = ("kvferry", "nixl")
FLAGS = ("--enable-metrics", "--max-total-tokens", "32768")
"""prefill's time of its end is in its answer where it counts; eight prompts at once find room."""
GPU_LENGTHS = (512, 2048, 4096, 8000)
GPU_MODEL = LARGE | {"num_hidden_layers": 16}
"""64 KiB of KV a token."""
GPU_START_S = 240.0
SCATTER, SCATTER_TOKENS, AT_ONCE = 48, 3000, 8
Measured = dict[Row, Cell]


class GpuFleet(SglangFleet):
    popen = staticmethod(subprocess.Popen)  # no fork of what has imported an engine
    sglang_flags: ClassVar[Sequence[str]] = (
        "--dtype", "bfloat16", "--load-format", "dummy", "--attention-backend", "triton", "--sampling-backend",
        "pytorch", "--grammar-backend", "none", "--max-total-tokens", "98304", "--mem-fraction-static", "0.35",
        "--max-running-requests", "32", "--cuda-graph-max-bs-decode", "16", "--skip-tokenizer-init",
        "--skip-server-warmup",
    )  # fmt: skip

    def sglang_environment(self, backend: str, ranks: int) -> dict[str, str]:
        return {
            "SGLANG_PLUGINS": "kvferry", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        }  # fmt: skip


@contextmanager
def pair(backend: str, fleet: SglangFleet, gpus: Sequence[str], flags: Sequence[str]) -> Iterator[SglangPair]:
    prefill, decode = (
        fleet.sglang(
            f"{mode[0]}-{backend}", mode=mode, backend=backend, flags=(*FLAGS, *flags), gpu=gpu,
            page_size=16 if gpu else 32,
        )
        for mode, gpu in zip(("prefill", "decode"), gpus or ("", ""), strict=True)
    )  # fmt: skip
    yield SglangPair(prefill, decode, decode)


def handover_ms(both: SglangPair, http: httpx.Client, tokens: list[int]) -> float:
    where = room(both.prefill)
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, both.prefill, tokens, max_tokens=4, **where)
        events = events_of(http, f"{both.decode.url}/generate", body_of(tokens, 4) | where)
        next(events)
        first = time.time()
        for _ in events:
            pass
        answer = prefilled.result().raise_for_status().json()
    return float(first - answer["meta_info"]["prefill_finished_time"]) * 1000


def on_cpu(starts: int) -> dict[str, Measured]:
    measured = cells(BACKENDS)
    for number in range(starts):
        for name in BACKENDS[:: -1 if number % 2 else 1]:
            say(f"starting two engines with {name}, about two minutes")
            with sglang_fleet(MODEL) as fleet, pair(name, fleet, (), ()) as both:
                asyncio.run(fleet.ready(both.prefill, both.decode, timeout_s=START_S))
                measure(fleet, partial(handover_ms, both), measured[name], ROUNDS, seed=1 + 1000 * number)
            say_rows(name, measured[name])
    return measured


def on_gpus(starts: int, gpus: Sequence[str], flags: Sequence[str]) -> dict[str, Measured]:
    """Prints the first handover of each pair, and how many prompts have the same tokens through both."""
    measured = cells(BACKENDS, GPU_LENGTHS)
    for number in range(starts):
        names = BACKENDS[:: -1 if number % 2 else 1]
        with ExitStack() as stack:
            fleet = stack.enter_context(gpu_fleet())
            pairs = {name: stack.enter_context(pair(name, fleet, gpus, flags)) for name in names}
            say("starting four engines, about two minutes")
            every = [engine for both in pairs.values() for engine in (both.prefill, both.decode)]
            asyncio.run(fleet.ready(*every, timeout_s=GPU_START_S))
            for name, both in pairs.items():
                with httpx.Client(trust_env=False, timeout=GPU_START_S) as http:
                    say(f"{name}, the first handover: {handover_ms(both, http, prompt(2048, number)):.1f} ms")
                scatter(both, number)
                measure(fleet, partial(handover_ms, both), measured[name], ROUNDS, seed=1 + 1000 * number)
                say_rows(name, measured[name])
                for record in both.decode.transfers()[-AT_ONCE - 1 :: AT_ONCE] if both.decode.daemons else ():
                    say(f"of {record.bytes / 1e6:.0f} MB, {record.path}: {record.phases_ms}")
            prompts = [prompt(length, 7 + number) for length in GPU_LENGTHS for _ in range(2)]
            one, other = ([both.handover(tokens) for tokens in prompts] for both in pairs.values())
            same = sum(tokens == others for tokens, others in zip(one, other, strict=True))
            say(f"{same} of {len(prompts)} prompts have the same tokens through both")
    return measured


@contextmanager
def gpu_fleet() -> Iterator[GpuFleet]:
    with fleet_of(GpuFleet, PYTHON) as fleet:
        folder = fleet.directory / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(GPU_MODEL))
        yield fleet


def scatter(both: SglangPair, seed: int) -> None:
    """Requests of many lengths, several at once, whose pages come free in no order."""
    chance = random.Random(seed)
    prompts = [prompt(chance.randrange(40, SCATTER_TOKENS), 500 + seed + i) for i in range(SCATTER)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(both.handover, prompts):
            pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_rows(name: str, measured: Measured) -> None:
    for row, cell in measured.items():
        say(f"{name} until now, (tokens, in flight) {row}: {cell}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--starts", type=int, default=0, help="of each backend (default: 3, on GPUs 1)")
    options.add_argument("--gpus", default="", metavar="N,N", help="of prefill and decode (default: the CPU)")
    options.add_argument("--eager", action="store_true", help="no CUDA graphs, no overlap scheduler")
    asked = options.parse_args()
    if asked.gpus:
        eager = ("--disable-cuda-graph", "--disable-overlap-schedule") if asked.eager else ()
        print_table(on_gpus(asked.starts or 1, asked.gpus.split(","), eager))
    else:
        print_table(on_cpu(asked.starts or 3))


if __name__ == "__main__":
    main()
