"""The first pure function: intersect a destination manifest with the manifests of the source ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvferry.errors import Malformed, Refusal
from kvferry.manifest import Component, Group, Manifest, TokenShard
from kvferryd.plan.axes import Box, Radix, pair
from kvferryd.plan.layout import Layout, Layouts
from kvferryd.plan.rows import Pattern, patterns
from kvferryd.plan.span import Span, Uncovered, cover


class PlanRefused(Malformed):
    """The two sides cannot be paired. `refusals` lists every reason with both values."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__(
            "refused",
            f"source and destination cannot be paired: {len(refusals)} reason{'s' * (len(refusals) > 1)}",
            remedy="make the caches of the two engines agree in what the reasons name",
            refusals=tuple(refusals),
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """How tokens turn into byte offsets on either side; every component of a copy shares it."""

    source_region: int
    destination_region: int
    source_block: Radix
    destination_block: Radix
    source_slot: Radix
    destination_slot: Radix


@dataclass(frozen=True, slots=True)
class Part:
    """For people: a component, or the part of its sharded axis that is read."""

    component: str
    layer: int
    axis: str
    span: Span
    total: int


@dataclass(eq=False)
class Copy:
    """What is read from one group of one source rank, with one geometry.

    boxes: (box, item size in bytes) at block 0, slot 0. Everything that depends on tokens comes later, from `bind`.
    """

    source_rank: int
    source_group: Group
    destination_group: Group
    geometry: Geometry
    boxes: list[tuple[Box, int]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    _patterns: dict[int, list[Pattern]] = field(default_factory=dict)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token; of the whole state for a state group."""
        return sum(math.prod(loop.extent for loop in box.loops) * item for box, item in self.boxes)

    def patterns(self, tokens: int) -> list[Pattern]:
        """The runs of one segment of `tokens` tokens; computed once per length. See `rows.patterns`."""
        found = self._patterns.get(tokens)
        if found is None:
            if len(self._patterns) >= 64:  # block sizes in the hundreds have many partial lengths: keep it bounded
                self._patterns.clear()
            found = patterns(self.boxes, tokens, self.geometry.source_slot, self.geometry.destination_slot)
            self._patterns[tokens] = found
        return found


@dataclass(frozen=True, eq=False)
class Plan:
    """Who reads what from whom. Valid for every request between these manifests."""

    destination: Manifest
    sources: dict[int, Manifest]
    copies: tuple[Copy, ...]

    @cached_property
    def reads_from(self) -> tuple[int, ...]:
        """Source ranks that are read, ascending."""
        return tuple(sorted({copy.source_rank for copy in self.copies}))


def plan(sources: Sequence[Manifest], destination: Manifest) -> Plan:
    """Choose source ranks that cover every destination component exactly once, and factor the copy.

    Replicas are spread over readers by destination rank. Raises PlanRefused with every reason found.
    """
    refusals = _fingerprints(sources, destination)
    if refusals:
        raise PlanRefused(refusals)
    layouts = Layouts()
    holders: dict[tuple[int, str], list[Held]] = defaultdict(list)
    for index, source in enumerate(sources):
        groups = {group.name: group for group in source.groups}
        for component in source.components:
            held = Held(index, component, groups[component.group], layouts.of(component))
            holders[component.layer, component.name].append(held)

    own_groups = {group.name: group for group in destination.groups}
    copies: dict[tuple[object, ...], Copy] = {}
    choices: dict[tuple[object, ...], list[Choice]] = {}
    for wanted in destination.components:
        own, layout, found = own_groups[wanted.group], layouts.of(wanted), holders[wanted.layer, wanted.name]
        # Layers of one model look alike: who reads what from whom is settled once for each look.
        look = (layout, own.name, *((held.index, held.layout, held.group.name) for held in found))
        chosen = choices.get(look)
        if chosen is None:
            reasons = _compatible(wanted, layout, own, found)
            if not reasons:
                try:
                    chosen = choices[look] = _choose(layout, own, found, destination.rank)
                except Uncovered as gap:
                    reasons = [_uncovered(wanted, gap, sources, found)]
            if reasons:
                refusals += reasons
                continue
        assert chosen is not None
        for choice in chosen:
            held = found[choice.position]
            theirs = held.layout
            key = (
                held.index,
                held.group.name,
                own.name,
                held.component.region,
                wanted.region,
                theirs.tokens,
                layout.tokens,
            )
            copy = copies.get(key)
            if copy is None:
                geometry = Geometry(
                    held.component.region, wanted.region, theirs.block, layout.block, theirs.slot, layout.slot
                )
                copy = copies[key] = Copy(sources[held.index].rank, held.group, own, geometry)
            origin = Box(held.component.offset, wanted.offset)
            copy.boxes += [(origin + box, wanted.itemsize) for box in choice.boxes]
            copy.parts.append(Part(wanted.name, wanted.layer, choice.axis, choice.span, layout.total(choice.axis)))
    if refusals:
        raise PlanRefused(refusals)
    return Plan(destination, {source.rank: source for source in sources}, tuple(copies.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A component as one source rank holds it; `index` into the sources."""

    index: int
    component: Component
    group: Group
    layout: Layout


@dataclass(frozen=True, slots=True)
class Choice:
    """One holder (by position) and the part of the sharded axis that is read from it."""

    position: int
    axis: str
    span: Span
    boxes: tuple[Box, ...]


def _fingerprints(sources: Sequence[Manifest], destination: Manifest) -> list[Refusal]:
    return [
        Refusal("fingerprint", "", f"{source.model.fingerprint} (rank {source.rank})", destination.model.fingerprint)
        for source in sources
        if source.model.fingerprint != destination.model.fingerprint
    ]


def _compatible(wanted: Component, layout: Layout, own: Group, found: Sequence[Held]) -> list[Refusal]:
    """Every reason why these holders cannot serve `wanted`, each once."""
    if not found:
        return [Refusal("missing_component", wanted.label, "no rank that lists it", f"dtype {wanted.dtype}")]
    reasons: dict[str, Refusal] = {}

    def refuse(code: str, source: object, destination: object) -> None:
        reasons.setdefault(code, Refusal(code, wanted.label, str(source), str(destination)))

    for held in found:
        theirs = held.layout
        if theirs.dtype != layout.dtype:
            refuse("dtype", theirs.dtype, layout.dtype)
        if held.group.kind != own.kind:
            refuse("group_kind", held.group.kind, own.kind)
        if set(theirs.inner) != set(layout.inner):
            refuse("axes", sorted(theirs.inner), sorted(layout.inner))
            continue
        for axis in sorted(layout.inner):
            if theirs.total(axis) != layout.total(axis):
                code = "total" if axis in (theirs.shard_axis, layout.shard_axis) else "inner_extent"
                refuse(code, f"{axis} {theirs.total(axis)}", f"{axis} {layout.total(axis)}")
    along = {held.layout.shard_axis for held in found} - {""}
    if len(along) > 1:
        refuse("axes", f"ranks sharded along different axes: {sorted(along)}", layout.shard_axis or "not sharded")
    rings = {(held.group.token_shard.size, held.group.token_shard.interleave) for held in found}
    if len(rings) > 1:
        refuse("token_shard", f"(size, interleave) differ between ranks: {sorted(rings)}", own.token_shard)
    return list(reasons.values())


def _choose(layout: Layout, own: Group, found: Sequence[Held], reader: int) -> list[Choice]:
    """Holders so that every element is read exactly once. Raises Uncovered."""
    axis = next((held.layout.shard_axis for held in found if held.layout.shard_axis), layout.shard_axis)
    ring = found[0].group.token_shard
    chosen = []
    for rank in range(ring.size):
        if not _share_tokens(TokenShard(rank=rank, size=ring.size, interleave=ring.interleave), own.token_shard):
            continue
        holding = [position for position, held in enumerate(found) if held.group.token_shard.rank == rank]
        spans = [found[position].layout.span(axis) for position in holding]
        for i, span in cover(layout.span(axis), spans, reader):
            boxes = _boxes(found[holding[i]].layout, layout, axis, span)
            chosen.append(Choice(holding[i], axis, span, tuple(boxes)))
    return chosen


def _uncovered(wanted: Component, gap: Uncovered, sources: Sequence[Manifest], found: Sequence[Held]) -> Refusal:
    axis = next((held.layout.shard_axis for held in found if held.layout.shard_axis), "")
    holds = ", ".join(
        f"rank {sources[held.index].rank} {axis} {held.layout.span(axis)} (token shard {held.group.token_shard.rank})"
        for held in found
    )
    return Refusal("uncovered", wanted.label, holds, f"wants {axis} {gap.missing}")


def _share_tokens(a: TokenShard, b: TokenShard) -> bool:
    """Whether any token lies on both: whether intervals of a and of b ever overlap.

    They begin at a.rank * a.interleave and b.rank * b.interleave and repeat with the ring; the distances between
    begins are then all those congruent to the first one modulo the greatest common divisor of the rings.
    """
    step = math.gcd(a.size * a.interleave, b.size * b.interleave)
    distance = (a.rank * a.interleave - b.rank * b.interleave) % step
    return distance < b.interleave or step - distance < a.interleave


def _boxes(source: Layout, destination: Layout, sharded: str, span: Span) -> list[Box]:
    """The boxes of everything inside one slot, offsets relative to the two components'."""
    boxes = [Box(0, 0)]
    for axis, digits in destination.inner.items():
        part = span if axis == sharded else destination.span(axis)
        paired = pair(
            source.inner[axis],
            part.start - source.span(axis).start,
            digits,
            part.start - destination.span(axis).start,
            len(part),
        )
        boxes = [outer + inner for outer in boxes for inner in paired]
    return boxes
