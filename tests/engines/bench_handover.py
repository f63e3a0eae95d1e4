"""Handover between two real vLLM engines on the CPU: kvferry beside vLLM's own NixlConnector, in one run.

    make bench-vllm                 # at most 15 minutes
    make bench-vllm BENCH=--short   # a third of it, to see that it works

Handover: from the prefill's whole answer to the first token of the decode's. The prompts differ, so that no prefix
cache helps. Each connector has the machine to itself: idle engines with NIXL inside take cores. So a pair of engines is
started for each in turn, kvferry, NixlConnector, NixlConnector, kvferry: what drifts, drifts for both.
Then shapes: whether a request that was prefilled by one engine is decoded by the other, with the right tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import httpx

from engines import ANSWER_S, MODEL, Pair, Service, complete, events_of, pair, prompt, tokens_of
from kvferryd.demo.fleet import Fleet, ServiceError

LENGTHS = (33, 250, 700, 1500)
FLIGHTS = (1, 8)
ROUNDS = {1: 16, 8: 3}
"""Keyed by requests in flight: rounds of so many requests with each start."""
CONNECTORS = ("kvferry", "NixlConnector")
STARTS = (*CONNECTORS, *CONNECTORS[::-1])
BUDGET_S = 900.0
"""For all of it: a shape for which no time is left is not tried."""
MEASURE_S = 90.0
"""For the handovers of one start: a row that would begin later has fewer requests, or none."""
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
Row = tuple[int, int]
"""(tokens, in flight)."""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Cell:
    """A connector at one length and number in flight."""

    handover_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    """CPU of its engines and daemons, for all requests."""

    @property
    def p50(self) -> float:
        return statistics.median(self.handover_ms) if self.handover_ms else math.nan

    def __str__(self) -> str:
        if not self.handover_ms:
            return "0 | | | |"
        p90 = statistics.quantiles(self.handover_ms, n=10, method="inclusive")[-1]
        requests = len(self.handover_ms)
        told = " | ".join(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in (self.p50, p90, max(self.handover_ms)))
        return f"{requests} | {told} | {self.cpu_s / requests:.2f}"


def handover_ms(both: Pair, http: httpx.Client, tokens: list[int]) -> float:
    return first_token_ms(http, both.decode, tokens, both.prefilled(tokens), max_tokens=4)


def first_token_ms(
    http: httpx.Client, engine: Service, tokens: list[int], params: object, max_tokens: int = 2
) -> float:
    """Raises KeyError when the engine gives no token."""
    body = {
        "model": "m", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "detokenize": False, "return_token_ids": True, "kv_transfer_params": params,
    }  # fmt: skip
    began = time.perf_counter()
    events = events_of(http, f"{engine.url}/v1/completions", body)
    next(events)["choices"][0]
    took = time.perf_counter() - began
    for _ in events:
        pass
    return took * 1000


def cpu_seconds(fleet: Fleet) -> float:
    """CPU of all processes of the engines and daemons until now."""
    groups = {service.process.pid for service in fleet.services}
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(fields[2]) in groups:
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def measure(
    fleet: Fleet,
    handover_ms: Callable[[httpx.Client, list[int]], float],
    rows: dict[Row, Cell],
    rounds: Mapping[int, int],
    seed: int,
) -> None:
    """Add to every row, as long as there is time."""
    end = time.monotonic() + MEASURE_S
    limits = httpx.Limits(max_connections=2 * max(FLIGHTS))
    with httpx.Client(trust_env=False, timeout=ANSWER_S, limits=limits) as http:
        for i in range(2):
            handover_ms(http, prompt(40, seed=seed + i))  # the first contact of the engines
        for number, ((length, flight), cell) in enumerate(rows.items()):
            if time.monotonic() > end:
                return
            prompts = [prompt(length, seed=seed + 100 * number + i) for i in range(rounds[flight] * flight)]
            before = cpu_seconds(fleet)
            with ThreadPoolExecutor(flight) as pool:
                cell.handover_ms += pool.map(partial(handover_ms, http), prompts)
            cell.cpu_s += cpu_seconds(fleet) - before


def cells(names: Iterable[str], lengths: Iterable[int] = LENGTHS) -> dict[str, dict[Row, Cell]]:
    """Without a request, by connector."""
    return {name: {row: Cell() for row in product(lengths, FLIGHTS)} for name in names}


def print_table(cells: Mapping[str, Mapping[Row, Cell]]) -> None:
    """The table of two connectors; ours is the first."""
    print("handover in ms; CPU seconds per request of engines and daemons")
    head = " | ".join(f"{name} requests | p50 | p90 | max | CPU" for name in cells)
    print(f"| tokens | in flight | {head} | p50 ratio |")
    print("|---|---|" + "---|---|---|---|---|" * len(cells) + "---|")
    ours, theirs = cells.values()
    for row, cell in ours.items():
        print(f"| {row[0]} | {row[1]} | {cell} | {theirs[row]} | {cell.p50 / theirs[row].p50:.2f} |", flush=True)


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
    options.add_argument("--short", action="store_true", help="one start each, few requests, one shape")
    short = options.parse_args().short
    began = time.monotonic()
    measured = cells(CONNECTORS)
    for number, name in enumerate(CONNECTORS if short else STARTS):
        print(f"starting two engines with {name}, about a minute", file=sys.stderr, flush=True)
        with pair(kvferry=name == "kvferry") as both:
            rounds = {1: 4, 8: 1} if short else ROUNDS
            measure(both.fleet, partial(handover_ms, both), measured[name], rounds, seed=1 + 1000 * number)
        for row, cell in measured[name].items():
            print(f"{name} until now, (tokens, in flight) {row}: {cell}", file=sys.stderr, flush=True)
    print_table(measured)
    print("\n| shape | " + " | ".join(CONNECTORS) + " |")
    print("|---|" + "---|" * len(CONNECTORS))
    for shape in SHAPES[:1] if short else SHAPES:
        told = [supported(shape, connector, began + BUDGET_S - time.monotonic()) for connector in CONNECTORS]
        print(f"| {shape} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
