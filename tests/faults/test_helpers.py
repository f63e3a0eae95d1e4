"""The faults that these tests make are real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fleet import TIMEOUT_S, Daemons, until
from hosts import Host, daemons_apart
from lives import TP1, engine_on, reads_from
from ranks import Blocks, Kv
from remote import remote
from wire import NBYTES, TOKENS, tcp_pair

from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError

pytestmark = pytest.mark.anyio


KILLED = """
import os, signal, subprocess
from stopping import stopped
sleeper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, start_new_session=True)
stopped(sleeper.pid).__enter__()
print(sleeper.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_stopped_process_goes_on_even_when_the_test_is_killed() -> None:
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, cwd=Path(__file__).parents[1], stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(killed.communicate(), TIMEOUT_S)
    sleeper = int(output)

    async def goes_on() -> bool:
        return psutil.Process(sleeper).status() == psutil.STATUS_SLEEPING

    try:
        await until(goes_on, "the process is continued")
    finally:
        os.kill(sleeper, signal.SIGKILL)


@pytest.mark.slow
async def test_over_tcp_a_stopped_source_leaves_a_read_in_flight(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    pair = await stack.enter_async_context(tcp_pair(daemons, "helpers"))
    blocks = pair.reader.take(TOKENS)
    expected = pair.reader.snapshot()

    def receive(published: str) -> Coroutine[Any, Any, object]:
        return pair.reader.receive(published, blocks, source=pair.source.source())

    async with pair.stopped_in_mid_read(request_id, receive) as read:
        pair.reader.write_into(expected, read.kv, blocks)
        await pair.reader.ranks[0].client.abort(read.request_id)
        with pytest.raises(TransferFailed) as failed:
            await read.receiving
        assert await pair.quarantined() >= NBYTES
        safe = asyncio.create_task(failed.value.quiesced())
        await pair.reader_router.transfers()  # the daemon has had time to say so
        assert not safe.done()
    await asyncio.wait_for(safe, TIMEOUT_S)
    assert await pair.quarantined() == 0
    assert not pair.reader.differences(expected)  # given up, and yet it has arrived


@pytest.mark.slow
async def test_a_host_vanishes_with_its_daemon_and_comes_back(
    daemons: Daemons, far: Host, stack: AsyncExitStack, request_id: str
) -> None:
    near, remote = await daemons_apart(daemons, far, "apart")
    source, reader = [await engine_on(stack, daemon.name, daemon) for daemon in (remote, near)]
    await reads_from(reader[0], source[0], request_id)

    async with httpx.AsyncClient(base_url=remote.url, trust_env=False, timeout=TIMEOUT_S) as http:
        far.vanish()
        with pytest.raises(httpx.TimeoutException):
            await http.get("/healthz", timeout=0.2)
        far.come_back()
        assert (await http.get("/healthz")).is_success


async def test_an_engine_in_another_process_does_as_it_is_told(
    daemons: Daemons, stack: AsyncExitStack, request_id: str
) -> None:
    (daemon,) = await daemons.start("told")
    source = await stack.enter_async_context(remote(daemon, "told", TP1))
    blocks = Blocks((3, 1, 4, 15), 9)
    await source.publish(request_id, blocks, 50, seed=1)
    reader, _ = await engine_on(stack, "reader", (await daemons.start("reader"))[0])
    await reader.gets(request_id, Kv.random(50, seed=1), source=source.source())
    assert await source.ended(request_id) == "released"
    assert await source.differs(blocks, 50, seed=1) == ""
    assert await source.differs(blocks, 50, seed=2)
    with pytest.raises(KvferryError, match="no such way"):
        await source.receive(request_id, blocks, source.source(), way="sideways")
