"""An engine is dead when its process is dead, whatever children of it still hold its sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import TIMEOUT_S, Daemons, until
from lives import engine_on
from ranks import Kv

from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferryd.demo.fleet import DaemonService

pytestmark = pytest.mark.anyio
FORKING = Path(__file__).parent / "forking_engine.py"


async def forked(
    daemon: DaemonService, stack: AsyncExitStack, request_id: str
) -> tuple[asyncio.subprocess.Process, int]:
    """An engine that has published, and its helper's process id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, FORKING, str(daemon.socket), "forker", "1", request_id, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    helper = int(await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S))
    stack.callback(os.kill, helper, signal.SIGKILL)
    return process, helper


async def test_an_engine_that_is_killed_beside_its_forked_helper_is_gone_and_may_come_back(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,), (reader_daemon,) = await asyncio.gather(daemons.start("forking"), daemons.start("reading"))
    router = await stack.enter_async_context(RouterClient(daemon.url))
    reader, _ = await engine_on(stack, "reader", reader_daemon)
    process, helper = await forked(daemon, stack, request_id)
    assert (await router.ready()).ready
    process.kill()

    async def detached() -> bool:
        return not (await router.ready()).ready and not any(engine.attached for engine in await router.engines())

    await until(detached, "the daemon sees the engine's death")
    # It is known to be dead: what it published is whole and stays readable.
    await reader.gets(request_id, Kv.random(50, seed=1), source=SourceBody(engine_id="forker", address=daemon.peer))
    os.kill(helper, 0)  # the helper has lived all the time
    again, _ = await engine_on(stack, "forker", daemon)
    assert (await router.ready()).ready
    assert [engine.epoch for engine in await router.engines()] == [again.epoch]


@pytest.mark.slow
async def test_the_successor_of_a_killed_engine_is_admitted_at_once(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("admitting")
    process, helper = await forked(daemon, stack, request_id)
    process.kill()
    await process.wait()
    again, router = await engine_on(stack, "forker", daemon)
    assert [engine.epoch for engine in await router.engines()] == [again.epoch]
    os.kill(helper, 0)
