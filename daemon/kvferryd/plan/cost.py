"""What every way of moving runs is expected to take, and so which of several is taken.

The figures are those of docs/benchmarks.md, of one host; they are there to compare ways, not to promise a time.
`kvferry bench ways` measures them anew and says where one is wrong by more than three times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

Way = TypeVar("Way", bound=str)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds from order to done: what it takes at all, what a thousand runs add, what a megabyte adds."""

    fixed: float
    per_1000_runs: float
    per_mb: float

    def ms(self, runs: float, nbytes: float) -> float:
        return self.fixed + self.per_1000_runs * runs / 1e3 + self.per_mb * nbytes / 1e6


COSTS = {
    "host": {"direct": Cost(3.0, 2.4, 0.22), "staged": Cost(5.0, 0.03, 0.8)},
    "cuda": {"mapped": Cost(1.6, 0.0, 0.0029), "staged": Cost(3.3, 0.0, 0.0042), "direct": Cost(1.6, 5.5, 0.0029)},
}
"""By kind of memory, in the order in which ways are preferred that take the same time."""
IMPORTED = {**COSTS["cuda"], "direct": Cost(1.6, 5.5, 5.5)}
"""From GPU memory that another process allocated, NIXL reads a hundred times slower."""


def cheapest(costs: dict[str, Cost], able: Iterable[Way], runs: float, nbytes: float) -> Way:
    """The way of those that a pair can take."""
    return min(able, key=lambda way: costs[way].ms(runs, nbytes))
