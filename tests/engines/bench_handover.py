"""Handover between two real vLLM engines on the CPU: kvferry beside vLLM's own NixlConnector, in one run.

    make bench-vllm

Handover: from the prefill's whole answer to the first token of the decode's. The prompts differ, so that no prefix
cache helps. The connectors take turns, each with engines of its own: those of both do not fit beside each other.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from engines import ANSWER_S, Pair, Service, pair, prompt

LENGTHS = (33, 250, 700, 1500)
FLIGHTS = (1, 8)
REQUESTS = 12
CONNECTORS = ("kvferry", "NixlConnector")
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


def measure(both: Pair, seed: int, say: Callable[[str], None]) -> list[Row]:
    rows = []
    with httpx.Client(trust_env=False, timeout=ANSWER_S, limits=httpx.Limits(max_connections=16)) as http:
        handover_ms(http, both, prompt(40, seed=seed))  # the first contact of the two engines
        for length in LENGTHS:
            for flight in FLIGHTS:
                prompts = [prompt(length, seed=seed + 1 + flight * REQUESTS + i) for i in range(REQUESTS)]
                before = cpu_seconds(both)
                with ThreadPoolExecutor(flight) as pool:
                    times = list(pool.map(lambda tokens: handover_ms(http, both, tokens), prompts))
                rows.append(Row(length, flight, times, cpu_seconds(both) - before))
                say(f"{length} tokens, {flight} in flight: {statistics.median(times):.0f} ms")
    return rows


@contextmanager
def engines_with(connector: str) -> Iterator[Pair]:
    with pair(tp=(1, 1) if connector == "kvferry" else (0, 0)) as both:
        yield both


def main() -> None:
    results: dict[str, list[Row]] = {}
    for connector in CONNECTORS:

        def say(what: str, connector: str = connector) -> None:
            print(f"{connector}: {what}", file=sys.stderr, flush=True)

        say("starting two engines, about a minute")
        with engines_with(connector) as both:
            results[connector] = measure(both, 1000, say)
    print(f"handover in ms, {REQUESTS} requests each; CPU seconds per request of everything that runs")
    print("| tokens | in flight | " + " | ".join(f"{c} p50 | max | CPU" for c in CONNECTORS) + " | p50 ratio |")
    print("|---|---|" + "---|---|---|" * len(CONNECTORS) + "---|")
    for rows in zip(*results.values(), strict=True):
        cells = [
            f"{statistics.median(row.handover_ms):.0f} | {max(row.handover_ms):.0f} | {row.cpu_s / REQUESTS:.2f}"
            for row in rows
        ]
        ours, theirs = (statistics.median(row.handover_ms) for row in rows)
        print(f"| {rows[0].length} | {rows[0].flight} | {' | '.join(cells)} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
