"""Fixtures that the fuzzing tests share. Every case is made from one seed, which pytest prints first: FUZZ_SEED=N
repeats a run.

`hostile.py` makes messages, `target.py` is the daemon under attack, with the common check that follows every test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fleet import Daemons
from target import Target, answering, target_of


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
