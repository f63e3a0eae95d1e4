"""Two vLLM engines with too few blocks under random requests, clients that leave, and the death of either engine.

`make soak-vllm` runs it for ten minutes. Every answer is compared with that of one engine; a request may end with an
error only while an engine is dead, or if it was under way when one died.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from test_vllm_preemption import FEW

from engines import ANSWER_S, START_S, Pair, cache_usage, events_of, eventually, metric, pair, prompt

SECONDS = float(os.environ.get("SOAK") or 600)
SEED = int(os.environ.get("SOAK_SEED") or 0) or random.randrange(1 << 31)
pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(3 * SECONDS + 8 * START_S)]
WORKERS = 5
CALM_S = (20.0, 60.0)
"""Between one engine's return and the next one's death."""
TOKENS = 160
"""The most that is decoded of one request."""
LEAVES = 0.2
"""So many clients leave before the last token."""


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    prefill: dict[str, Any] = {"flags": FEW, "options": {"progressive": True}}
    policy = {"kv_load_failure_policy": "recompute"}
    decode: dict[str, Any] = {"flags": FEW, "options": {"load_timeout_s": 20}, "transfer": policy}
    with pair(prefill=prefill, decode=decode, daemon_flags=("--lease-ttl-s", "10"), start_s=3 * START_S) as both:
        yield both


@dataclass
class Soak:
    engines: Pair
    rng: random.Random
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: Counter[str] = field(default_factory=Counter)
    right: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompts and what was decoded, to be compared."""
    bad: list[str] = field(default_factory=list)
    phase: int = 0
    """Odd while an engine is dead."""

    def work(self) -> None:
        while not self.over.is_set():
            with self.lock:
                tokens, count, leaves, before = *self.draw(), self.rng.random() < LEAVES, self.phase
            try:
                answer = self.one(tokens, count, leaves)
                what = "left" if answer is None else "answered"
            except (httpx.HTTPError, KeyError, AssertionError) as error:
                what, answer = "ended with an error, an engine being dead", None
                if before == self.phase and before % 2 == 0:
                    self.bad.append(f"{type(error).__name__} {error} with both engines alive")
                time.sleep(0.2)  # a dead engine refuses at once
            with self.lock:
                self.seen[what] += 1
                if answer is not None:
                    self.right.append((tokens, answer))

    def draw(self) -> tuple[list[int], int]:
        """A prompt, a third of them the beginning of an earlier one and more; and how many tokens are wanted."""
        tokens = prompt(self.rng.randrange(20, 700), seed=self.rng.randrange(1 << 31))
        if self.right and self.rng.random() < 1 / 3:
            earlier = self.rng.choice(self.right)[0]
            tokens = (earlier[: self.rng.randrange(len(earlier)) + 1] + tokens)[:700]
        return tokens, self.rng.randrange(1, TOKENS + 1)

    def one(self, tokens: Sequence[int], count: int, leaves: bool) -> list[int] | None:
        """The decoded tokens; None for a client that left. Raises where an engine did not answer."""
        body = {
            "model": "m", "prompt": list(tokens), "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True, "kv_transfer_params": self.engines.prefilled(tokens),
        }  # fmt: skip
        told: list[int] = []
        with httpx.Client(trust_env=False, timeout=ANSWER_S) as http:
            for event in events_of(http, f"{self.engines.decode.url}/v1/completions", body):
                told += event["choices"][0]["token_ids"] if event["choices"] else []
                if leaves and len(told) > count // 2:
                    return None
        assert len(told) == count, f"{len(told)} of {count} tokens came"
        return told

    def trouble(self) -> None:
        """Kill an engine and start it again, one after another."""
        while not self.over.wait(self.rng.uniform(*CALM_S)):
            engine = self.rng.choice((self.engines.prefill, self.engines.decode))
            self.phase += 1
            self.seen[f"deaths of {engine.name}"] += 1
            self.engines.kill(engine)
            self.engines.start_again(engine, timeout_s=2 * START_S)
            self.phase += 1


def test_random_requests_and_engines_that_die(engines: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nsoaking two vLLM engines for {SECONDS:.0f} s, seed {SEED}")
    soak = Soak(engines, random.Random(SEED))
    with ThreadPoolExecutor(WORKERS + 1) as pool:
        tasks = [pool.submit(soak.trouble), *(pool.submit(soak.work) for _ in range(WORKERS))]
        soak.over.wait(SECONDS)
        soak.over.set()
        for task in tasks:
            task.result()
    preempted = sum(metric(one, "num_preemptions_total") for one in (engines.prefill, engines.decode))
    wrong = [len(tokens) for tokens, told in soak.right if engines.alone(tokens, max_tokens=len(told)) != told]
    ends = Counter(record.state for record in engines.transfers())
    with capsys.disabled():
        print("\n".join(f"  {count:6} {what}" for what, count in sorted(soak.seen.items())))
        print(f"  {preempted:6.0f} preemptions of engines that live, transfers {dict(ends)}, {len(wrong)} wrong")
    assert not wrong, f"prompts of {wrong} tokens have other tokens"
    assert not soak.bad
    assert soak.seen["answered"]
    assert ends["done"]
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0 == cache_usage(engines.decode))
