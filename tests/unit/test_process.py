"""The process at the other end of a socket is watched, also from another PID namespace."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry import process
from kvferry.process import Process, credentials

APART = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
WATCHER = """
import select, socket, sys
from kvferry import process
process.SO_PEERPIDFD = int(sys.argv[2])
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    print("listens", flush=True)
    connection, _ = listening.accept()
    peer = process.Process.at(connection)
    print(process.credentials(connection)[0], peer is not None and not peer.dead, flush=True)
    if peer is not None:
        select.select([peer._file], [], [])
        print("dead", peer.dead, flush=True)
"""
"""As a daemon in a pod of its own."""
ENGINE = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"


@contextlib.contextmanager
def watched(folder: Path, option: int) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """(the watcher, which has a PID namespace of its own; the process that has connected to it)"""
    if subprocess.run([*APART, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces")
    path = str(folder / "s")
    command = [*APART, sys.executable, "-c", WATCHER, path, str(option)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        try:
            assert watcher.stdout.readline() == "listens\n"
            with subprocess.Popen([sys.executable, "-c", ENGINE, path], stdin=subprocess.PIPE, text=True) as engine:
                try:
                    yield watcher, engine
                finally:
                    engine.kill()
        finally:
            watcher.kill()


def there() -> bool:
    """Whether this kernel tells who is at the other end, whatever its namespace."""
    one, other = socket.socketpair()
    with one, other, contextlib.suppress(OSError):
        os.close(one.getsockopt(socket.SOL_SOCKET, process.SO_PEERPIDFD))
        return True
    return False


@pytest.mark.skipif(not there(), reason="this kernel has no SO_PEERPIDFD (Linux 6.5)")
def test_the_end_of_a_process_is_seen_from_another_pid_namespace(tmp_path: Path) -> None:
    with watched(tmp_path, process.SO_PEERPIDFD) as (watcher, engine):
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "0 True\n", "its number means nothing there"
        engine.kill()
        assert watcher.stdout.readline() == "dead True\n"


def test_a_kernel_that_cannot_say_names_nobody(tmp_path: Path) -> None:
    """Its stream tells the end of the process then. An option that no kernel has stands for one that this one lacks."""
    with watched(tmp_path, 9999) as (watcher, _):
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "0 False\n"


def test_within_a_namespace_the_number_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SO_PEERPIDFD", 9999)
    one, other = socket.socketpair()
    with one, other:
        peer = Process.at(one)
        assert peer is not None and not peer.dead and credentials(one)[0] == os.getpid()
        peer.close()
