"""The process in which `kvferryd.transport.metadata` has peers' metadata loaded: it may die of it.

It imports next to nothing: a handshake waits for its start.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import Any

READY, FINE = "ready", "fine"
READ_S = 5.0
POLL_S = 1e-3


def main() -> None:
    """The process: a question per line of stdin, an answer per line of what stdout was. Ends with its stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its daemon's terminal is its own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NIXL writes to stdout
    import numpy as np

    from kvferryd.nixl import make_agent

    agent = make_agent(f"screen-{os.getpid()}", threads=0)
    landing = np.zeros(1, dtype=np.uint8)
    own = np.array([(landing.ctypes.data, 1, 0)], dtype=np.uint64)
    agent.register_memory(own, "DRAM")
    answers.write(f"{READY}\n")
    for line in sys.stdin:
        alias, blob, rows = json.loads(line)
        try:
            agent.add_remote_agent(bytes.fromhex(blob))
            for row in rows:
                _read(agent, alias, own, np.array([row], dtype=np.uint64))
            agent.remove_remote_agent(alias)
        except Exception as error:  # noqa: BLE001  NIXL's errors are RuntimeErrors of its own
            answers.write(f"{type(error).__name__} {error}".replace("\n", " ") + "\n")
        else:
            answers.write(f"{FINE}\n")


def _read(nixl: Any, alias: str, own: Any, far: Any) -> None:
    handle = nixl.initialize_xfer("READ", nixl.get_xfer_descs(own, "DRAM"), nixl.get_xfer_descs(far, "DRAM"), alias)
    state, deadline = nixl.transfer(handle), time.monotonic() + READ_S
    while state == "PROC" and time.monotonic() < deadline:
        time.sleep(POLL_S)
        state = nixl.check_xfer_state(handle)
    if state != "DONE":
        raise TimeoutError(f"a first read ended in {state}")
    nixl.release_xfer_handle(handle)


if __name__ == "__main__":
    main()
