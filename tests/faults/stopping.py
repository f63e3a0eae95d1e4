"""Processes that stand still, or nearly. Whatever happens to the test, they are continued."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

CONTINUE = 'read -r _; kill -CONT "$0"'
"""Ends when our end of its stdin is closed: by us, or by the kernel when we are killed."""


@contextmanager
def stopped(pid: int, *, group: bool = True) -> Iterator[None]:
    """SIGSTOP for a child of this process (and its group), SIGCONT at the end, also when the tests are killed.

    It stands still before the block begins: the kernel has said so.
    """
    with _continued(pid, group):
        _stop(pid, group)
        yield


@asynccontextmanager
async def slowed(
    pid: int, runs_s: float = 0.002, stands_s: float = 0.05, *, group: bool = True
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Inside the block the process runs for `runs_s` and then stands still for `stands_s`, again and again; once what
    this yields was awaited, it stands still until the end of the block."""

    async def slow() -> None:
        while True:
            _send(pid, signal.SIGSTOP, group)
            await asyncio.sleep(stands_s)
            _send(pid, signal.SIGCONT, group)
            await asyncio.sleep(runs_s)

    with _continued(pid, group):
        slowing = asyncio.create_task(slow())

        async def stand() -> None:
            slowing.cancel()
            await asyncio.wait([slowing])
            _stop(pid, group)

        try:
            yield stand
        finally:
            slowing.cancel()
            await asyncio.wait([slowing])


def _stop(pid: int, group: bool) -> None:
    _send(pid, signal.SIGSTOP, group)
    assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED


@contextmanager
def _continued(pid: int, group: bool) -> Iterator[None]:
    target = str(-pid if group else pid)
    guard = subprocess.Popen(["sh", "-c", CONTINUE, target], stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait(60)


def _send(pid: int, number: signal.Signals, group: bool) -> None:
    (os.killpg if group else os.kill)(pid, number)
