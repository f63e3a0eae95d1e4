"""What every way is expected to take, by docs/benchmarks.md: to compare ways, not to promise a time."""

from __future__ import annotations

from kvferryd.plan.cost import COSTS, cheapest

FAR = 2.0
"""A way that takes so many times as long as the best is worth a warning, if it is LEAST_MS more."""
LEAST_MS = 5.0


def taken(way: str, kind: str, runs: int, nbytes: int) -> str:
    """The way that daemons with this setting take, where the pair can take every one."""
    return way if way in COSTS[kind] else cheapest(COSTS[kind], COSTS[kind], runs, nbytes)


def ways_text(way: str, kind: str, runs: int, nbytes: int, what: str) -> list[str]:
    """The expected time of every way; a warning where that of the setting is far from the best."""
    costs = {name: cost.ms(runs, nbytes) for name, cost in COSTS[kind].items()}
    own, best = (taken(each, kind, runs, nbytes) for each in (way, "auto"))
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
