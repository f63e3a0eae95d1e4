"""Threads of the daemon that do one thing after another."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.errors import Internal
from kvferryd.aio import Worker, made_on, submit

pytestmark = pytest.mark.anyio


async def test_what_cannot_be_ended_does_not_end_the_thread() -> None:
    """A mapping that the driver does not give up, for example: what comes after it is done all the same."""
    worker, going = Worker("test"), threading.Event()

    def end(_: None) -> None:
        raise Internal("cuda_failed", "it stays")

    making = asyncio.create_task(made_on(worker.put, lambda: going.wait(60) and None, end))
    await asyncio.sleep(0)
    making.cancel()
    await asyncio.wait([making])
    going.set()
    async with asyncio.timeout(10):
        assert await submit(worker.put, lambda: 1, lambda error: Internal("internal", str(error))) == 1
    assert await worker.close(10)
