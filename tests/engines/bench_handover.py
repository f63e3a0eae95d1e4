"""Handover between two real vLLM engines on the CPU: kvferry beside vLLM's own NixlConnector, in one run.

    make bench-vllm                 # at most 15 minutes
    make bench-vllm BENCH=--short   # a third of it, to see that it works

Handover: from the prefill's whole answer to the first token of the decode's. The prompts differ, so that no prefix
cache helps. The connectors take turns, each with engines of its own: those of both do not fit beside each other.
Then shapes: whether a request that was prefilled by one engine is decoded by the other, with the right tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from engines import ANSWER_S, MODEL, Pair, Service, complete, pair, prompt, tokens_of
from kvferryd.demo.fleet import ServiceError

LENGTHS = (33, 250, 700, 1500)
FLIGHTS = (1, 8)
REQUESTS = 12
CONNECTORS = ("kvferry", "NixlConnector")
BUDGET_S = 900.0
"""For all of it: a shape for which no time is left is not tried."""
MEASURE_S = 240.0
"""For the handovers of one connector, once its engines are up: what would begin later is left out."""
SHAPE_S = 120.0
"""For one shape with one connector, the start of its engines included."""
DIVISIBLE = dataclasses.replace(MODEL, intermediate_size=960, vocab_size=576)


@dataclass(frozen=True)
class Shape:
    """(prefill, decode)."""

    blocks: tuple[int, int] = (32, 32)
    tp: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        return f"blocks of {self.blocks[0]} to {self.blocks[1]}, TP{self.tp[0]} to TP{self.tp[1]}"


SHAPES = [Shape((32, 96)), Shape((96, 32)), Shape(tp=(2, 1)), Shape(tp=(2, 3))]
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    length: int
    flight: int
    handover_ms: list[float]
    cpu_s: float


def leg(http: httpx.Client, engine: Service, tokens: list[int], max_tokens: int, params: object) -> Iterator[str]:
    """The answer's events, as they come."""
    body = {
        "model": "m", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "detokenize": False, "return_token_ids": True, "stream": True, "kv_transfer_params": params,
    }  # fmt: skip
    with http.stream("POST", f"{engine.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        yield from (line for line in answer.iter_lines() if line.startswith("data: {"))


def handover_ms(http: httpx.Client, both: Pair, tokens: list[int]) -> float:
    params = both.prefilled(tokens)
    began = time.perf_counter()
    events = leg(http, both.decode, tokens, 4, params)
    next(events)
    took = time.perf_counter() - began
    for _ in events:
        pass
    return took * 1000


def cpu_seconds(both: Pair) -> float:
    """Of all processes of the engines and daemons until now."""
    groups = {service.process.pid for service in both.fleet.services}
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(fields[2]) in groups:
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def measure(both: Pair, seed: int, requests: int, say: Callable[[str], None]) -> list[Row]:
    rows = []
    end = time.monotonic() + MEASURE_S
    with httpx.Client(trust_env=False, timeout=ANSWER_S, limits=httpx.Limits(max_connections=16)) as http:
        handover_ms(http, both, prompt(40, seed=seed))  # the first contact of the two engines
        for length in LENGTHS:
            for flight in FLIGHTS:
                if time.monotonic() > end:
                    return rows
                prompts = [prompt(length, seed=seed + 1 + flight * requests + i) for i in range(requests)]
                before = cpu_seconds(both)
                with ThreadPoolExecutor(flight) as pool:
                    times = list(pool.map(lambda tokens: handover_ms(http, both, tokens), prompts))
                rows.append(Row(length, flight, times, (cpu_seconds(both) - before) / requests))
                say(f"{length} tokens, {flight} in flight: {statistics.median(times):.0f} ms")
    return rows


def supported(shape: Shape, connector: str, left_s: float) -> str:
    """In one word, or with what went wrong."""
    if left_s < SHAPE_S:
        return "not tried"
    sides = [{"block_size": size} for size in shape.blocks]
    try:
        with pair(
            DIVISIBLE, prefill=sides[0], decode=sides[1], tp=shape.tp, kvferry=connector == "kvferry", start_s=SHAPE_S
        ) as both:
            tokens = prompt(200)
            alone = both.alone(tokens, max_tokens=4)
            moved = complete(both.decode, tokens, max_tokens=4, kv_transfer_params=both.prefilled(tokens))
            if moved.status_code != 200:
                return f"no: {moved.status_code}"
            return "yes" if tokens_of(moved) == alone else "no: other tokens"
    except (ServiceError, httpx.HTTPError) as error:
        return f"no: {getattr(error, 'code', type(error).__name__)}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--short", action="store_true", help="few requests, one shape")
    short = options.parse_args().short
    requests, shapes, end = 3 if short else REQUESTS, SHAPES[:1] if short else SHAPES, time.monotonic() + BUDGET_S
    results: dict[str, list[Row]] = {}
    for connector in CONNECTORS:

        def say(what: str, connector: str = connector) -> None:
            print(f"{connector}: {what}", file=sys.stderr, flush=True)

        say("starting two engines, about a minute")
        with pair(kvferry=connector == "kvferry") as both:
            results[connector] = measure(both, 1000, requests, say)
    print(f"handover in ms, {requests} requests each; CPU seconds per request of everything that runs")
    print("| tokens | in flight | " + " | ".join(f"{c} p50 | max | CPU" for c in CONNECTORS) + " | p50 ratio |")
    print("|---|---|" + "---|---|---|" * len(CONNECTORS) + "---|")
    for rows in zip(*results.values(), strict=False):
        cells = [
            f"{statistics.median(row.handover_ms):.0f} | {max(row.handover_ms):.0f} | {row.cpu_s:.2f}" for row in rows
        ]
        ours, theirs = (statistics.median(row.handover_ms) for row in rows)
        print(f"| {rows[0].length} | {rows[0].flight} | {' | '.join(cells)} | {ours / theirs:.2f} |")
    print("\n| shape | " + " | ".join(CONNECTORS) + " |")
    print("|---|" + "---|" * len(CONNECTORS))
    for shape in shapes:
        told = [supported(shape, connector, end - time.monotonic()) for connector in CONNECTORS]
        print(f"| {shape} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
