"""Waiting for a drain costs as much for each end as one end does, however much is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from stepped import Daemon, manifest_of, stepping

LEASES, ENDS, WAITERS = 300, 40, 4


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_end_during_a_drain_starts_no_work_for_what_is_left(cancelled: bool) -> None:
    with stepping() as world:
        daemon = Daemon(world, "10.0.0.1:1", manifest_of("drained", heads=1), {0: "10.0.0.1:1"})
        loop, ferry, leases = world.loop, daemon.ferry, daemon.engine.leases
        for number in range(LEASES):
            daemon.publish(f"r{number}", range(1, 3))
        begun = 0

        def counted(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
            nonlocal begun
            begun += 1
            return asyncio.Task(work, loop=loop, **more)

        async def wait() -> bool:
            return (await ferry.drain(1000.0, "a test")).drained

        waiting = [loop.call(asyncio.ensure_future, wait()) for _ in range(WAITERS)]
        loop.settle()
        loop.set_task_factory(counted)
        for number in range(ENDS):
            loop.call(leases.revoke, f"r{number}", "a test")
            loop.settle()
        assert begun < ENDS * (WAITERS + 4), "work for every lease that is left"
        assert not any(each.done() for each in waiting)
        if cancelled:
            loop.call(ferry.cancel_drain, "a test")
        else:
            for number in range(ENDS, LEASES):
                loop.call(leases.revoke, f"r{number}", "a test")
        loop.settle()
        assert [each.result() for each in waiting] == [not cancelled] * WAITERS
