"""Shared memory with a name: what one of our processes made is taken away, and nothing else."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from kvferryd.run.shared import MEMORY, Watch, remove

MAKES = """\
import mmap, os, sys
path = "/dev/shm/" + sys.argv[1]
file = os.open(path, os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 4096)
mapped = mmap.mmap(file, 4096)
os.close(file)
print("made", flush=True)
sys.stdin.read()
"""


@contextmanager
def making(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has made this file, and has it open until the end."""
    command = [sys.executable, "-c", MAKES, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        yield process
        process.kill()


@pytest.fixture
def name(tmp_path: Path) -> Iterator[str]:
    name = f"kvferry-test-{tmp_path.name}"
    yield name
    (MEMORY / name).unlink(missing_ok=True)


@pytest.mark.parametrize("ours", [True, False])
def test_what_ours_made_is_taken_away(tmp_path: Path, name: str, ours: bool) -> None:
    made = set[int]()
    with closing(Watch(tmp_path, lambda: made)) as watch:
        with making(name) as process:
            if ours:
                made.add(process.pid)
            assert select.select([watch.fd], [], [], 10)[0]
            watch.made()
        remove(tmp_path)
    assert (MEMORY / name).exists() is not ours


def test_another_file_of_the_same_name_stays(tmp_path: Path) -> None:
    memory = SharedMemory(create=True, size=16)
    try:
        (tmp_path / memory.name).write_text("1")
        remove(tmp_path)
        assert (MEMORY / memory.name).exists()
    finally:
        memory.close()
        memory.unlink()
    remove(tmp_path / "not there")


def test_what_another_process_has_open_stays(tmp_path: Path, name: str) -> None:
    with making(name):
        (tmp_path / name).write_text(str((MEMORY / name).stat().st_ino))
        remove(tmp_path)
        assert (MEMORY / name).exists()
    remove(tmp_path)
    assert not (MEMORY / name).exists()
