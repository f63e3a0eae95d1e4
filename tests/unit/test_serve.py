"""A daemon's process: the path of its engine socket, memory that it has freed, and its exit status."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferryd.process.serve import _claim
from support import refused


def stays(path: Path, why: str) -> None:
    with refused("bad_config", field="engine_socket", value=str(path)) as caught:
        _claim(path)
    assert caught.value.remedy and why in caught.value.message


def test_a_folder_is_made_for_it(tmp_path: Path) -> None:
    _claim(tmp_path / "run" / "kvferry" / "s")
    assert list((tmp_path / "run" / "kvferry").iterdir()) == []


def test_a_socket_that_nobody_serves_any_more_is_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    _claim(tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_somebody_serves_stays(kind: socket.SocketKind, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, kind) as served:
        served.bind(str(tmp_path / "s"))
        if kind is socket.SOCK_STREAM:
            served.listen()
        stays(tmp_path / "s", "")
        assert (tmp_path / "s").exists()


def test_a_file_a_folder_and_a_link_stay(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.write_text("precious")
    folder.mkdir()
    link.symlink_to(file)
    for path in (file, folder, link):
        stays(path, "no socket")
    assert file.read_text() == "precious"
    assert folder.is_dir()
    assert link.is_symlink()


# ---- memory that the process has freed: kept while there is work, and given back when there is none ----


KEPT = """
import asyncio, itertools, re, sys
from pathlib import Path
import numpy as np
from kvferryd.process import heap

def own_mb():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

async def main(busy):
    heap.IDLE_S = 0.01
    ends = itertools.count(1)
    done = lambda: 0 if not worked else next(ends) if busy else 1
    worked = []
    giving = asyncio.create_task(heap.give_back(done))
    await asyncio.sleep(0)
    worked.append(True)
    deadline = asyncio.get_running_loop().time() + (0.5 if busy else 30)
    while own_mb() > full - 50 and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    giving.cancel()

heap.keep()
arrays, above = [], []
for _ in range(400):  # what stays lies above what goes, so that glibc itself cannot hand that back
    arrays.append(np.ones(1 << 18, dtype=np.uint8))
    above.append(np.ones(1 << 10, dtype=np.uint8))
full = own_mb()
del arrays
assert own_mb() > full - 10, "glibc keeps it"
asyncio.run(main(sys.argv[1] == "busy"))
print(full - own_mb())
"""


def given_back_mb(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", KEPT, how], check=True, capture_output=True, timeout=120).stdout)


def test_what_is_kept_goes_back_when_nothing_ends_any_more() -> None:
    assert given_back_mb("idle") > 80


def test_it_is_kept_while_work_goes_on_ending() -> None:
    assert given_back_mb("busy") < 10


# ---- a process that has loaded NIXL ends with the status that it means ----


ENDS = """
import ctypes, sys
from kvferryd.transport import nixl
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # as a destructor of a library does that crashes
nixl.load()
nixl.load()
print("all is written")
sys.exit(7)
"""


def test_a_destructor_that_crashes_takes_nothing_from_a_process_that_ended_well() -> None:
    """If the system has a libibverbs of its own, NIXL's copy of libnl crashes beside the system's as it is unloaded:
    each daemon that was stopped would end with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (7, "all is written\n"), done.stderr
