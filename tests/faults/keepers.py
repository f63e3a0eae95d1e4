"""Daemons under keepers: which process serves, how it dies, and the code that they are upgraded from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvferryd.demo.fleet import DaemonService

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


def serving(daemon: DaemonService) -> int:
    """The process that serves now, as it says in the log. A line may be cut: another process writes there too. The
    first is waited for: a keeper knows of it, and starts another that stands by, before it is written."""

    def said() -> list[str]:
        return re.findall(r'"pid": (\d+),.* "event": "serving"', daemon.log.read_text())

    eventually(said, "the daemon says that it serves")
    return int(said()[-1])


def kill(daemon: DaemonService, number: signal.Signals) -> int:
    """Under a keeper; the process that was killed."""
    pid = serving(daemon)
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, number)
    return pid


def lives(pid: int) -> bool:
    """False of one that has ended, whether or not its parent has asked how."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(daemon: DaemonService) -> set[int]:
    """Children of a keeper: those that live, whether or not it has asked how the others ended."""
    return {each.pid for each in psutil.Process(daemon.process.pid).children() if lives(each.pid)}


def eventually(holds: Callable[[], object], what: str) -> None:
    """For what another process does without telling."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def before_this(folder: Path) -> Path:
    """The code of the commit before, or of the release before where there is no history."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD^", "daemon", "clients"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"needs the commit before: {archive.stderr.decode().strip()}")
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    return folder


def path_of(code: Path) -> str:
    """PYTHONPATH for this code. Entries of it stay: they may name the packages that the code needs."""
    return os.pathsep.join(filter(None, [str(code / "clients"), str(code / "daemon"), os.environ.get("PYTHONPATH")]))
