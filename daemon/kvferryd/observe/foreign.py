"""What others than us write to this process's output, NIXL, UCX, the interpreter as it dies, as JSON lines.

Libraries in C write to the descriptors 1 and 2. So these are a pipe, which a small process reads to its end: it lives
when this one has crashed, and what was said last comes out. Our own lines go past it, straight to where they should.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO

LONGEST = 1 << 16
"""Bytes of a line; what is longer is cut into several."""
LEVELS = {"F": "critical", "FATAL": "critical", "E": "error", "ERROR": "error", "W": "warning", "WARN": "warning"}
GLOG = re.compile(r"([FEWI])\d{4} \d\d:\d\d:\d\d")
UCX = re.compile(r"\bUCX\s+(FATAL|ERROR|WARN|INFO|DIAG|DEBUG)\b")


def wrap() -> TextIO:
    """Put the pipe before the descriptors 1 and 2; returns what 2 was before, for our own lines."""
    own = os.dup(2)
    # Not of our process group: it ends with the pipe, not with a signal that is meant for the daemon.
    reader = subprocess.Popen(  # noqa: S603  # this file
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=own, stderr=own, start_new_session=True
    )
    assert reader.stdin is not None
    for descriptor in (1, 2):
        os.dup2(reader.stdin.fileno(), descriptor)
    reader.stdin.close()
    reader.returncode = 0  # nobody waits for it: it outlives us
    return os.fdopen(own, "w", encoding="utf-8", errors="backslashreplace", buffering=1)


def as_json(line: str) -> str:
    """The line as it is if it is JSON already, otherwise as the event of one."""
    if line.startswith("{"):
        try:
            json.loads(line)
            return line
        except ValueError:
            pass
    glog, ucx = GLOG.match(line), UCX.search(line)
    level = LEVELS.get(glog[1] if glog else ucx[1] if ucx else "", "info")
    logger = "nixl" if glog else "ucx" if ucx else "foreign"
    return event(line, level, logger)


def event(what: str, level: str, logger: str) -> str:
    """A line as `kvferryd.observe.logs` writes it."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": what, "level": level, "logger": logger, "time": now})


def lines(descriptor: int) -> Iterator[str]:
    """As they come, until the last writer has gone; the last may lack its end."""
    held = b""
    while data := os.read(descriptor, LONGEST):
        *whole, held = (held + data).split(b"\n")
        if len(held) >= LONGEST:
            whole.append(held)
            held = b""
        yield from (line.decode(errors="replace") for line in whole)
    yield held.decode(errors="replace")


def main() -> None:
    for line in lines(0):
        if line.strip():
            try:
                os.write(1, f"{as_json(line.rstrip())}\n".encode())
            except OSError:  # nobody reads us any more; the daemon must not wait for that
                continue


if __name__ == "__main__":
    main()
