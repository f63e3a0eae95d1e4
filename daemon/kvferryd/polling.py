"""Asking again: GPUs and NIXL tell nobody when they are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SPIN_S, POLL_S = 5e-3, 1e-3
"""For so long it is asked at every turn of the event loop, later once in POLL_S: a timer of the loop is good to a
millisecond."""


def ask_again(loop: asyncio.AbstractEventLoop, since: float | None, ask: Callable[[], None]) -> asyncio.Handle:
    """Call `ask` soon. `since`: when what is waited for began, by time.monotonic(); None for at once."""
    fresh = since is None or time.monotonic() - since < SPIN_S
    return loop.call_soon(ask) if fresh else loop.call_later(POLL_S, ask)
