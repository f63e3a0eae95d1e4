"""What kvferry is measured against: the same bytes, read with NIXL alone between two processes.

The best way NIXL has for a pool of equal blocks: one prepared list for each side, and indices. Both sides map the very
regions of the daemons: the same physical pages, whose placement decides as much as anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.memory import SharedRegion, open_file_region
from kvferryd.transport.binding import make_agent

Indices = npt.NDArray[np.int32]


@dataclass(slots=True)
class RawPair:
    """An initiator here over `local`, a target in a process of its own over another region of equal size."""

    agent: Any
    peer: str
    local: SharedRegion
    remote_address: int

    def read(self, run_nbytes: int, source: Indices, destination: Indices) -> float:
        """Seconds to read blocks of `run_nbytes` from `source` to `destination` indices, request and wait included."""
        local = self._pool("NIXL_INIT_AGENT", self.local.address, run_nbytes)
        remote = self._pool(self.peer, self.remote_address, run_nbytes)
        began = time.perf_counter()
        handle = self.agent.make_prepped_xfer("READ", local, destination, remote, source)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        for each in (handle, local, remote):
            each.release()
        return seconds

    def _pool(self, agent: str, address: int, run_nbytes: int) -> Any:
        rows = np.array([(address, run_nbytes, 0, run_nbytes, self.local.nbytes // run_nbytes)], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(agent, rows, "DRAM")


@contextlib.contextmanager
def raw_pair(source: SharedRegion, destination: SharedRegion) -> Iterator[RawPair]:
    """Start the target over `source`, connect to it from `destination`, and end it afterwards."""
    target = subprocess.Popen(  # noqa: S603  # this very module
        [sys.executable, "-m", "kvferryd.bench.raw", source.path, str(source.nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"},
    )
    assert target.stdout is not None
    try:
        told = json.loads(next(line for line in target.stdout if line.startswith("{")))
        agent = make_agent("raw-initiator", threads=0, ucx={})
        rows = np.array([(destination.address, destination.nbytes, 0)], dtype=np.uint64)
        registered = agent.register_memory(rows, "DRAM")
        peer = agent.add_remote_agent(bytes.fromhex(told["metadata"])).decode()
        yield RawPair(agent, peer, destination, told["address"])
        agent.remove_remote_agent(peer)
        agent.deregister_memory(registered)
    finally:
        target.kill()
        target.wait()


def _target(path: str, nbytes: int) -> None:
    region = open_file_region(path, nbytes)
    agent = make_agent("raw-target", threads=0, ucx={})
    agent.register_memory(np.array([(region.address, nbytes, 0)], dtype=np.uint64), "DRAM")
    told = {"metadata": agent.get_agent_metadata().hex(), "address": region.address}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the initiator ends


if __name__ == "__main__":
    _target(sys.argv[1], int(sys.argv[2]))
