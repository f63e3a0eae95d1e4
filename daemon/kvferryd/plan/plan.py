"""The first pure function: intersect a destination manifest with the manifests of the source ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from kvferry.errors import Refusal
from kvferry.manifest import SLOT, Component, Group, Manifest, TokenShard
from kvferryd.plan.axes import Box, Ints, Layout, Loop, Radix, Span, layouts, offsets, pair, step
from kvferryd.plan.refused import PlanRefused
from kvferryd.plan.rows import Pattern, most_runs, patterns
from kvferryd.plan.segments import EVERY, Steps


class Place(NamedTuple):
    """Where tokens lie on one side: a region, and the digits of the block and slot axes in it."""

    region: int
    block: Radix
    slot: Radix

    def offsets(self, blocks: Ints, slots: Ints) -> Ints:
        """Bytes from the region's start to these slots of these blocks."""
        return offsets(blocks, self.block) + offsets(slots, self.slot)

    @property
    def grain(self) -> int:
        """Slots that lie regularly in memory: the innermost digit's extent."""
        return self.slot[-1][0] if self.slot else 1


class Choice(NamedTuple):
    """A holder of a component, by position, and the part of the sharded axis ("": none) that is read from it.
    `total`: positions of that axis. `whole`: only whole blocks of it may be read."""

    position: int
    axis: str
    span: Span
    total: int
    boxes: list[Box]
    whole: bool


