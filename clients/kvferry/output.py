"""Lines that nobody has to wait for (`Writer`), and output of this process that is not ours (NIXL, UCX, the interpreter
as it dies), as JSON lines.

Libraries in C write to the descriptors 1 and 2. So these are a pipe, which a small process reads to its end: it lives
when this one has crashed, and what was said last comes out. Our own lines go past it, straight to where they should.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

LONGEST = 1 << 16
"""Bytes of a line; what is longer is cut into several."""
WAITING = 4 << 20
"""Characters of the lines that wait to be written."""
LOST = "the log was not read: lines are lost"
LEVELS = {"F": "critical", "FATAL": "critical", "E": "error", "ERROR": "error", "W": "warning", "WARN": "warning"}
GLOG = re.compile(r"([FEWI])\d{4} \d\d:\d\d:\d\d")
UCX = re.compile(r"\bUCX\s+(FATAL|ERROR|WARN|INFO|DIAG|DEBUG)\b")


class Writer:
    """Writes lines by a thread, so that nobody waits for who reads them. Beyond WAITING they are lost until half of
    what waits is written; the next line says how many."""

    def __init__(self, descriptor: int, say_lost: Callable[[int], str]) -> None:
        self._descriptor, self._say_lost = descriptor, say_lost
        self._taken = self._written = self._lost = 0
        """Characters, characters and lines; each is changed by one thread only."""
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        """An event among them is set when all before it is written."""
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def put(self, line: str) -> None:
        """Called by one thread at a time."""
        if self._taken - self._written >= (WAITING // 2 if self._lost else WAITING):
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self.put(self._say_lost(lost))
        self._taken += len(line)
        self._lines.put(line)

    def flush(self, longest_s: float = 1.0) -> None:
        """Wait until all is written."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(longest_s)

    def _write(self) -> None:
        """Lines that wait go as one, as long as another process that writes to the same pipe cannot cut them."""
        held, characters = b"", 0
        while True:
            waits: str | threading.Event | None = None
            with contextlib.suppress(queue.Empty):
                waits = self._lines.get(block=not held)
            line = f"{waits}\n".encode(errors="backslashreplace") if isinstance(waits, str) else b""
            if held and (not line or len(held) + len(line) > select.PIPE_BUF):
                self._put_out(held)
                self._written += characters
                held, characters = b"", 0
            if isinstance(waits, str):
                held, characters = held + line, characters + len(waits)
            elif waits is not None:
                waits.set()

    def _put_out(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader has gone
            while data:
                data = data[os.write(self._descriptor, data) :]


def wrap() -> int:
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
    reader.returncode = 0  # it outlives us, unwaited
    return own


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
    writer = Writer(1, lambda lost: event(f"{LOST}: {lost}", "warning", "foreign"))
    for line in lines(0):
        if line.strip():
            writer.put(as_json(line.rstrip()))
    writer.flush(60.0)  # it may take its time


if __name__ == "__main__":
    main()
