"""Two vLLM engines with too few blocks: random requests, clients that leave, engines killed and restarted.

`make soak-vllm` for ten minutes (SOAK=seconds). Every answer's tokens are those of one engine alone; a request may fail
only while an engine is gone. It ends with a table, after Ctrl-C too.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from soaking import SECONDS, SEED

from engines import LENGTHS, START_S, Pair, cache_usage, complete, eventually, metric, pair, prompt, tokens_of

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(SECONDS + 6 * START_S)]
FEW = ("--num-gpu-blocks-override", "44", "--max-model-len", "1024", "--max-num-batched-tokens", "128")
SIDES: dict[str, dict[str, Any]] = {
    "p": {"flags": FEW, "options": {"progressive": True}},
    "d": {"flags": FEW, "options": {"load_timeout_s": 10}, "transfer": {"kv_load_failure_policy": "recompute"}},
}
FLAGS = ("--lease-ttl-s", "10", "--checksum")
AT_ONCE, GENERATED = 6, 60
CALM_S = 30.0
"""Between the start of an engine and the death of the next one."""


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    with pair(prefill=SIDES["p"], decode=SIDES["d"], daemon_flags=FLAGS, start_s=2 * START_S) as both:
        yield both


class Soak:
    def __init__(self, engines: Pair) -> None:
        self.engines, self.rng = engines, random.Random(SEED)
        self.prompts = [prompt(length, seed=SEED % 1000) for length in LENGTHS if 5 <= length <= 700][::2]
        self.alone = [engines.alone(tokens, max_tokens=GENERATED) for tokens in self.prompts]
        self.ends: Counter[str] = Counter()
        self.whole = threading.Event()
        """Both engines are there."""
        self.whole.set()
        self.faults = list[str]()
        self.changes = 0
        """How often an engine died or came back."""
        self.over = threading.Event()

    def requests(self) -> None:
        while not self.over.is_set():
            index, leaves = self.rng.randrange(len(self.prompts)), self.rng.random() < 0.2
            before, whole = self.changes, self.whole.is_set()
            try:
                end = self.request(index, leaves)
            except (httpx.HTTPError, AssertionError) as error:
                end = "failed while an engine was gone"
                if self.changes == before and whole:
                    end = "failed while both were there"
                    self.faults.append(repr(error))
                self.over.wait(0.5)
            self.ends[end] += 1

    def request(self, index: int, leaves: bool) -> str:
        tokens = self.prompts[index]
        params = self.engines.prefilled(tokens)
        if leaves:
            body = {"model": "m", "prompt": tokens, "max_tokens": 800, "ignore_eos": True, "kv_transfer_params": params}
            with httpx.Client(trust_env=False, timeout=self.rng.uniform(0.02, 1.0)) as http:
                try:
                    http.post(f"{self.engines.decode.url}/v1/completions", json=body)
                except httpx.ReadTimeout:
                    return "the client left"
            return "done before the client left"
        answer = complete(self.engines.decode, tokens, max_tokens=GENERATED, kv_transfer_params=params)
        return "right" if tokens_of(answer) == self.alone[index] else "wrong"

    def deaths(self) -> None:
        while not self.over.wait(CALM_S):
            self.die(self.rng.choice("pd"))

    def die(self, name: str) -> None:
        engines = self.engines
        self.whole.clear()
        self.changes += 1
        dead = engines.prefill if name == "p" else engines.decode
        dead.signal(signal.SIGKILL)
        dead.process.wait(10)
        daemons = engines.prefill_daemons if name == "p" else engines.decode_daemons
        again = engines.fleet.vllm(name, engines.fleet.directory / "model", daemons, **SIDES[name])
        asyncio.run(engines.fleet.ready(again, timeout_s=2 * START_S))
        engines.prefill, engines.decode = (again, engines.decode) if name == "p" else (engines.prefill, again)
        self.changes += 1
        self.whole.set()
        self.ends[f"({'prefill' if name == 'p' else 'decode'} engine killed and restarted)"] += 1


def test_two_vllm_engines(engines: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nsoaking for {SECONDS:.0f} s, seed {SEED}", flush=True)
    soak, began = Soak(engines), time.monotonic()
    before = signal.signal(signal.SIGINT, lambda *_: soak.over.set())
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        working = [pool.submit(soak.requests) for _ in range(AT_ONCE)] + [pool.submit(soak.deaths)]
        soak.over.wait(SECONDS)
        soak.over.set()
        for one in working:
            one.result()
    signal.signal(signal.SIGINT, before)
    preempted = metric(engines.prefill, "num_preemptions_total") + metric(engines.decode, "num_preemptions_total")
    with capsys.disabled():
        print(f"\n{time.monotonic() - began:.0f} s, seed {SEED}, {preempted:.0f} preemptions since the last restart")
        print("| end | requests |\n|---|---|")
        for end, count in soak.ends.most_common():
            print(f"| {end} | {count} |")
    assert not soak.faults
    assert not soak.ends["wrong"]
    assert soak.ends["right"]
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert eventually(lambda: cache_usage(engines.decode) == 0)
