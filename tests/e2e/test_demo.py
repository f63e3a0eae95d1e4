"""`kvferry demo`: what it shows is true, and nothing of it outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "kvferryd.demo"]


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its name is short: sockets lie in it."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path)}


def processes_of(directory: Path) -> Iterator[str]:
    """Command lines of live processes that work below this directory."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(str(directory)) and (command := process.cmdline()):
                yield " ".join(command)


def eventually_none(directory: Path) -> list[str]:
    deadline = time.monotonic() + 60
    while left := list(processes_of(directory)):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


@pytest.mark.slow
def test_every_token_of_the_demo_equals_that_of_a_single_engine(tmp_path: Path, environment: dict[str, str]) -> None:
    demo = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=280)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "all 143 tokens of 13 prompts equal those of a single engine" in demo.stdout
    rows = {words[0]: words for line in demo.stdout.splitlines() if (words := line.split()) and "-" in words[0]}
    assert sum(words[-1] == "done" for words in rows.values()) == 13
    assert rows["demo-4"][1:4] == ["282", "192", "90"]  # 205 shared tokens are 8 whole blocks of 24
    assert not list(tmp_path.iterdir())
    assert not eventually_none(tmp_path)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_nothing_outlives_a_demo_that_is_ended(
    number: signal.Signals, status: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "daemons are up" in line:
                break
        assert len(list(processes_of(tmp_path))) > 6
        demo.send_signal(number)
        assert demo.wait(60) == status
    assert not eventually_none(tmp_path)


def test_a_demo_past_its_deadline_fails_and_shows_the_logs(tmp_path: Path, environment: dict[str, str]) -> None:
    demo = subprocess.run([*COMMAND, "--deadline", "2.5"], env=environment, capture_output=True, text=True, timeout=280)
    assert demo.returncode == 1
    assert "the demo was not over after 2.5 s" in demo.stdout
    assert "prefill-0.log" in demo.stdout
    (kept,) = tmp_path.iterdir()
    assert f"logs are in {kept}" in demo.stdout
    assert not eventually_none(tmp_path)
