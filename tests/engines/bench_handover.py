"""Handover between two real vLLM engines on the CPU: kvferry beside vLLM's own NixlConnector, in one run.

    make bench-vllm                 # at most 15 minutes
    make bench-vllm BENCH=--short   # a third of it, to see that it works

Handover: from the prefill's whole answer to the first token of the decode's. The prompts differ, so that no prefix
cache helps. A pair of engines for each connector is up at the same time, and they take turns, request by request
(alone) or round by round (8 in flight): now one is first, now the other. What the machine does, it does to both. The
engines whose turn it is not are stopped: idle ones may take a core (those with NIXL inside do). That slows
NixlConnector's turns down: docs/benchmarks.md has what each takes with the machine to itself.
Then shapes: whether a request that was prefilled by one engine is decoded by the other, with the right tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import httpx

from engines import ANSWER_S, MODEL, Pair, Service, complete, pair, prompt, tokens_of
from kvferryd.demo.fleet import ServiceError

LENGTHS = (33, 250, 700, 1500)
FLIGHTS = (1, 8)
ROUNDS = {1: 30, 8: 6}
"""By requests in flight: how often each connector has its turn."""
SHORT = 5
"""How many times fewer there are with --short."""
CONNECTORS = ("kvferry", "NixlConnector")
BUDGET_S = 900.0
"""For all of it: a row or a shape for which no time is left is not tried."""
MEASURE_S = 480.0
"""For the handovers, once the engines are up."""
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
class Cell:
    """One connector at one length and number in flight."""

    handover_ms: list[float]
    cpu_s: float
    """Per request, of its engines and daemons."""

    @property
    def p50(self) -> float:
        return statistics.median(self.handover_ms)

    @property
    def p90(self) -> float:
        return statistics.quantiles(self.handover_ms, n=10, method="inclusive")[-1]

    def __str__(self) -> str:
        return f"{self.p50:.0f} | {self.p90:.0f} | {max(self.handover_ms):.0f} | {self.cpu_s:.2f}"


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


@contextmanager
def turn_of(both: Pair) -> Iterator[None]:
    engines = (both.prefill, both.decode)
    for engine in engines:
        engine.signal(signal.SIGCONT)
    try:
        yield
    finally:
        for engine in engines:
            engine.signal(signal.SIGSTOP)


def measure(pairs: dict[str, Pair], length: int, flight: int, rounds: int, seed: int) -> dict[str, Cell]:
    """One row: the connectors in turn, `rounds` times each, with `flight` requests a turn."""
    times: dict[str, list[float]] = {name: [] for name in pairs}
    before = {name: cpu_seconds(both) for name, both in pairs.items()}
    limits = httpx.Limits(max_connections=2 * max(FLIGHTS))
    with ThreadPoolExecutor(flight) as pool, httpx.Client(trust_env=False, timeout=ANSWER_S, limits=limits) as http:
        for turn in range(rounds):
            for name in (CONNECTORS, CONNECTORS[::-1])[turn % 2]:
                prompts = [prompt(length, seed=seed + turn * flight + i) for i in range(flight)]
                with turn_of(pairs[name]):
                    times[name] += pool.map(partial(handover_ms, http, pairs[name]), prompts)
    requests = rounds * flight
    return {name: Cell(times[name], (cpu_seconds(both) - before[name]) / requests) for name, both in pairs.items()}


def supported(shape: Shape, connector: str, left_s: float) -> str:
    """In one word, or with what went wrong."""
    if left_s < SHAPE_S:
        return "not tried"
    sides = [{"block_size": size, "ranks": ranks} for size, ranks in zip(shape.blocks, shape.tp, strict=True)]
    try:
        with pair(
            DIVISIBLE, prefill=sides[0], decode=sides[1], kvferry=connector == "kvferry", start_s=SHAPE_S
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
    options.add_argument("--short", action="store_true", help=f"{SHORT} times fewer requests, one shape")
    short = options.parse_args().short
    began = time.monotonic()
    print("starting two engines with each connector, two minutes", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(pair(kvferry=name == "kvferry")) for name in CONNECTORS}
        end = time.monotonic() + MEASURE_S
        measure(pairs, 40, 1, 2, 0)  # the first contact of the engines
        print("handover in ms; CPU seconds per request of engines and daemons")
        print(
            "| tokens | in flight | requests | " + " | ".join(f"{c} p50 | p90 | max | CPU" for c in CONNECTORS),
            "| p50 ratio |",
        )
        print("|---|---|---|" + "---|---|---|---|" * len(CONNECTORS) + "---|", flush=True)
        for row, (length, flight) in enumerate(product(LENGTHS, FLIGHTS), start=1):
            if time.monotonic() > end:
                print(f"no time is left for {length} tokens, {flight} in flight", file=sys.stderr)
                break
            rounds = max(1, ROUNDS[flight] // (SHORT if short else 1))
            cells = measure(pairs, length, flight, rounds, seed=1000 * row)
            ours, theirs = (cells[name] for name in CONNECTORS)
            print(
                f"| {length} | {flight} | {rounds * flight} | {ours} | {theirs} | {ours.p50 / theirs.p50:.2f} |",
                flush=True,
            )
    print("\n| shape | " + " | ".join(CONNECTORS) + " |")
    print("|---|" + "---|" * len(CONNECTORS))
    for shape in SHAPES[:1] if short else SHAPES:
        told = [supported(shape, connector, began + BUDGET_S - time.monotonic()) for connector in CONNECTORS]
        print(f"| {shape} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
