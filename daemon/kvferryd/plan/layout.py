"""What the planner asks of a component: everything but where it starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

from kvferry.manifest import BLOCK, SLOT, Component
from kvferryd.plan.axes import Radix

Axes: TypeAlias = tuple[tuple[str, int, int], ...]
"""(name, extent, stride in bytes), outer first."""


class Span(NamedTuple):
    """Half-open range [start, stop) on a global axis, for example KV heads."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Components with equal axes, shard and dtype share one, so that it can be compared by identity.

    inner: the digits of every axis but block and slot. spans: what is held of each; totals: how long each is globally;
    both also for "", which stands for no axis.
    """

    dtype: str
    block: Radix
    slot: Radix
    inner: dict[str, Radix]
    spans: dict[str, Span]
    totals: dict[str, int]
    shard_axis: str


def layouts() -> Callable[[Component], Layout]:
    """The layouts of one plan, each made once."""
    made = cache(_layout)

    def layout_of(component: Component) -> Layout:
        shard, axes = component.shard, tuple((axis.name, axis.extent, axis.stride) for axis in component.axes)
        return made(component.dtype, axes, *((shard.axis, shard.start, shard.total) if shard else ("", 0, 1)))

    return layout_of


def _layout(dtype: str, axes: Axes, shard_axis: str, shard_start: int, shard_total: int) -> Layout:
    inner = {name: _radix(axes, name) for name, _, _ in axes if name not in (BLOCK, SLOT)}
    extents = {name: math.prod(extent for each, extent, _ in axes if each == name) for name in inner}
    spans = {"": Span(0, 1)} | {name: Span(0, extent) for name, extent in extents.items()}
    if shard_axis:
        spans[shard_axis] = Span(shard_start, shard_start + extents[shard_axis])
    totals = {"": 1} | extents | {shard_axis: shard_total}
    return Layout(dtype, _radix(axes, BLOCK), _radix(axes, SLOT), inner, spans, totals, shard_axis)


def _radix(axes: Axes, name: str) -> Radix:
    """The digits of a logical axis, with those merged that lie regularly inside one another."""
    digits: list[tuple[int, int]] = []
    for axis, extent, stride in axes:
        if axis != name or extent == 1:
            continue
        if digits and digits[-1][1] == extent * stride:
            digits[-1] = (digits[-1][0] * extent, stride)
        else:
            digits.append((extent, stride))
    return tuple(digits)
