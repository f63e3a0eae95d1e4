"""Daemons that are killed and upgraded under living vLLM engines: every request ends right or with an error."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from keepers import ROOT, before_this, kill, path_of, serving
from under_load import Requests, replaced

from engines import MODEL, START_S, Engines, Pair, cache_usage, eventually, fleet_of, prompt

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(2400)]
KILLS = 50
TOKENS = 4
"""Decoded of each request."""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place at which keepers find the daemon's code: a link to that of the commit before."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "code").symlink_to(before_this(folder / "before"))
    return folder / "code"


@pytest.fixture(scope="module")
def engines(code: Path) -> Iterator[Pair]:
    with fleet_of(Engines) as fleet:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path_of(code))
            daemons = {name: fleet.daemon(f"{name}-0", kept=True) for name in "pd"}
        asyncio.run(fleet.ready(*daemons.values(), timeout_s=60))
        folder = fleet.model(MODEL)
        engines = [fleet.vllm(name, folder, [daemon]) for name, daemon in daemons.items()]
        asyncio.run(fleet.ready(*engines, timeout_s=2 * START_S))
        yield Pair(fleet, *engines, [daemons["p"]], [daemons["d"]])


def right(engines: Pair, requests: Requests) -> None:
    """Assert that every answer has the tokens of a single engine, and that no request holds anything."""
    answers = [(tokens, told, engines.alone(tokens, max_tokens=TOKENS)) for tokens, told in requests.right]
    wrong = [len(tokens) for tokens, told, alone in answers if told != alone]
    assert not wrong, f"of {len(answers)} prompts those of {wrong} tokens have other tokens"
    assert eventually(lambda: cache_usage(engines.prefill) == 0 == cache_usage(engines.decode))
    assert not engines.leases()


def test_daemons_are_upgraded_under_load(engines: Pair, code: Path) -> None:
    code.unlink()
    code.symlink_to(ROOT)
    with Requests(engines, 1, tokens=TOKENS) as requests:
        for daemon in (*engines.prefill_daemons, *engines.decode_daemons):
            requests.more(3)
            before = serving(daemon)
            daemon.signal(signal.SIGHUP)
            replaced(daemon, before)
        requests.more(5)
    right(engines, requests)


def test_daemons_are_killed_under_load(engines: Pair) -> None:
    both = [*engines.prefill_daemons, *engines.decode_daemons]
    rng, deaths = random.Random(1), itertools.cycle([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
    before = [engine.process.pid for engine in (engines.prefill, engines.decode)]
    with Requests(engines, 2, tokens=TOKENS) as requests:
        requests.more(3)
        for count, number in zip(range(KILLS), deaths, strict=False):
            gone = [(daemon, kill(daemon, number)) for daemon in (both, both[:1], both[1:])[count % 3]]
            for daemon, pid in gone:
                replaced(daemon, pid)
            requests.more(rng.randrange(1, 3))
    slowest_s = max(requests.failed_s, default=0)
    print(
        f"{KILLS} kills: {len(requests.right)} requests handed over, {requests.failed} failed, the slowest after"
        f" {slowest_s:.1f} s"
    )
    right(engines, requests)
    for pid in before:
        os.kill(pid, 0)
    assert engines.handover(prompt(240, seed=7)) == engines.alone(prompt(240, seed=7))
    assert engines.transfers()[-1].state == "done"
