"""A process that has loaded NIXL ends with the status that it means."""

from __future__ import annotations

import subprocess
import sys

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
