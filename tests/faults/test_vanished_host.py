"""A host vanishes: nothing comes back, not even a reset."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import pytest
from fleet import Daemons
from hosts import Host
from scene import APART, Scene, scened

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def scene(daemons: Daemons, far: Host) -> AsyncIterator[Scene]:
    async with scened(daemons, APART, far) as scene:
        yield scene


async def test_a_host_that_vanishes_in_the_middle_of_a_read_is_missed_long_before_the_deadline(
    scene: Scene, far: Host, record_property: Callable[[str, object], None]
) -> None:
    async with scene.brought("reading", 60.0) as request:
        far.vanish()
        await request.goes_on()
        began = time.monotonic()
        await scene.ended(request)
        noticed = time.monotonic()
        far.come_back()
    assert set(request.ends) <= {"peer_lost", "peer_unreachable"}, request.ends
    await scene.holds(request)
    row = ["a host vanishes in the middle of a read", request.ends[0]]
    record_property("seen", [*row, f"{noticed - began:.2f}", f"{time.monotonic() - noticed:.2f}"])
