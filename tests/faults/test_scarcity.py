"""Something has run out: memory to share, descriptors; or the clock of the wall jumps."""

from __future__ import annotations

import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, refusal
from lives import TP1
from ranks import TestEngine
from scene import DIRECT, SMALL, Held, Scene, gauge_of, scened

pytestmark = [pytest.mark.anyio, pytest.mark.long]
HOUR_S = 3600
ROOM = 1 << 17
"""Bytes that a file may have: less than one more engine wants, and more than a log has."""


@pytest.fixture(scope="module")
async def scene(daemons: Daemons) -> AsyncIterator[Scene]:
    async with scened(daemons, DIRECT) as scene:
        yield scene


async def test_memory_that_cannot_be_shared_any_more(scene: Scene) -> None:
    """A file in memory may not grow: an engine is refused by name, those that are there go on, and later it comes."""
    (daemon,) = scene.source.daemons
    before, limits = Held.of(daemon), resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (ROOM, limits[1]))
    try:
        for _ in range(3):
            assert (await refusal(TestEngine.start("one-too-many", [daemon], TP1))).code == "out_of_memory"
        await scene.serves()
    finally:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, limits)
    await scene.at_rest()
    assert Held.of(daemon).regions == before.regions
    await (await TestEngine.start("one-too-many", [daemon], TP1)).close()
    await scene.at_rest()


async def test_descriptors_that_are_used_up(scene: Scene, record_property: Callable[[str, object], None]) -> None:
    """At either end in turn: what is under way goes on, what is new fails or waits, and nothing is left of it."""
    ends = set()
    for side in scene.sides:
        (daemon,) = side.daemons
        limits = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (Held.of(daemon).files, limits[1]))
        try:
            requests = [scene.request(SMALL, 5.0, block) for block in range(8)]
            for request in requests:
                await scene.publish(request)
                scene.receive(request)
            for request in requests:
                await scene.ended(request)
                ends |= set(request.ends)
            assert await side.routers[0].healthy()
        finally:
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, limits)
        for request in requests:
            await scene.settled(request)
        await scene.serves()
        await scene.at_rest()
    record_property("seen", ["descriptors used up", ", ".join(sorted(ends)), "", ""])


async def test_the_clock_of_the_wall_jumps(
    daemons: Daemons, stack: AsyncExitStack, jump: Callable[[int], None], record_property: Callable[[str, object], None]
) -> None:
    """Hours forth and back, on both sides, in every state that lasts: deadlines and leases count on."""
    scene = await stack.enter_async_context(scened(daemons, DIRECT))
    for state, ahead_s in (("waiting", HOUR_S), ("reading", 0), ("connecting", -HOUR_S), ("reading", HOUR_S)):
        async with scene.brought(state, 30.0) as request:
            jump(ahead_s)
            await request.goes_on()
            if state == "waiting":
                assert await gauge_of(scene.reader.daemons[0], "queue_oldest_seconds") < HOUR_S / 2, "it has just come"
                await scene.order(request)
            elif state == "connecting":
                await scene.publish(request)
            await scene.ended(request)
        assert request.ends == ["done"], request.said
        await scene.holds(request)
        (record,) = await scene.reader.routers[0].transfers(request.request_id)
        assert record.ended_at is not None
        lasted_ms = 1e3 * (record.ended_at - record.created_at)
        assert lasted_ms == pytest.approx(record.phases_ms["total"], abs=1e3), "the record contradicts itself"
        said_s = max(record.created_at for record in await scene.reader.routers[0].transfers(limit=1))
        assert abs(said_s - time.time() - ahead_s) < HOUR_S / 2, "the daemon has not seen the clock jump"
    record_property("seen", ["the clock jumps by an hour or two", "done", "", ""])
