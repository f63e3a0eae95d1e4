"""Daemons die under living vLLM engines whose caches lie in GPU memory that a keeper owns: no byte of KV is wrong.

`ENGINES_VENV=... pytest -s -m gpu tests/engines/test_vllm_daemon_dies_gpu.py`, with vLLM for CUDA there; on one GPU
both engines share it. With two, engines of two ranks too, each GPU with a rank of either, and one rank's daemon dies at
a time. The KV that decode has is compared with what prefill computed, bit for bit, whenever half of a cache is used.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("gpu", "faults")]

from needs import GPUS

# isort: split
from bench_gpu import SAME_TOKENS, SMALL, VOCABULARY, GpuEngines
from keepers import children, kill, serving
from under_load import WORKERS, Requests, replaced

from engines import Pair, at_rest, cache_usage, eventually, fleet_of, kv_rows

pytestmark = [pytest.mark.gpu, pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(1200)]
KILLS = 50
TOKENS = 8
"""Decoded of each request."""
CACHE_TOKENS = 1 << 20
START_S = 300.0


@contextmanager
def started(*, prefill: Sequence[int], decode: Sequence[int]) -> Iterator[Pair]:
    """Two engines and a kept daemon for each of their ranks. prefill, decode: the GPU of each rank."""
    with fleet_of(GpuEngines) as fleet:
        gpus = {"p": prefill, "d": decode}
        daemons = {
            name: fleet.daemons(name, len(each), kept=True, devices=[f"cuda:{gpu}" for gpu in each])
            for name, each in gpus.items()
        }
        asyncio.run(fleet.ready(*itertools.chain(*daemons.values()), timeout_s=60))
        folder = fleet.shape(SMALL)
        both = [
            fleet.vllm(
                name, folder, daemons[name], block_size=SAME_TOKENS,
                flags=["--kv-cache-memory-bytes", str((CACHE_TOKENS << 15) // len(each)), "--enforce-eager"],
                environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, each))},
            )
            for name, each in gpus.items()
        ]  # fmt: skip
        asyncio.run(fleet.ready(*both, timeout_s=START_S))
        yield Pair(fleet, *both, daemons["p"], daemons["d"])


class Compared:
    """Requests under load, and the rows of both caches from before."""

    def __init__(self, engines: Pair, seed: int) -> None:
        self._sides = (engines.prefill, engines.decode)
        self._known = [kv_rows(side, SAME_TOKENS) for side in self._sides]
        self.requests = Requests(engines, seed, tokens=TOKENS, vocabulary=VOCABULARY)

    @property
    def full(self) -> bool:
        return (len(self.requests.right) + self.requests.failed) * 320 > CACHE_TOKENS // 2

    def equal(self) -> int:
        """Assert that each whole row that was handed over is in decode's cache as prefill computed it. Returns how many
        there are."""
        computed, moved = (
            kv_rows(side, SAME_TOKENS) - known for side, known in zip(self._sides, self._known, strict=True)
        )
        rows = sum((len(tokens) - 1) // SAME_TOKENS for tokens, _ in self.requests.right)
        both = len(computed & moved)
        assert both >= rows, f"{rows - both} of {rows} rows of {len(self.requests.right)} requests are not prefill's"
        return rows


def rest(engines: Pair, before: Sequence[int]) -> None:
    """Assert that no engine has ended, and that nothing is held any more. before: the engines' processes."""
    daemons = [*engines.prefill_daemons, *engines.decode_daemons]
    for pid in before:
        os.kill(pid, 0)
    assert eventually(lambda: cache_usage(engines.prefill) == 0 == cache_usage(engines.decode))
    assert eventually(lambda: all(at_rest(daemon) for daemon in daemons))
    assert not engines.leases()
    assert all(len(children(daemon)) <= 2 and serving(daemon) in children(daemon) for daemon in daemons)


def test_daemons_are_killed_under_load() -> None:
    rng, deaths = random.Random(1), itertools.cycle([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
    done = failed = rows = killed = 0
    with started(prefill=[GPUS[0].index], decode=[GPUS[-1].index]) as engines:
        both = [*engines.prefill_daemons, *engines.decode_daemons]
        before = [engine.process.pid for engine in (engines.prefill, engines.decode)]
        for seed in itertools.count(1):
            compared = Compared(engines, seed)
            with compared.requests as requests:
                requests.more(3)
                while killed < KILLS and not compared.full:
                    gone = [(daemon, kill(daemon, next(deaths))) for daemon in (both, both[:1], both[1:])[killed % 3]]
                    killed += 1
                    for daemon, pid in gone:
                        replaced(daemon, pid)
                    requests.more(rng.randrange(1, 30))
            done, failed, rows = done + len(requests.right), failed + requests.failed, rows + compared.equal()
            print(f"{killed} kills: {done} requests handed over, {failed} failed, {rows} rows are equal", flush=True)
            if killed == KILLS:
                break
        assert failed, "no death met a request"
        rest(engines, before)


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs: NCCL takes one rank of an engine on each")
def test_the_daemon_of_one_rank_is_killed_under_load() -> None:
    """Two engines of two ranks each: decode's ranks are on the other GPU than those of prefill that they read."""
    first, second = GPUS[0].index, GPUS[1].index
    with started(prefill=[first, second], decode=[second, first]) as engines:
        before = [engine.process.pid for engine in (engines.prefill, engines.decode)]
        daemons = [*engines.decode_daemons, *engines.prefill_daemons]
        for seed, daemon in enumerate(daemons * 2, 1):
            served = {each.name: serving(each) for each in daemons}
            compared = Compared(engines, seed)
            with compared.requests as requests:
                requests.more(20)
                gone, began = kill(daemon, signal.SIGKILL), time.monotonic()
                replaced(daemon, gone)
                replaced_s = time.monotonic() - began
                requests.more(2 * WORKERS)  # at least one was begun after the death
                again_s = time.monotonic() - began
                requests.more(20)
            print(
                f"{daemon.name} killed: another serves after {replaced_s:.1f} s, {2 * WORKERS} requests handed over"
                f" {again_s:.1f} s after its death; {len(requests.right)} in all, {compared.equal()} rows equal;"
                f" {requests.failed} failed, the slowest after {max(requests.failed_s, default=0):.1f} s",
                flush=True,
            )
            changed = [each.name for each in daemons if serving(each) != served[each.name]]
            assert changed == [daemon.name], "no other rank's daemon ends with it"
        rest(engines, before)
