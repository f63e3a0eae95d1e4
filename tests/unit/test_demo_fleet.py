"""Fleets on one host: the ports that they give out, and the processes that they signal."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.errors import KvferryError
from kvferryd.demo import fleet
from kvferryd.demo.fleet import Fleet, Service

SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]


def test_no_two_fleets_give_out_one_port_though_nobody_listens_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Fleet(tmp_path / "before")) as before:
        only = before.free_port()
    monkeypatch.setattr(fleet, "PORTS", range(only, only + 1))
    first, second = Fleet(tmp_path / "first"), Fleet(tmp_path / "second")
    try:
        assert first.free_port() == only
        with pytest.raises(KvferryError, match="no port"):
            second.free_port()
        first.close()
        assert second.free_port() == only
    finally:
        first.close()
        second.close()


def sleeper() -> subprocess.Popen[bytes]:
    """In a group of its own."""
    return subprocess.Popen(SLEEPS, start_new_session=True)


@pytest.mark.parametrize("end", ["signal", "close"])
def test_a_number_that_another_process_has_by_now_is_not_signalled(tmp_path: Path, end: str) -> None:
    fleet, ended, other = Fleet(tmp_path), sleeper(), sleeper()
    service = Service("ended", "", "", ended, tmp_path / "log")
    fleet.services.append(service)
    ended.kill()
    ended.wait()
    ended.pid = other.pid
    try:
        if end == "signal":
            service.signal(signal.SIGKILL)
        fleet.close()
        other.send_signal(signal.SIGTERM)
        assert other.wait(60) == -signal.SIGTERM, "SIGKILL was for the one before"
    finally:
        other.kill()
        other.wait()
        fleet.close()


def test_what_a_process_leaves_behind_in_its_group_ends_with_the_fleet(tmp_path: Path) -> None:
    left = "import os, subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", left, *SLEEPS], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    fleet = Fleet(tmp_path)
    fleet.services.append(Service("parent", "", "", parent, tmp_path / "log"))  # type: ignore[arg-type]  # its text
    assert fleet.services[0].until_ended(60)
    fleet.close()
    poll = select.poll()
    poll.register(child, select.POLLIN)
    assert poll.poll(60_000), "the child has ended"
    os.close(child)
