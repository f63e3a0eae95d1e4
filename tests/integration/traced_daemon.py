"""A daemon that notes by which of our modules each router's order goes, from its route until the first read is posted:
`traced_daemon.py FILE ARGUMENTS`, with the arguments of `kvferry`. A line of the file for each order, in JSON."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType

from kvferryd.commands.cli import main

DOOR, LAST = ("kvferryd.api.rest.routes", "order"), ("kvferryd.transport.read", "post")
OURS, GENERATED = ("kvferry.", "kvferryd."), "kvferry.v1."


class Trace:
    def __init__(self, file: Path) -> None:
        self._file, self._modules = file, dict[str, None]()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        at = module, frame.f_code.co_name
        if not (self._modules or at == DOOR) or not module.startswith(OURS) or module.startswith(GENERATED):
            return
        self._modules.setdefault(module)
        if at == LAST:
            modules, self._modules = list(self._modules), {}
            with self._file.open("a") as file:
                file.write(f"{json.dumps(modules)}\n")


if __name__ == "__main__":
    trace = Trace(Path(sys.argv[1]))
    threading.setprofile(trace)
    sys.setprofile(trace)
    sys.exit(main(sys.argv[2:]))
