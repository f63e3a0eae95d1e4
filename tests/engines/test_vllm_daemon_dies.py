"""Daemons that are killed and upgraded under living vLLM engines: every request ends right or with an error."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from keepers import ROOT, before_this, eventually, kill, path_of, serving

from engines import MODEL, PREFILL_LEG, PYTHON, START_S, Engines, Pair, cache_usage, complete, prompt
from engines import eventually as soon
from kvferryd.demo.fleet import DaemonService

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(2400)]
KILLS = 50
WORKERS = 3
TOKENS = 4
"""Decoded of each request."""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the keepers find the daemon's code: a link to that of the commit before."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "code").symlink_to(before_this(folder / "before"))
    return folder / "code"


@pytest.fixture(scope="module")
def engines(code: Path) -> Iterator[Pair]:
    if not PYTHON.exists():
        pytest.skip("there is no vLLM here: make engines-venv installs one")
    fleet = Engines()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path_of(code))
            daemons = {name: fleet.daemon(f"{name}-0", kept=True) for name in "pd"}
        asyncio.run(fleet.ready(*daemons.values(), timeout_s=60))
        folder = fleet.model(MODEL)
        engines = [fleet.vllm(name, folder, [daemon]) for name, daemon in daemons.items()]
        asyncio.run(fleet.ready(*engines, timeout_s=2 * START_S))
        yield Pair(fleet, *engines, [daemons["p"]], [daemons["d"]])
    finally:
        fleet.close()


class Requests:
    """Prompts that nobody had before, without pause."""

    def __init__(self, engines: Pair, seed: int) -> None:
        self._engines, self._seed = engines, itertools.count(seed * 100_000)
        self._changed, self._over = threading.Condition(), False
        self.right = list[tuple[list[int], list[int]]]()
        """Prompts and what was decoded; they are compared afterwards."""
        self.failed = 0

    def __enter__(self) -> Requests:
        self._threads = [threading.Thread(target=self._work) for _ in range(WORKERS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()

    def more(self, count: int) -> None:
        """Wait until so many more have been handed over."""
        with self._changed:
            wanted = len(self.right) + count
            assert self._changed.wait_for(lambda: len(self.right) >= wanted, 120), "nothing is handed over any more"

    def _work(self) -> None:
        rng = random.Random(next(self._seed))
        while not self._over:
            tokens = prompt(rng.randrange(40, 600), seed=next(self._seed))
            answer = self._one(tokens)
            with self._changed:
                if answer is None:
                    self.failed += 1
                else:
                    self.right.append((tokens, answer))
                self._changed.notify_all()

    def _one(self, tokens: list[int]) -> list[int] | None:
        prefilled = complete(self._engines.prefill, tokens, max_tokens=1, kv_transfer_params=PREFILL_LEG)
        params = prefilled.json().get("kv_transfer_params")
        if prefilled.status_code != 200 or params is None:
            return None
        decoded = complete(self._engines.decode, tokens, max_tokens=TOKENS, kv_transfer_params=params)
        return decoded.json()["choices"][0]["token_ids"] if decoded.status_code == 200 else None

    def check(self) -> None:
        wrong = [len(tokens) for tokens, told in self.right if self._engines.alone(tokens, max_tokens=TOKENS) != told]
        assert not wrong, f"of {len(self.right)} prompts those of {wrong} tokens have other tokens"
        assert soon(lambda: cache_usage(self._engines.prefill) == 0 == cache_usage(self._engines.decode))
        assert not self._engines.leases()


def replaced(daemon: DaemonService, pid: int) -> None:
    eventually(lambda: serving(daemon) != pid, "another daemon serves")


def test_daemons_are_upgraded_under_load(engines: Pair, code: Path) -> None:
    code.unlink()
    code.symlink_to(ROOT)
    with Requests(engines, 1) as requests:
        for daemon in (*engines.prefill_daemons, *engines.decode_daemons):
            requests.more(3)
            before = serving(daemon)
            daemon.signal(signal.SIGHUP)
            replaced(daemon, before)
        requests.more(5)
    requests.check()


def test_daemons_are_killed_under_load(engines: Pair) -> None:
    both = [*engines.prefill_daemons, *engines.decode_daemons]
    rng, deaths = random.Random(1), itertools.cycle([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
    before = [engine.process.pid for engine in (engines.prefill, engines.decode)]
    with Requests(engines, 2) as requests:
        requests.more(3)
        for count, number in zip(range(KILLS), deaths, strict=False):
            gone = [(daemon, kill(daemon, number)) for daemon in (both, both[:1], both[1:])[count % 3]]
            for daemon, pid in gone:
                replaced(daemon, pid)
            requests.more(rng.randrange(1, 3))
    print(f"{KILLS} kills: {len(requests.right)} requests handed over, {requests.failed} failed")
    requests.check()
    for pid in before:
        os.kill(pid, 0)
    assert engines.handover(prompt(240, seed=7)) == engines.alone(prompt(240, seed=7))
    assert engines.transfers()[-1].state == "done"
