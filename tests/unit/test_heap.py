"""Memory that a process has freed: kept while there is work, and given back when there is none."""

from __future__ import annotations

import subprocess
import sys

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
