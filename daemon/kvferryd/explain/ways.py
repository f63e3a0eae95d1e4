"""What every way is expected to take, by docs/benchmarks.md: to compare ways, not to promise a time."""

from __future__ import annotations

from dataclasses import dataclass

from kvferryd.plan.crossover import direct_is_best


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds: what it takes at all, what a thousand runs add, what a megabyte adds."""

    fixed: float
    per_1000_runs: float
    per_mb: float

    def ms(self, runs: int, nbytes: int) -> float:
        return self.fixed + self.per_1000_runs * runs / 1e3 + self.per_mb * nbytes / 1e6


COSTS = {
    "host": {"direct": Cost(1.0, 2.4, 0.17), "staged": Cost(3.0, 0.03, 0.5)},
    "cuda": {"mapped": Cost(0.4, 0.0, 0.0032), "staged": Cost(2.0, 0.0, 0.0072), "direct": Cost(1.0, 5.0, 0.0029)},
}
"""By kind of memory, on one host, in the order in which `auto` prefers them where nothing else decides."""
FAR = 2.0
"""A way that takes so many times as long as the best is worth a warning, if it is LEAST_MS more."""
LEAST_MS = 5.0


def chosen(way: str, kind: str, runs: int, nbytes: int) -> str:
    """The way that daemons with this setting take."""
    if way in COSTS[kind]:
        return way
    if kind == "cuda":
        return "mapped"
    return "direct" if direct_is_best(kind, runs, nbytes) else "staged"


def ways_text(way: str, kind: str, runs: int, nbytes: int, what: str) -> list[str]:
    """The expected time of every way; a warning where that of the setting is far from the best."""
    costs = {name: cost.ms(runs, nbytes) for name, cost in COSTS[kind].items()}
    own, best = chosen(way, kind, runs, nbytes), min(costs, key=costs.__getitem__)
    lines = [f"expected for {what}, on one host, {kind} memory:"]
    for name, ms in sorted(costs.items(), key=lambda each: each[1]):
        lines.append(f"  {name:<7} {ms:>10,.1f} ms{f'  <- way = {way}' if name == own else ''}")
    if costs[own] > FAR * costs[best] and costs[own] - costs[best] > LEAST_MS:
        lines.append(f"warning: way = {way} takes {costs[own] / costs[best]:.0f} times as long as {best}")
        if way != "auto":
            lines.append(
                "  -> set way = auto on both sides (and arena_mb above 0), which takes the best that a pair can do"
            )
    return lines
