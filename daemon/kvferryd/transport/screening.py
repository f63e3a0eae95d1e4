"""The process in which `kvferryd.transport.metadata` has peers' metadata loaded: it may die of it.

It imports next to nothing: a handshake waits for its start.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

READY, FINE = "ready", "fine"


def main() -> None:
    """The process: a question per line of stdin, an answer per line of what stdout was. Ends with its stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its daemon's terminal is its own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NIXL writes to stdout
    import numpy as np

    from kvferryd.transport.nixl import make_agent, read_once, rehearse

    agent = make_agent(f"screen-{os.getpid()}", threads=0)
    landing = np.zeros(1, dtype=np.uint8)
    own = np.array([(landing.ctypes.data, 1, 0)], dtype=np.uint64)
    agent.register_memory(own, "DRAM")
    rehearse(agent, own)
    answers.write(f"{READY}\n")
    for line in sys.stdin:
        alias, blob, rows, wait_s = json.loads(line)
        try:
            agent.add_remote_agent(bytes.fromhex(blob))
            for row in rows:
                read_once(agent, alias, own, np.array([row], dtype=np.uint64), wait_s)
            agent.remove_remote_agent(alias)
        except Exception as error:  # noqa: BLE001  NIXL's errors are RuntimeErrors of its own
            answers.write(f"{type(error).__name__} {error}".replace("\n", " ") + "\n")
        else:
            answers.write(f"{FINE}\n")


if __name__ == "__main__":
    main()
