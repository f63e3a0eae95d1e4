"""Handover between two real vLLM engines on two GPUs: kvferry beside vLLM's own NixlConnector, in one run.

    make bench-vllm-gpu                       # with torch for CUDA and vLLM installed: about 10 minutes
    python tests/engines/bench_gpu.py --help

Decode leg: from the decode request to its first token, the prefill's answer in hand. The floor is the same prompt asked
again: then the decode engine has its KV in its own prefix cache. Weights are vLLM's dummy ones, the same on both sides;
free blocks are in no order, as they are after an hour's traffic. Each connector has the GPUs to itself, in turns.
"kvferry-known": the decode daemon has the prefill's in `known_peers`, and meets it before anybody asks.
"kvferry-checked": daemons compare a checksum of every byte with the source's before a transfer is done.
Then requests come by chance, more and more of them in a second (--rates): time to first token as the client sees it,
prefill included, and what the pair answers in a second. Last, the KV that prefill computed is looked for in decode's
cache, on every rank and outside the timing. --together N starts so many pairs at once, and measures them in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import httpx
from bench_handover import first_token_ms

from engines import ANSWER_S, Engines, Pair, complete, fleet_of, prompt
from kvferryd.demo.fleet import DaemonService, Service

VOCABULARY = 32_000
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "vocab_size": VOCABULARY, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
"""The shape of an 8B Llama: 128 KiB of KV a token."""
SMALL = MODEL | {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 8,
}  # fmt: skip
"""32 KiB of KV a token."""
TOKEN_BYTES_OF_A_HEAD = 2 * 2 * 32 * 128
LENGTHS = (128, 1024, 4096, 8192)
AT_ONCE, AT_ONCE_LENGTH = 16, 2048
SAME_TOKENS = 16
"""KV is compared in rows of so many tokens, whatever the block sizes."""
LOAD_S, LOAD_LENGTH, LOAD_TOKENS = 8.0, 2048, 32
"""For each rate: how long requests come, their prompts and answers in tokens."""
CONNECTORS = {
    "kvferry": {}, "kvferry-staged": {"flags": ("--way", "staged")}, "kvferry-known": {"known": True},
    "kvferry-adopted": {"options": {"memory": "adopted"}}, "kvferry-checked": {"flags": ("--checksum",)},
    "NixlConnector": {"kvferry": False},
}  # fmt: skip


class GpuEngines(Engines):
    flags: ClassVar[Sequence[str]] = (
        "--dtype", "bfloat16", "--load-format", "dummy", "--kv-cache-memory-bytes", str(8 << 30),
        "--max-model-len", "16384", "--max-num-batched-tokens", "8192", "--max-num-seqs", "64",
        "--gpu-memory-utilization", "0.1",  # vLLM only checks that so much is free: engines may share a GPU
    )  # fmt: skip
    python_path: ClassVar[Sequence[str]] = ()
    popen = staticmethod(subprocess.Popen)  # no fork of what has imported an engine

    def shape(self, config: dict[str, Any]) -> Path:
        """A model's folder, without weights."""
        folder = self.directory / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def _environment(self) -> dict[str, str]:
        """A cache of compiled graphs that the next start finds."""
        kept = {"VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", "/tmp/kvferry-bench-cache")}
        found = super()._environment() | kept
        del found["TORCHDYNAMO_DISABLE"]
        return found


@dataclass
class Load:
    first_ms: list[float]
    """For every request, from when it came to its first token."""
    answered: float
    """Requests a second, until the last had its last token."""


@dataclass
class Figures:
    """Figures of one connector, in ms."""

    first: float = math.nan
    """The first request between two engines that have never met."""
    legs: dict[int, list[float]] = field(default_factory=dict)
    """By tokens."""
    floors: dict[int, list[float]] = field(default_factory=dict)
    at_once: list[float] = field(default_factory=list)
    """Until the last of the requests has its first token."""
    loads: dict[float, Load] = field(default_factory=dict)
    """Keyed by requests a second."""
    equal: tuple[int, int] = (0, 0)
    """The compared KV: rows of SAME_TOKENS tokens that decode has bit for bit, and all of them."""


@dataclass(frozen=True)
class Side:
    """An engine. `gpus`: one for each rank. `layout`: NHD or HND; vLLM's own choice where it is empty."""

    name: str
    gpus: Sequence[str]
    block_size: int
    layout: str

    def daemons(self, fleet: GpuEngines, flags: Sequence[str]) -> list[DaemonService]:
        devices = [f"cuda:{gpu}" for gpu in self.gpus]
        return fleet.daemons(self.name, len(self.gpus), flags=flags, devices=devices)

    def engine(self, fleet: GpuEngines, model: Path, daemons: Sequence[DaemonService], how: dict[str, Any]) -> Service:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        if self.layout:
            environment["VLLM_KV_CACHE_LAYOUT"] = self.layout
        return fleet.vllm(
            self.name, model, daemons, ranks=len(self.gpus), block_size=self.block_size,
            options=how.get("options"), environment=environment,
        )  # fmt: skip


