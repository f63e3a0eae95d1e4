"""The process in which `kvferryd.transport.metadata` has peers' metadata loaded: it may die of it.

It imports next to nothing: a handshake waits for its start.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

READY, ASKED, FINE, LATE = "ready", "asked", "fine", "late"
SAID = 400
"""Characters of what NIXL says."""


def main() -> None:
    """The process. A line of stdin names peers to try; of what stdout was, one line says that they will be tried, and
    the next what came of each. Ends with stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its daemon's terminal is its own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NIXL writes to stdout
    import numpy as np

    from kvferryd.transport.nixl import make_agent, read_first, rehearse

    agent = make_agent(f"screen-{os.getpid()}", threads=0)
    landing = np.zeros(1, dtype=np.uint8)
    own = np.array([(landing.ctypes.data, 1, 0)], dtype=np.uint64)
    agent.register_memory(own, "DRAM")
    rehearse(agent, own)
    answers.write(f"{READY}\n")
    for line in sys.stdin:
        answers.write(f"{ASKED}\n")
        wait_s, peers = json.loads(line)
        blobs = {alias: blob for alias, blob, _ in peers}  # two engines here may meet the same peer
        said = {alias: _load(agent, alias, blob) for alias, blob in blobs.items()}
        far = [(alias, np.array([row], dtype=np.uint64)) for alias, _, rows in peers for row in rows]
        far = [(alias, row) for alias, row in far if said[alias] == FINE]
        for alias, error in read_first(agent, own, far, wait_s).items():
            said[alias] = LATE if isinstance(error, TimeoutError) else _said(error)
        for alias in [alias for alias, about in said.items() if about == FINE]:
            agent.remove_remote_agent(alias)
        answers.write(json.dumps([said[alias] for alias, _, _ in peers]) + "\n")


def _load(agent: Any, alias: str, blob: str) -> str:
    try:
        agent.add_remote_agent(bytes.fromhex(blob))
    except Exception as error:  # noqa: BLE001  NIXL's errors are RuntimeErrors of its own
        return _said(error)
    return FINE


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}"[:SAID]


if __name__ == "__main__":
    main()