@dataclass(eq=False)
class Copy:
    """The reads from one group of one source rank, where all components have the same places.

    whole: only whole blocks may be read, as some component's slot axis may not be divided.
    boxes: (box, item size in bytes) at block 0, slot 0. Everything that depends on tokens comes later, from `bind`.
    parts: for people, each of the destination's components and what was chosen for it.
    """

    source_rank: int
    source_group: Group
    destination_group: Group
    source: Place
    destination: Place
    whole: bool = False
    boxes: list[tuple[Box, int]] = field(default_factory=list)
    parts: list[tuple[Component, Choice]] = field(default_factory=list)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token; of the whole state for a state group."""
        return sum(math.prod(loop.extent for loop in box.loops) * item for box, item in self.boxes)

    @cached_property
    def patterns(self) -> Callable[[int, Steps], list[Pattern]]:
        """The runs of one segment of so many tokens, see `rows.patterns`; computed once per length. Block sizes in the
        hundreds have many partial lengths, so not all of them are kept."""
        return lru_cache(maxsize=64)(lambda tokens, steps: patterns(self.boxes, self._slots(tokens, steps)))

    def most_runs(self, tokens: int, steps: Steps) -> int:
        """At least as many runs as a segment of so many tokens has, without making any."""
        return most_runs(self.boxes, self._slots(tokens, steps))

    def _slots(self, tokens: int, steps: Steps) -> tuple[Loop, ...]:
        return steps.loops(tokens, step(self.source.slot), step(self.destination.slot))

    @property
    def grain(self) -> int:
        """A token range that begins and ends at multiples of it divides no block that has to stay whole."""
        groups = (self.source_group, self.destination_group) if self.whole else ()
        return math.lcm(*(_grain(each.token_shard, each.block_size) for each in groups))

    @property
    def segment(self) -> int:
        """Consecutive tokens of a segment where no two blocks of a request follow one another."""
        groups = self.source_group, self.destination_group
        shares = (each.token_shard.interleave for each in groups if each.token_shard.size > 1)
        return min(*(each.block_size for each in groups), self.source.grain, self.destination.grain, *shares)


@dataclass(frozen=True, eq=False)
class Plan:
    """Which parts of the destination's cache are read from which source rank. The same for every request between these
    engines: only blocks and tokens are still to be named, see `bind`."""

    destination: Manifest
    sources: dict[int, Manifest]
    copies: tuple[Copy, ...]

    @cached_property
    def reads_from(self) -> tuple[int, ...]:
        """Source ranks that are read, ascending."""
        return tuple(sorted({copy.source_rank for copy in self.copies}))

    @cached_property
    def grain(self) -> int:
        """See `Copy.grain`; of all that is read."""
        return math.lcm(*(copy.grain for copy in self.copies))

    @cached_property
    def mean_run(self) -> float:
        """Bytes of a run of what is paged by tokens, where no two blocks of a request follow one another."""
        runs, nbytes = 0.0, 0
        for copy in self.copies:
            if copy.destination_group.kind == "paged":
                runs += sum(len(each.source_offsets) for each in copy.patterns(copy.segment, EVERY)) / copy.segment
                nbytes += copy.bytes_per_token
        return nbytes / runs if runs else float("inf")


def plan(sources: Sequence[Manifest], destination: Manifest) -> Plan:
    """Choose source ranks that cover every destination component exactly once, and factor the copy.

    Replicas are spread over readers by destination rank. Raises PlanRefused with every reason found.
    """
    wants = destination.model.fingerprint
    has = [(source.model.fingerprint, source.rank) for source in sources]
    refusals = [Refusal("fingerprint", "", f"{each} (rank {rank})", wants) for each, rank in has if each != wants]
    if refusals:
        raise PlanRefused(refusals)
    layout_of = layouts()
    holders: dict[tuple[int, str], list[Held]] = defaultdict(list)
    for source in sources:
        groups = {group.name: group for group in source.groups}
        for component in source.components:
            held = Held(source.rank, component, groups[component.group], layout_of(component))
            holders[component.layer, component.name].append(held)

    own_groups = {group.name: group for group in destination.groups}
    copies: dict[tuple[object, ...], Copy] = {}
    choices: dict[tuple[object, ...], list[Choice]] = {}
    for wanted in destination.components:
        own, layout, found = own_groups[wanted.group], layout_of(wanted), holders[wanted.layer, wanted.name]
        # Layers of one model look alike: who reads what from whom is settled once for each look.
        look = (layout, own.name, *((held.rank, held.layout, held.group.name) for held in found))
        if look not in choices:
            try:
                choices[look] = _choose(wanted, layout, own, found, destination.rank)
            except PlanRefused as refused:
                refusals += refused.refusals
                continue
        own_place = Place(wanted.region, layout.block, layout.slot)
        for choice in choices[look]:
            held = found[choice.position]
            place = Place(held.component.region, held.layout.block, held.layout.slot)
            key = (held.rank, held.group.name, own.name, place, own_place, choice.whole)
            if key not in copies:
                copies[key] = Copy(held.rank, held.group, own, place, own_place, choice.whole)
            origin = Box(held.component.offset, wanted.offset)
            copies[key].boxes += [(origin + box, wanted.itemsize) for box in choice.boxes]
            copies[key].parts.append((wanted, choice))
    if refusals:
        raise PlanRefused(refusals)
    return Plan(destination, {source.rank: source for source in sources}, tuple(copies.values()))


class Held(NamedTuple):
    """A component as one source rank holds it."""

    rank: int
    component: Component
    group: Group
    layout: Layout


def _choose(wanted: Component, layout: Layout, own: Group, found: Sequence[Held], reader: int) -> list[Choice]:
    """Holders so that every element is read exactly once. Where several hold a position the readers take turns, so that
    replicas share the load: reader r takes the (r modulo n)-th of n. Raises PlanRefused."""
    undivided = layout.undivided.union(*(held.layout.undivided for held in found))
    _check_compatible(wanted, layout, own, found, undivided)
    axis = next((held.layout.shard_axis for held in found if held.layout.shard_axis), layout.shard_axis)
    ring, whole, chosen = found[0].group.token_shard, layout.spans[axis], []
    for rank in range(ring.size):
        if not _share_tokens(TokenShard(rank=rank, size=ring.size, interleave=ring.interleave), own.token_shard):
            continue
        of_shard = [(i, held.layout) for i, held in enumerate(found) if held.group.token_shard.rank == rank]
        at = whole.start
        while at < whole.stop:
            holders = [
                (i, theirs) for i, theirs in of_shard if theirs.spans[axis].start <= at < theirs.spans[axis].stop
            ]
            if not holders:
                raise PlanRefused([_uncovered(wanted, axis, Span(at, whole.stop), found)])
            alike = [(i, theirs.spans[axis]) for i, theirs in holders if not _unlike(theirs, layout, undivided)]
            if not alike:
                raise PlanRefused(_divided(wanted, layout, [theirs for _, theirs in holders], undivided))
            position, span = alike[reader % len(alike)]
            part = Span(at, min(whole.stop, span.stop))
            boxes = _boxes(found[position].layout, layout, axis, part)
            chosen.append(Choice(position, axis, part, layout.totals[axis], boxes, SLOT in undivided))
            at = part.stop
    return chosen


def _check_compatible(
    wanted: Component, layout: Layout, own: Group, found: Sequence[Held], undivided: frozenset[str]
) -> None:
    """Raises PlanRefused with every reason why these holders cannot serve `wanted`, each once."""
    reasons: dict[tuple[str, str], Refusal] = {}

    def refuse(code: str, source: object, destination: object, axis: str = "") -> None:
        reasons.setdefault((code, axis), Refusal(code, wanted.label, str(source), str(destination)))

    if not found:
        refuse("missing_component", "no rank that lists it", f"dtype {wanted.dtype}")
    for _, _, group, theirs in found:
        if theirs.meaning != layout.meaning and (theirs.named or layout.named):
            refuse("encoding", theirs.meaning, layout.meaning)
        elif theirs.meaning != layout.meaning or theirs.itemsize != layout.itemsize:
            refuse("dtype", theirs.dtype, layout.dtype)
        if group.kind != own.kind:
            refuse("group_kind", group.kind, own.kind)
        if theirs.inner.keys() != layout.inner.keys():
            refuse("axes", sorted(theirs.inner), sorted(layout.inner))
            continue
        for axis in sorted(layout.inner):
            if theirs.totals[axis] != layout.totals[axis]:
                code = "total" if axis in (theirs.shard_axis, layout.shard_axis) else "inner_extent"
                refuse(code, f"{axis} {theirs.totals[axis]}", f"{axis} {layout.totals[axis]}", axis)
        if SLOT in undivided and theirs.meaning == layout.meaning and not _blocks_alike(group, own):
            refuse("divided", _dealt(group), _dealt(own))
    along = {held.layout.shard_axis for held in found} - {""}
    if len(along) > 1:
        refuse("axes", f"ranks sharded along different axes: {sorted(along)}", layout.shard_axis or "not sharded")
    rings = {(held.group.token_shard.size, held.group.token_shard.interleave) for held in found}
    if len(rings) > 1:
        refuse("token_shard", f"(size, interleave) differ between ranks: {sorted(rings)}", own.token_shard)
    if reasons:
        raise PlanRefused(list(reasons.values()))


def _blocks_alike(source: Group, own: Group) -> bool:
    """Whether a block of either side, where it is there as well, holds the same tokens on the other."""
    shards = source.token_shard, own.token_shard
    rings = {(each.size, each.interleave) for each in shards if each.size > 1}
    alike = len(rings) == 1 and all(each.size > 1 for each in shards)
    blockwise = all(interleave % own.block_size == 0 for _, interleave in rings)
    return source.block_size == own.block_size and (alike or blockwise)


def _dealt(group: Group) -> str:
    """How a group shares out tokens, for people."""
    shard = group.token_shard
    ring = f", dealt to {shard.size} ranks {shard.interleave} at a time" if shard.size > 1 else ""
    return f"slot: blocks of {group.block_size} tokens{ring}"


def _unlike(theirs: Layout, layout: Layout, undivided: frozenset[str]) -> list[str]:
    """Axes that may not be divided, and of which the two do not hold the same part, laid out in the same way."""
    return [
        axis
        for axis in sorted(undivided)
        if theirs.spans[axis] != layout.spans[axis] or theirs.digits(axis) != layout.digits(axis)
    ]


def _divided(wanted: Component, layout: Layout, found: Sequence[Layout], undivided: frozenset[str]) -> list[Refusal]:
    """A reason for each axis that no holder has as `wanted` has it; where each is had by some, one for all together."""
    unlike = [_unlike(theirs, layout, undivided) for theirs in found]
    axes = sorted(set.intersection(*map(set, unlike))) or sorted(set().union(*unlike))
    return [
        Refusal(
            "divided", wanted.label, " or ".join(dict.fromkeys(each.held(axis) for each in found)), layout.held(axis)
        )
        for axis in axes
    ]


def _grain(shard: TokenShard, block_size: int) -> int:
    """Global tokens after which every rank of the ring has reached a block's end."""
    return math.lcm(block_size, shard.interleave) * shard.size if shard.size > 1 else block_size


