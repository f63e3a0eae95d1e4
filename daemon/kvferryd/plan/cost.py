"""Expected times of every way of moving runs, and so the choice of one.

The figures are those of docs/measuring.md, of one host; they are there to compare ways, not to promise a time.
`kvferry bench ways` measures them anew and says where one is wrong by more than three times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

Way = TypeVar("Way", bound=str)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds from order to done: what it takes at all, what a megabyte adds, what a thousand runs add, and what a
    thousand blocks of the tables add, even where all of them are one run."""

    fixed: float
    per_mb: float
    per_1000_runs: float
    per_1000_blocks: float

    def ms(self, runs: float, nbytes: float, blocks: float = 0) -> float:
        by_number = self.per_1000_runs * runs + self.per_1000_blocks * blocks
        return self.fixed + self.per_mb * nbytes / 1e6 + by_number / 1e3


COSTS = {
    "host": {"direct": Cost(3.0, 0.22, 2.4, 0.3), "staged": Cost(5.0, 0.8, 0.03, 0.5)},
    "cuda": {
        "mapped": Cost(1.6, 0.0029, 0.0, 0.3),
        "staged": Cost(3.3, 0.0042, 0.0, 0.5),
        "direct": Cost(1.6, 0.0029, 5.5, 0.3),
    },
}
"""Keyed by kind of memory, in the order in which ways are preferred that take the same time."""
IMPORTED = {**COSTS["cuda"], "direct": Cost(1.6, 5.5, 5.5, 0.3)}
"""From GPU memory that another process allocated, NIXL reads a hundred times slower."""


def cheapest(costs: dict[str, Cost], able: Iterable[Way], runs: float, nbytes: float, blocks: float = 0) -> Way:
    """The way of those that a pair can take."""
    return min(able, key=lambda way: costs[way].ms(runs, nbytes, blocks))
