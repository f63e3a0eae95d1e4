"""A line that is slow, and a reader that is slower than the time to live of what it reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from fleet import Daemons, until
from hosts import Host, host
from pair import is_in, waits_for
from scene import APART, TOKENS, Request, Scene, scened

from kvferry.schemas import Awaited, TransferState

pytestmark = [pytest.mark.anyio, pytest.mark.long]
RATE = "120mbit"
"""28 MB take two seconds."""


@pytest.fixture(scope="module")
def far() -> Iterator[Host]:
    with host() as far:
        yield far


@pytest.fixture(scope="module")
async def scene(daemons: Daemons, far: Host) -> AsyncIterator[Scene]:
    async with scened(daemons, APART, far) as scene:
        yield scene


async def published_to_a_reader(scene: Scene, request: Request, ttl_s: float) -> float:
    """Its reader is there first: the time to live does not count until then. When it was published."""
    scene.receive(request)
    router = scene.reader.routers[0]
    await until(lambda: waits_for(router, request.request_id, Awaited.PUBLISH), "the source knows of its reader")
    began = time.monotonic()
    await scene.publish(request, ttl_s=ttl_s)
    return began


async def test_a_lease_lives_as_long_as_its_slowest_reader(
    scene: Scene, far: Host, record_property: Callable[[str, object], None]
) -> None:
    """Its time to live is a tenth of what the read takes."""
    request = scene.request(TOKENS, 30.0)
    with far.slow(RATE):
        began = await published_to_a_reader(scene, request, ttl_s=0.2)
        await scene.ended(request)
        took = time.monotonic() - began
    assert request.ends == ["done"]
    await scene.holds(request)
    record_property("seen", [f"a line of {RATE}, ttl 0.2 s", "done", f"(the read took {took:.2f})", ""])


async def test_a_read_that_is_too_slow_ends_by_its_deadline_and_its_blocks_later(
    scene: Scene, far: Host, record_property: Callable[[str, object], None]
) -> None:
    request = scene.request(TOKENS, 0.7)
    with far.slow(RATE):
        await scene.publish(request)
        began = time.monotonic()
        scene.receive(request)
        await scene.ended(request)
        noticed = time.monotonic()
        assert request.ends == ["deadline"]
        await scene.holds(request)
    row = [
        f"a line of {RATE}, deadline 0.7 s",
        "deadline",
        f"{noticed - began:.2f}",
        f"{time.monotonic() - noticed:.2f}",
    ]
    record_property("seen", row)


async def test_a_reader_that_stands_still_past_the_ttl_is_not_read_into_what_the_source_has_reused(
    scene: Scene, far: Host
) -> None:
    """The reader's host is cut off in the middle of a read until the lease has ended and its blocks hold other KV."""
    request = scene.request(TOKENS, 60.0)
    with far.slow(RATE):
        await published_to_a_reader(scene, request, ttl_s=0.5)
        router = scene.reader.routers[0]
        await until(lambda: is_in(router, request.request_id, TransferState.READING), "it reads")
        far.vanish()
        assert await asyncio.wait_for(scene.source.engines[0].ended(request.request_id), 60) == "expired"
        await scene.source.engines[0].write(request.blocks, TOKENS, request.seed + 1)
        far.come_back()
        await scene.ended(request)
    assert request.ends != ["done"]
    await scene.holds(request)
