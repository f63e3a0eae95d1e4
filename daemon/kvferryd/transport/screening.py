"""The process in which `kvferryd.transport.screen` has peers' metadata loaded: it may die of it.

It imports next to nothing: a handshake waits for its start.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections import Counter

READY, ASKED, FINE, LATE, DIED = "ready", "asked", "fine", "late", ""
SAID = 400
"""Characters of what NIXL says."""
POLL_S = 1e-3
CHUNK = 1 << 16


def main() -> None:
    """The process. Each line of stdin is [number, seconds, alias, metadata, rows]: a peer to try for so long. On what
    stdout was, [number, ASKED] says that it will be tried, and a later line what came of it, as soon as that is known.
    Ends with stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its daemon's terminal is its own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # NIXL writes to stdout
    import numpy as np

    from kvferryd.transport.nixl import FirstReads, make_agent, rehearse

    agent = make_agent(f"screen-{os.getpid()}", threads=0)
    landing = np.zeros(1, dtype=np.uint8)
    own = np.array([(landing.ctypes.data, 1, 0)], dtype=np.uint64)
    agent.register_memory(own, "DRAM")
    rehearse(agent, own)
    answers.write(f"{READY}\n")

    def say(number: int, what: str) -> None:
        answers.write(json.dumps([number, what]) + "\n")

    trials: list[tuple[int, str, float, FirstReads]] = []
    loaded: Counter[str] = Counter()
    """Trials under way by alias: two engines may meet the same peer at once."""
    rest = b""
    while True:
        if select.select([0], [], [], POLL_S if trials else None)[0]:
            if not (read := os.read(0, CHUNK)):
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                number, wait_s, alias, blob, rows = json.loads(line)
                say(number, ASKED)
                try:
                    if not loaded[alias]:
                        agent.add_remote_agent(bytes.fromhex(blob))
                    loaded[alias] += 1
                    reads = FirstReads(agent, own, alias, [np.array([row], dtype=np.uint64) for row in rows])
                    trials.append((number, alias, time.monotonic() + wait_s, reads))
                except Exception as error:  # noqa: BLE001  NIXL's errors are RuntimeErrors of its own
                    say(number, _said(error))
        going = []
        for trial in trials:
            number, alias, until, reads = trial
            try:
                what = FINE if reads.over() else LATE if time.monotonic() >= until else ""
            except Exception as error:  # noqa: BLE001  as above
                what = _said(error)
            if not what:
                going.append(trial)
                continue
            loaded[alias] -= 1
            if what == FINE and not loaded[alias]:
                agent.remove_remote_agent(alias)
            say(number, what)
        trials = going


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}"[:SAID]


if __name__ == "__main__":
    main()
