"""Something has run out: memory to share, descriptors; or the clock of the wall jumps."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import Daemons
from lives import TP1
from remote import remote
from scene import COUNT, DIRECT, SMALL, TOKENS, Held, Scene, scened

from kvferry.errors import KvferryError

pytestmark = [pytest.mark.anyio, pytest.mark.long]
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
HOUR_S = 3600
ROOM = 1 << 17
"""Bytes that a file may have: less than one more engine wants, and more than a log has."""


@pytest.fixture(scope="module")
async def scene(daemons: Daemons) -> AsyncIterator[Scene]:
    async with scened(daemons, DIRECT) as scene:
        yield scene


async def test_memory_that_cannot_be_shared_any_more(scene: Scene, stack: AsyncExitStack) -> None:
    """A file in memory may not grow: an engine is refused by name, those that are there go on, and later it comes."""
    (daemon,) = scene.source.daemons
    before, limits = Held.of(daemon), resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (ROOM, limits[1]))
    try:
        for _ in range(3):
            with pytest.raises(KvferryError) as refused:
                await stack.enter_async_context(remote(daemon, "one-too-many", TP1))
            assert refused.value.code == "out_of_memory"
        await scene.serves()
    finally:
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, limits)
    await scene.at_rest()
    assert Held.of(daemon).regions == before.regions
    async with remote(daemon, "one-too-many", TP1):
        pass
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


@pytest.mark.skipif(FAKETIME is None, reason="jumps of the clock need libfaketime (a Debian package)")
@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forth", "back"])
async def test_the_clock_of_the_wall_jumps(
    daemons: Daemons, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jump_s: int
) -> None:
    """By an hour, in both daemons, while a request is read and others wait: deadlines and leases count on."""
    shown = tmp_path / "clock"
    shown.write_text("+0")
    with monkeypatch.context() as inherited:
        inherited.setenv("LD_PRELOAD", str(FAKETIME))
        inherited.setenv("FAKETIME_TIMESTAMP_FILE", str(shown))
        inherited.setenv("FAKETIME_NO_CACHE", "1")
        inherited.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        scene = await stack.enter_async_context(scened(daemons, DIRECT))
    waiting = await scene.published(SMALL, 30.0, COUNT - 1)
    scene.receive(waiting, ordered=False)
    request = scene.request(TOKENS - SMALL, 30.0)
    await scene.publish(request)
    created = (await scene.reader.routers[0].transfers(waiting.request_id))[0].created_at
    shown.write_text(f"{jump_s:+d}")
    scene.receive(request)
    await scene.ended(request)
    await scene.order(waiting)
    await scene.ended(waiting)
    assert (request.ends, waiting.ends) == (["done"], ["done"])
    jumped = (await scene.reader.routers[0].transfers(request.request_id))[0].created_at - created
    assert abs(jumped - jump_s) < HOUR_S / 2, "the daemon has not seen the clock jump"
    for each in (request, waiting):
        await scene.holds(each)
