"""Processes that stand still, or run step by step. They are continued, even if the test fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import warm

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


@contextmanager
def stepped(pid: int, runs_s: float = 0.001, *, group: bool = True) -> Iterator[Callable[[], None]]:
    """SIGSTOP as in `stopped`; each call of what this yields lets the process run for `runs_s` seconds. A fact that a
    test sees between two calls is still true at the next."""

    def step() -> None:
        _send(pid, signal.SIGCONT, group)
        time.sleep(runs_s)
        _stop(pid, group)

    with stopped(pid, group=group):
        yield step


def _stop(pid: int, group: bool) -> None:
    """The process first, then its group. A child that is stopped between vfork and exec holds up its parent, which
    then never stops."""
    os.kill(pid, signal.SIGSTOP)
    assert warm.stands_still(pid)
    if group:
        os.killpg(pid, signal.SIGSTOP)


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
