"""How one rank's part of a transfer goes, in figures."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable

from kvferry.schemas import Awaited, TransferState
from kvferryd.paths import Flight, PathName
from kvferryd.paths.move import Waits


class Course:
    """Milliseconds of each state, of the waits in them, and of what moved the bytes. Times are monotonic, but for
    `created_at` and `over_at`, which are Unix time."""

    def __init__(self) -> None:
        self.created_at = time.time()
        self.over_at: float | None = None
        """All ranks' parts have ended."""
        self.ms: defaultdict[str, float] = defaultdict(float)
        self.began = self._state_began = time.monotonic()
        self.ordered_at = math.inf
        self.unpublished_since: float | None = None
        """Set while the source has nothing, or nothing more, to read."""
        self.late_half = Awaited.ORDER
        """The half that comes last."""
        self.waits = Waits()
        self.path: PathName | None = None
        self.descriptors = 0

    def order_came(self, *, reserved: bool) -> None:
        """reserved: the other half is there."""
        self.ordered_at = time.monotonic()
        if not reserved:
            self.late_half = Awaited.RESERVATION

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

    def told(self) -> dict[str, float]:
        """The phases, with `waiting` as a whole and what it was for."""
        phases, unpublished = dict(self.ms), self.ms.get("waiting_publish", 0.0)
        if (half := phases.get("waiting")) is not None:
            phases |= {f"waiting_{self.late_half.value}": half, "waiting": half + unpublished}
        return {name: round(ms, 3) for name, ms in phases.items()}
