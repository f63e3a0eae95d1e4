"""Handover between two real SGLang engines on the CPU: kvferry beside SGLang's own NIXL backend, in one run.

    make bench-sglang                       # three starts each, half an hour
    make bench-sglang BENCH="--starts 1"

Handover: from the moment at which prefill has computed the prompt, as it says itself, until decode's first token is
with the client. Both legs are sent at once, as SGLang's router does. The prompts differ: no prefix cache helps.
Each backend has the machine to itself, in turns: kvferry, nixl, nixl, kvferry, ...: what drifts, drifts for both.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx
from bench_handover import ROUNDS, cells, measure, print_table
from sglang_engines import START_S, SglangEngine, SglangFleet, body_of, generate, room, sglang_fleet

from engines import MODEL, events_of

BACKENDS = ("kvferry", "nixl")
FLAGS = ("--enable-metrics", "--max-total-tokens", "32768")
"""prefill's time of its end is in its answer where it counts; eight prompts at once find room."""


@contextmanager
def pair(backend: str) -> Iterator[tuple[SglangFleet, SglangEngine, SglangEngine]]:
    with sglang_fleet(MODEL) as fleet:
        prefill, decode = (fleet.sglang(m[0], mode=m, backend=backend, flags=FLAGS) for m in ("prefill", "decode"))
        asyncio.run(fleet.ready(prefill, decode, timeout_s=START_S))
        yield fleet, prefill, decode


def handover_ms(prefill: SglangEngine, decode: SglangEngine, http: httpx.Client, tokens: list[int]) -> float:
    where = room(prefill)
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, prefill, tokens, max_tokens=4, **where)
        events = events_of(http, f"{decode.url}/generate", body_of(tokens, 4) | where)
        next(events)
        first = time.time()
        for _ in events:
            pass
        answer = prefilled.result().raise_for_status().json()
    return float(first - answer["meta_info"]["prefill_finished_time"]) * 1000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--starts", type=int, default=3, help="of each backend (default: 3)")
    measured = cells(BACKENDS)
    for number in range(options.parse_args().starts):
        for name in BACKENDS[:: -1 if number % 2 else 1]:
            print(f"starting two engines with {name}, about two minutes", file=sys.stderr, flush=True)
            with pair(name) as (fleet, prefill, decode):
                measure(fleet, partial(handover_ms, prefill, decode), measured[name], ROUNDS, seed=1 + 1000 * number)
            for row, cell in measured[name].items():
                print(f"{name} until now, (tokens, in flight) {row}: {cell}", file=sys.stderr, flush=True)
    print_table(measured)


if __name__ == "__main__":
    main()
