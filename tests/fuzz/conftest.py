"""Fixtures that the fuzzing tests share. Every case is made from one seed, which pytest prints first: FUZZ_SEED=N
repeats a run.

`hostile.py` makes messages, `target.py` is the daemon under attack, with the common check that follows every test.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import pytest
from fleet import Daemons
from target import Target, answering, target_of

from kvferryd.demo.fleet import Fleet


@pytest.fixture(scope="module")
async def daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Daemons]:
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield Daemons(fleet)


@pytest.fixture(scope="module")
async def target(daemons: Daemons) -> AsyncIterator[Target]:
    async with target_of(daemons) as target:
        yield target


@pytest.fixture
async def attacked(target: Target) -> AsyncIterator[Target]:
    """The target, of which the common check holds afterwards, whatever a test has done to it."""
    target.said.clear()
    async with answering(target):
        yield target
    print("answers:", dict(target.said.most_common()))
    await target.unharmed()
