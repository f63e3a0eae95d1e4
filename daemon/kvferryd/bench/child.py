"""A process of our own modules beside the one that measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvferry.errors import Internal

START_S = 300.0


@contextmanager
def child(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Start `python -m MODULE ARGUMENTS`, yield the JSON object that it prints first, and kill it afterwards.

    Its stdin stays open until then. Raises KvferryError (`child_ended`) when it says nothing within START_S.
    """
    process = subprocess.Popen(  # noqa: S603  # our own modules
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR", **(env or {})},
    )
    late = threading.Timer(START_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None and process.stdin is not None
        said = next((line for line in process.stdout if line.startswith("{")), "")
        late.cancel()
        if not said:
            raise Internal("child_ended", f"{module} ended without a word", remedy="read what it wrote to stderr")
        yield json.loads(said)
    finally:
        late.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def tell(said: Mapping[str, object]) -> None:
    """In the child: what `child` yields."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
