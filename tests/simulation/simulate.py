"""Runs of the protocol's machines, drawn from seeds: `make simulate SEED=n` plays one again and prints its transcript,
`make simulate HOURS=n` draws fresh ones on all cores and writes what they find, RUNS=n so many of each world. WORLD
chooses the machines, by a name of WORLDS."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

import book_world
import keeper_world
import peers_world
import reading_world
import requests_world
import roster_world
import session_world
import source_world
from table import Pair, printed, rarest, watched
from violation import Violation

SEEDS = 1 << 48
WORLDS = {
    "source": source_world.World,
    "keeper": keeper_world.World,
    "requests": requests_world.World,
    "book": book_world.World,
    "peers": peers_world.World,
    "reading": reading_world.World,
    "session": session_world.World,
    "roster": roster_world.World,
}


@dataclass
class Found:
    """Of many runs. kinds: of violations, each with the first seed that showed it."""

    world: str
    runs: int = 0
    steps: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)

    def __iadd__(self, other: Found) -> Found:
        self.runs, self.steps = self.runs + other.runs, self.steps + other.steps
        self.kinds = other.kinds | self.kinds
        self.ends += other.ends
        self.pairs += other.pairs
        return self

    def __str__(self) -> str:
        lines = [f"{kind}: make simulate WORLD={self.world} SEED={seed}" for kind, seed in self.kinds.items()]
        kinds = "".join(f"\n{line}" for line in lines or ["no violation"])
        return f"{self.runs} runs, {self.steps} steps, {dict(self.ends)}\n{printed(self.pairs)}{kinds}"


def played(seed: int, found: Found) -> str:
    """The kind of violation of one run; empty where all holds."""
    world, kind = WORLDS[found.world](seed), ""
    try:
        world.run()
    except Violation as violation:
        kind = violation.kind
    except Exception as error:  # noqa: BLE001  a machine that breaks, or its check, is a finding, too
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {frame.name}: {error}"[:120]
    if kind:
        found.kinds.setdefault(kind, seed)
    found.runs, found.steps = found.runs + 1, found.steps + world.steps
    found.ends += world.ends
    return kind


def for_seconds(world: str, first: int, seconds: float, runs: float = float("inf"), *, fewest: int = 0) -> Found:
    """runs: the most. fewest: played also where that takes longer."""
    rng, found, until = random.Random(first), Found(world), time.monotonic() + seconds
    with watched(found.pairs):
        while found.runs < fewest or (time.monotonic() < until and found.runs < runs):
            played(rng.randrange(SEEDS), found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=WORLDS, help="all in turn, unless it is given; with --seed the source's")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--hours", type=float, default=1 / 360)
    parser.add_argument("--runs", type=int, help="of each world, in place of hours")
    asked = parser.parse_args()
    if asked.seed is not None:
        world = WORLDS[asked.world or "source"](asked.seed, told=print)
        world.run()
        print(f"{world.steps} steps: all holds")
        return 0
    names, cores = [asked.world] if asked.world else list(WORLDS), os.cpu_count() or 1
    seconds = 3600 * asked.hours / len(names) if asked.runs is None else float("inf")
    runs = float("inf") if asked.runs is None else -(-asked.runs // cores)
    failed, pairs = 0, Counter[Pair]()
    with multiprocessing.Pool(cores) as pool:
        for name in names:
            firsts = [random.SystemRandom().randrange(SEEDS) for _ in range(cores)]
            print(f"{name}, from seeds {firsts}", flush=True)
            found = Found(name)
            for each in pool.starmap(for_seconds, [(name, each, seconds, runs) for each in firsts]):
                found += each
            print(found)
            failed, pairs = failed | bool(found.kinds), pairs + found.pairs
    print(rarest(pairs))
    return failed


if __name__ == "__main__":
    sys.exit(main())