def _uncovered(wanted: Component, axis: str, missing: Span, found: Sequence[Held]) -> Refusal:
    holds = ", ".join(
        f"rank {held.rank} {axis} {held.layout.spans[axis]} (token shard {held.group.token_shard.rank})"
        for held in found
    )
    return Refusal("uncovered", wanted.label, holds, f"wants {axis} {missing}")


def _share_tokens(a: TokenShard, b: TokenShard) -> bool:
    """Whether any token lies on both: whether intervals of a and of b ever overlap.

    They begin at a.rank * a.interleave and b.rank * b.interleave and repeat with the ring; the distances between
    begins are then all those congruent to the first one modulo the greatest common divisor of the rings.
    """
    period = math.gcd(a.size * a.interleave, b.size * b.interleave)
    distance = (a.rank * a.interleave - b.rank * b.interleave) % period
    return distance < b.interleave or period - distance < a.interleave


def _boxes(source: Layout, destination: Layout, sharded: str, span: Span) -> list[Box]:
    """The boxes of everything inside one slot, offsets relative to the two components'."""
    boxes = [Box(0, 0)]
    for axis, digits in destination.inner.items():
        start, stop = span if axis == sharded else destination.spans[axis]
        source_start, own_start = start - source.spans[axis].start, start - destination.spans[axis].start
        paired = pair(source.inner[axis], source_start, digits, own_start, stop - start)
        boxes = [outer + inner for outer in boxes for inner in paired]
    return boxes
