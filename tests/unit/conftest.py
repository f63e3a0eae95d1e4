"""Every test of this folder ends what it begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from stepped import stepping
from stepwise import World

ENDING_S = 10.0
"""How long a task that is about to end may take for it."""


@pytest.fixture(autouse=True)
def ends_what_it_begins(request: pytest.FixtureRequest) -> None:
    if "anyio_backend" in request.fixturenames:
        request.getfixturevalue("no_task_goes_on")


@pytest.fixture
async def no_task_goes_on() -> AsyncIterator[None]:
    """A task that a test forgets would end, with its error, in whichever test has the loop by then."""
    before = tasks()
    yield
    if left := tasks() - before:
        await asyncio.wait(left, timeout=ENDING_S)
    assert tasks() <= before, "the test leaves tasks"


@pytest.fixture
def world() -> Iterator[World]:
    """A world that takes one step at a time."""
    with stepping() as world:
        yield world


def tasks() -> set[asyncio.Task[Any]]:
    """All of this loop, without those of anyio that run tests and fixtures."""
    return {task for task in asyncio.all_tasks() if "TestRunner." not in getattr(task.get_coro(), "__qualname__", "")}
