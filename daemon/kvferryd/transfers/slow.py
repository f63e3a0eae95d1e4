"""The line in the log about slow transfers: one in a while, however many there are."""

from __future__ import annotations

import math
from collections.abc import Callable

EVERY_S = 10.0
"""Between two lines."""


class Slow:
    def __init__(self, slow_ms: int, clock: Callable[[], float]) -> None:
        """slow_ms: 0 for never."""
        self._slow_ms, self._clock = slow_ms or math.inf, clock
        self._next, self._left_out = -math.inf, 0

    def says(self, took_ms: float) -> int | None:
        """None where there is nothing to say; else how many slow ones were left out since the line before."""
        if took_ms <= self._slow_ms:
            return None
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return None
        self._next, left_out, self._left_out = now + EVERY_S, self._left_out, 0
        return left_out