@contextlib.contextmanager
def started(model: Path, prefill: Side, decode: Side, start_s: float, how: dict[str, Any]) -> Iterator[Pair]:
    """Raises ServiceError."""
    with fleet_of(GpuEngines) as fleet:
        sources, readers = list[DaemonService](), list[DaemonService]()
        if how.get("kvferry", True):
            flags = how.get("flags", ())
            sources = prefill.daemons(fleet, flags)
            known = ("--known-peers", sources[0].peer) if how.get("known") else ()
            readers = decode.daemons(fleet, (*flags, *known))
            asyncio.run(fleet.ready(*sources, *readers, timeout_s=60))
        engines = [prefill.engine(fleet, model, sources, how), decode.engine(fleet, model, readers, how)]
        asyncio.run(fleet.ready(*engines, timeout_s=start_s))
        yield Pair(fleet, *engines, sources, readers)


@contextlib.contextmanager
def together(names: Sequence[str], model: Path, prefill: Side, decode: Side, start_s: float) -> Iterator[list[Pair]]:
    """A pair for each connector of `names`, all started at once. Raises ServiceError."""
    with contextlib.ExitStack() as stack:
        pairs = [started(model, prefill, decode, start_s, CONNECTORS[name]) for name in names]
        with ThreadPoolExecutor(len(names)) as pool:
            up = list(pool.map(stack.enter_context, pairs))
        yield up


def scatter(engine: Service, seed: int) -> None:
    """Requests of many lengths that end in no order, so that free blocks lie in none."""
    chance = random.Random(seed)
    asked = [(prompt(chance.randrange(20, 3000), i, VOCABULARY), chance.randrange(1, 48)) for i in range(160)]
    with ThreadPoolExecutor(32) as pool:
        for answer in pool.map(lambda one: complete(engine, one[0], max_tokens=one[1]), asked):
            answer.raise_for_status()


def loaded(http: httpx.Client, both: Pair, rate: float, seed: int) -> Load:
    """Requests that come at `rate` a second, each when chance says (a Poisson process), whether others wait or not."""
    chance, times = random.Random(rate), [0.0]  # the same for every connector
    while times[-1] < LOAD_S:
        times.append(times[-1] + chance.expovariate(rate))
    began = time.perf_counter()

    def one(number: int) -> float:
        time.sleep(max(0.0, began + times[number] - time.perf_counter()))
        tokens = prompt(LOAD_LENGTH, seed + number, VOCABULARY)
        params = both.prefilled(tokens, http)
        decode = time.perf_counter()
        return (decode - began - times[number]) * 1e3 + first_token_ms(http, both.decode, tokens, params, LOAD_TOKENS)

    with ThreadPoolExecutor(len(times)) as pool:
        first_ms = list(pool.map(one, range(len(times))))
    return Load(first_ms, len(times) / (time.perf_counter() - began))


def compared(both: Pair, lengths: Sequence[int], seed: int) -> tuple[int, int]:
    """Rows of whole SAME_TOKENS that decode has as prefill computed them, and how many it was handed."""
    equal = handed = 0
    for length in lengths:
        computed, moved = both.rows_of_handover(prompt(length, seed, VOCABULARY), SAME_TOKENS)
        rows = (length - 1) // SAME_TOKENS  # the engine computes the last token anew
        equal += min(rows, len(computed & moved))
        handed += rows
    return equal, handed


