"""Expected times of every way, by docs/measuring.md: to compare ways, not to promise a time."""

from __future__ import annotations

from kvferryd.plan import Bound, Plan
from kvferryd.plan.cost import COSTS, Cost, cheapest

FAR = 2.0
"""A way that takes so many times as long as the best is worth a warning, if it is LEAST_MS more."""
LEAST_MS = 5.0


def able(chosen: Plan) -> dict[str, Cost]:
    """The ways between such kinds of memory, as far as manifests tell: what is not on a GPU is not mapped."""
    read = [chosen.sources[rank] for rank in chosen.reads_from]
    on_gpu = all(region.kind == "cuda" for manifest in read for region in manifest.regions)
    return {name: cost for name, cost in COSTS[kind_of(chosen)].items() if on_gpu or name != "mapped"}


def kind_of(chosen: Plan) -> str:
    """The kind of memory that is written."""
    return next(iter(chosen.destination.regions)).kind


def taken(way: str, chosen: Plan, bound: Bound) -> str:
    """The way that daemons with this setting take, where the pair can take all that `able` has."""
    costs = able(chosen)
    return way if way in costs else cheapest(costs, costs, bound.run_count, bound.nbytes, bound.segment_count)


def ways_text(way: str, chosen: Plan, bound: Bound, what: str) -> list[str]:
    """The expected time of every way; a warning where that of the setting is far from the best."""
    runs, kind = bound.run_count, kind_of(chosen)
    costs = {name: cost.ms(runs, bound.nbytes, bound.segment_count) for name, cost in able(chosen).items()}
    own, best = (taken(each, chosen, bound) for each in (way, "auto"))
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
