"""The protocol's machines in runs that nobody has tried before, and faults that the simulator has to find.

`STEPWISE_SEED=N` draws the same runs again; `make simulate SEED=n` plays one of them and prints its transcript.
"""

from __future__ import annotations

import os

import pytest
from planted import PLANTED
from simulate import Found, for_seconds, played
from source_world import World

SEED = int(os.environ["STEPWISE_SEED"])
SECONDS = 5.0
MOST = 10_000
"""Seeds that a planted fault is looked for in."""


def test_whatever_happens_all_holds() -> None:
    found = for_seconds(SEED, SECONDS)
    print(found)
    assert not found.kinds, found
    assert found.ends["done"] > found.runs, found


def test_a_run_is_the_same_again() -> None:
    transcripts = [list[str](), list[str]()]
    for lines in transcripts:
        World(SEED, told=lines.append).run()
    assert transcripts[0] == transcripts[1] != []


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_broken_on_purpose_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kind, name, broken = PLANTED[fault]
    monkeypatch.setattr(kind, name, broken)
    found = Found()
    while not found.kinds and found.runs < MOST:
        played(found.runs, found)
    assert found.kinds
    ((why, seed),) = found.kinds.items()
    print(f"seed {seed}: {why}")
    monkeypatch.undo()
    assert not played(seed, Found())