def measure(both: Pair, rounds: int, lengths: Sequence[int], rates: Sequence[float], seed: int) -> Figures:
    figures = Figures()
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(trust_env=False, timeout=ANSWER_S, limits=limits) as http:
        for engine in (both.prefill, both.decode):
            scatter(engine, seed)
        warm = prompt(AT_ONCE_LENGTH, seed, VOCABULARY)
        figures.first = first_token_ms(http, both.decode, warm, both.prefilled(warm))
        for record in both.transfers()[-1:] if both.decode_daemons else ():
            print(f"the first: {figures.first:.0f} ms, of it {record.phases_ms}", file=sys.stderr, flush=True)
        for i in range(2):
            warm = prompt(max(lengths), seed + i + 1, VOCABULARY)
            first_token_ms(http, both.decode, warm, both.prefilled(warm))
        for length in lengths:
            for i in range(rounds):
                tokens = prompt(length, seed + 100 + i, VOCABULARY)
                params = both.prefilled(tokens)
                figures.legs.setdefault(length, []).append(first_token_ms(http, both.decode, tokens, params))
                figures.floors.setdefault(length, []).append(first_token_ms(http, both.decode, tokens, None))
        for i in range(max(2, rounds // 3)):
            asked = [prompt(AT_ONCE_LENGTH, seed + 1000 + AT_ONCE * i + one, VOCABULARY) for one in range(AT_ONCE)]
            told = [both.prefilled(tokens) for tokens in asked]
            began = time.perf_counter()
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda one: first_token_ms(http, both.decode, *one), zip(asked, told, strict=True)))
            figures.at_once.append((time.perf_counter() - began) * 1e3)
        for number, rate in enumerate(rates):
            figures.loads[rate] = loaded(http, both, rate, seed + 5000 + 1000 * number)
    figures.equal = compared(both, lengths, seed + 9000)
    return figures


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def table(told: dict[str, list[Figures]], token_nbytes: int) -> Iterator[str]:
    names = list(told)
    yield "| decode leg, ms (median; of all starts) | " + " | ".join(names) + " | prefix-cache hit |"
    yield "|---" * (len(names) + 2) + "|"
    lengths = sorted({length for each in chain.from_iterable(told.values()) for length in each.legs})
    for length in lengths:
        medians = [median([ms for each in told[name] for ms in each.legs.get(length, [])]) for name in names]
        floor = median([ms for each in chain.from_iterable(told.values()) for ms in each.floors.get(length, [])])
        row = " | ".join(f"{ms:.1f}" for ms in (*medians, floor))
        yield f"| {length} tokens, {length * token_nbytes / 1e6:.0f} MB | {row} |"
    at_once = " | ".join(f"{median([ms for each in told[name] for ms in each.at_once]):.1f}" for name in names)
    yield f"| {AT_ONCE} of {AT_ONCE_LENGTH} tokens at once, until the last | {at_once} | |"
    first = " | ".join(" ".join(f"{each.first:.0f}" for each in told[name]) for name in names)
    yield f"| the first between the two engines, {AT_ONCE_LENGTH} tokens, by start | {first} | |"
    for rate in sorted({rate for each in chain.from_iterable(told.values()) for rate in each.loads}):
        loads = [[each.loads[rate] for each in told[name] if rate in each.loads] for name in names]
        cells = " | ".join(_load(found) for found in loads)
        yield f"| {rate:g} requests a second, {LOAD_LENGTH} tokens: TTFT p50, p99; answered a second | {cells} | |"
    rows = " | ".join(", ".join(f"{each.equal[0]} of {each.equal[1]}" for each in told[name]) for name in names)
    yield f"| KV that is equal bit for bit, rows of {SAME_TOKENS} tokens, by start | {rows} | |"


def _load(found: Sequence[Load]) -> str:
    if not found:
        return ""
    cut = statistics.quantiles(chain.from_iterable(each.first_ms for each in found), n=100)
    return f"{cut[49]:.0f}, {cut[98]:.0f}; {median([each.answered for each in found]):.1f}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument(
        "--connectors",
        default="kvferry,NixlConnector,NixlConnector,kvferry",
        help="in turns, of " + ", ".join(CONNECTORS),
    )
    options.add_argument(
        "--together", type=int, default=1, help="pairs that are up at once, though one alone has requests"
    )
    options.add_argument("--rounds", type=int, default=10, help="requests of each length with each start")
    options.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="prompts, in tokens")
    options.add_argument(
        "--gpus", default="0,1", help="of prefill and decode; 0+1,2+3: two ranks on either side; 0+1,1: GPU 1 is shared"
    )
    options.add_argument("--heads", default="32,8", help="of the model: attention, KV; 24,6 for three ranks")
    options.add_argument("--block-sizes", default="16,16", help="of prefill and decode")
    options.add_argument(
        "--layouts", default=",", help="of prefill and decode: NHD or HND; vLLM's own choice where none is named"
    )
    options.add_argument("--rates", default="4,8,12", help="rising load, in requests a second; empty for none")
    options.add_argument("--budget-s", type=float, default=560.0, help="a start that would come later is left out")
    asked = options.parse_args()
    end = time.monotonic() + asked.budget_s
    sides = [
        Side(name, gpus.split("+"), int(size), layout)
        for name, gpus, size, layout in zip(
            "pd", asked.gpus.split(","), asked.block_sizes.split(","), asked.layouts.split(","), strict=True
        )
    ]
    lengths = [int(one) for one in asked.lengths.split(",")]
    rates = [float(one) for one in asked.rates.split(",") if one]
    heads, kv_heads = (int(one) for one in asked.heads.split(","))
    config = MODEL | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    token_nbytes = TOKEN_BYTES_OF_A_HEAD * kv_heads
    told: dict[str, list[Figures]] = {}
    with contextlib.closing(GpuEngines()) as fleet:
        model = fleet.shape(config)
        names, longest = asked.connectors.split(","), 0.0
        for first in range(0, len(names), asked.together):
            began = time.monotonic()
            if began + longest > end:
                print(f"no time is left for start {first + 1} and later ones", file=sys.stderr, flush=True)
                break
            some = names[first : first + asked.together]
            print(f"starting two engines with {', '.join(some)}", file=sys.stderr, flush=True)
            with together(some, model, *sides, end - began) as pairs:
                up = time.monotonic()
                print(f"up after {up - began:.0f} s", file=sys.stderr, flush=True)
                for number, (name, both) in enumerate(zip(some, pairs, strict=True), first):
                    told.setdefault(name, []).append(measure(both, asked.rounds, lengths, rates, 1 + 10_000 * number))
                    for line in table(told, token_nbytes):
                        print(line, file=sys.stderr, flush=True)
            longest = time.monotonic() - began
            print(f"measured in {time.monotonic() - up:.0f} s", file=sys.stderr, flush=True)
    for line in table(told, token_nbytes):
        print(line)


if __name__ == "__main__":
    main()
