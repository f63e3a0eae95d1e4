"""The two processes of `kvferry run`: whichever is ended, and when, the other one takes away what was made."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvferryd.run import family

PLANS = """\
import os, shutil, signal, sys
from kvferryd.run.family import guarded

def work(folder):
    print(folder, os.getpid(), flush=True)
    signal.pause()
    return 0

sys.exit(guarded("kvferry-test-", work, lambda folder: shutil.rmtree(folder, ignore_errors=True)))
"""


@contextmanager
def planning(before: Callable[[], object] | None = None) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """The first process, the folder, and the number of the second, which has not begun to handle signals."""
    with subprocess.Popen([sys.executable, "-c", PLANS], stdout=subprocess.PIPE, text=True, preexec_fn=before) as first:
        try:
            assert first.stdout is not None
            folder, second = first.stdout.readline().split()
            assert Path(folder).is_dir()
            yield first, Path(folder), int(second)
        finally:
            first.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_planning_leaves_no_folder(number: signal.Signals) -> None:
    with planning() as (first, folder, _):
        first.send_signal(number)
        assert first.wait(30) == 128 + number
        assert not folder.exists()


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_process_that_is_killed_during_planning_leaves_no_folder(which: str) -> None:
    with planning() as (first, folder, second):
        other = psutil.Process(second)
        os.kill(first.pid if which == "first" else second, signal.SIGKILL)
        first.wait(30)
        other.wait(30)
        assert not folder.exists()


def test_nohup_keeps_it_from_the_end_of_its_terminal() -> None:
    with planning(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (first, folder, _):
        first.send_signal(signal.SIGHUP)
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 128 + signal.SIGTERM
        assert not folder.exists()


UNKILLABLE = """\
import os, sys
from kvferryd.run import family
family.CLEANS_S = family.DIES_S = 0.05
if os.fork() == 0:
    print(sorted(family.end(lambda: {1}, 0.0)), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_process_that_the_kernel_does_not_end_is_given_up() -> None:
    """The first process of a PID namespace cannot be killed from within."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces")
    command = [*apart, sys.executable, "-c", UNKILLABLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "[1]\n", done.stderr


def test_what_is_deaf_is_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and select.select([process.stdout], [], [], 30)[0]
        left = family.end(lambda: {process.pid} if process.poll() is None else set(), 0.0)
        assert (left, process.wait()) == (set(), -signal.SIGKILL)


def test_whoever_looks_takes_no_status_of_a_child_away() -> None:
    with subprocess.Popen(["false"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.pid not in family.living(os.getpid())
        family.reap(spared={process.pid})
        assert process.wait() == 1


def test_orphans_that_have_ended_are_reaped() -> None:
    with subprocess.Popen(["false"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        family.reap(spared=set())
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
        process.returncode = 1
