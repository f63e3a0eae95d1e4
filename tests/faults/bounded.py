"""Daemons with bounds of another size, where the real one would take an hour, or thousands of connections.

bounded(monkeypatch, {"kvferry.protocol.peers.IDLE_S": 0.5})
(daemon,) = await daemons.start("idle")
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from kvferryd.demo import fleet


def bounded(monkeypatch: pytest.MonkeyPatch, sizes: Mapping[str, object], files: int = 0) -> None:
    """Daemons that are started from now on in this test have them. sizes: by module and name. files: the descriptors
    that they may have, where it is not this process's number."""
    modules = {name.rpartition(".")[0] for name in sizes}
    assign = "; ".join(
        [
            "import kvferryd",
            *(f"import {each}" for each in sorted(modules)),
            *(f"{k} = {v!r}" for k, v in sizes.items()),
        ]
    )
    if files:
        assign += f"; import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"
    command = [sys.executable, "-c", f"import sys; {assign}; from kvferryd.commands.cli import main; sys.exit(main())"]
    monkeypatch.setattr(fleet, "_kvferry", lambda arguments: [*command, *arguments])
