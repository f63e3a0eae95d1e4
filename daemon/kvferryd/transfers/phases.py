"""Phases of a transfer, and the time of each."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable

from kvferry.schemas import Awaited, TransferState
from kvferryd.paths import Flight


class Phases:
    """Milliseconds of each state, of the waits in them, and of what moved the bytes. Times are monotonic."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, float] = defaultdict(float)
        self.began = self._state_began = time.monotonic()
        self.ordered_at = math.inf
        self.unpublished_since: float | None = None
        """Set while the source has nothing, or nothing more, to read."""

    def order_came(self) -> None:
        self.ordered_at = time.monotonic()

    def leave(self, state: TransferState) -> None:
        """The next state begins."""
        now = time.monotonic()
        self.ms[state.value] += 1e3 * (now - self._state_began)
        self._state_began = now

    def publish_awaited(self) -> None:
        if self.unpublished_since is None:
            self.unpublished_since = time.monotonic()

    def published(self) -> None:
        """End the wait for a publish, if there is one. It is booked as such, and not as time of the state in which it
        was waited."""
        if self.unpublished_since is not None:
            waited_s = time.monotonic() - self.unpublished_since
            self.unpublished_since = None
            self.ms["waiting_publish"] += 1e3 * waited_s
            self._state_began += waited_s

    def moved(self, began: float) -> None:
        """A move that began then is over."""
        self.ms["moving"] += 1e3 * (time.monotonic() - began)

    def flew(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self.ms[flight.phase] += 1e3 * flight.seconds

    def end(self) -> None:
        """The last state has been entered."""
        self.ms["total"] = 1e3 * (self._state_began - self.began)

    @property
    def took_ms(self) -> float:
        """From the order to the last state; 0 where none came."""
        return round(1e3 * max(0.0, self._state_began - self.ordered_at), 3)

    def told(self, late_half: Awaited) -> dict[str, float]:
        """With `waiting` as a whole, and what it was for."""
        phases, unpublished = dict(self.ms), self.ms.get("waiting_publish", 0.0)
        if (half := phases.get("waiting")) is not None:
            phases |= {f"waiting_{late_half.value}": half, "waiting": half + unpublished}
        return {name: round(ms, 3) for name, ms in phases.items()}
