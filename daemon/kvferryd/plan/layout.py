"""What the planner asks of a component: everything but where it starts."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.manifest import BLOCK, SLOT, Component
from kvferryd.plan.axes import Radix, radix
from kvferryd.plan.span import Span


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One per look: components with equal axes, shard and dtype share it, so that it can be compared by identity.

    inner: the digits of every axis but block and slot. spans: what is held of each; totals: how long each is globally.
    """

    dtype: str
    block: Radix
    slot: Radix
    inner: dict[str, Radix]
    spans: dict[str, Span]
    totals: dict[str, int]
    shard_axis: str

    @property
    def tokens(self) -> tuple[Radix, Radix]:
        return self.block, self.slot

    def span(self, axis: str) -> Span:
        """What this rank holds of a global axis; [0, 1) of one that it lacks."""
        return self.spans.get(axis, Span(0, 1))

    def total(self, axis: str) -> int:
        return self.totals.get(axis, 1)


class Layouts:
    """The layouts of one plan, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Layout] = {}

    def of(self, component: Component) -> Layout:
        shard = component.shard
        look = (
            component.dtype,
            shard and (shard.axis, shard.start, shard.total),
            *[(axis.name, axis.extent, axis.stride) for axis in component.axes],
        )
        known = self._known.get(look)
        if known is None:
            known = self._known[look] = _layout(component)
        return known


def _layout(component: Component) -> Layout:
    names = [name for name in dict.fromkeys(axis.name for axis in component.axes) if name not in (BLOCK, SLOT)]
    spans, totals = {}, {}
    for name in names:
        extent = component.extent(name)
        shard = component.shard if component.shard and component.shard.axis == name else None
        start = shard.start if shard else 0
        spans[name] = Span(start, start + extent)
        totals[name] = shard.total if shard else extent
    return Layout(
        component.dtype,
        radix(component.axes, BLOCK),
        radix(component.axes, SLOT),
        {name: radix(component.axes, name) for name in names},
        spans,
        totals,
        component.shard.axis if component.shard else "",
    )
