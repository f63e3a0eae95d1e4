"""From which source ranks a component is read, and which part of it from each; or why it cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import Refusal
from kvferry.manifest import SLOT, Component, Group, TokenShard
from kvferryd.plan.axes import Box, Layout, Span, pair
from kvferryd.plan.refused import PlanRefused


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """How a rank holds components of a group: one object for all of them that look alike."""

    rank: int
    group: Group
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A holder of a component, by position, and the part of the sharded axis ("": none) that is read from it.
    `total`: positions of that axis. `boxes`: relative to the two components. `whole`: only whole blocks may be read."""

    position: int
    axis: str
    span: Span
    total: int
    boxes: list[Box]
    whole: bool


def choose(wanted: Component, own: Held, found: Sequence[Held]) -> list[Choice]:
    """Holders so that every element is read exactly once. If several hold a position the readers take turns, so that
    replicas share the load: reader r takes the (r modulo n)-th of n. Raises PlanRefused."""
    layout = own.layout
    undivided = layout.undivided.union(*(held.layout.undivided for held in found))
    _check_compatible(wanted, own, found, undivided)
    axis = next((held.layout.shard_axis for held in found if held.layout.shard_axis), layout.shard_axis)
    ring, whole, chosen = found[0].group.token_shard, layout.spans[axis], []
    for rank in range(ring.size):
        if not _share_tokens(TokenShard(rank=rank, size=ring.size, interleave=ring.interleave), own.group.token_shard):
            continue
        of_shard = [(i, held.layout) for i, held in enumerate(found) if held.group.token_shard.rank == rank]
        at = whole.start
        while at < whole.stop:
            holders = [
                (i, theirs) for i, theirs in of_shard if theirs.spans[axis].start <= at < theirs.spans[axis].stop
            ]
            if not holders:
                raise PlanRefused([_uncovered(wanted, axis, Span(at, whole.stop), found)])
            equal = [(i, theirs.spans[axis]) for i, theirs in holders if not _unlike(theirs, layout, undivided)]
            if not equal:
                raise PlanRefused(_divided(wanted, layout, [theirs for _, theirs in holders], undivided))
            position, span = equal[own.rank % len(equal)]
            part = Span(at, min(whole.stop, span.stop))
            boxes = _boxes(found[position].layout, layout, axis, part)
            chosen.append(Choice(position, axis, part, layout.totals[axis], boxes, SLOT in undivided))
            at = part.stop
    return chosen


def _check_compatible(wanted: Component, holder: Held, found: Sequence[Held], undivided: frozenset[str]) -> None:
    """Raises PlanRefused with every reason why these holders cannot serve `wanted`, which `holder` has, each once."""
    layout, own = holder.layout, holder.group
    reasons: dict[tuple[str, str], Refusal] = {}

    def refuse(code: str, source: object, destination: object, axis: str = "") -> None:
        reasons.setdefault((code, axis), Refusal(code, wanted.label, str(source), str(destination)))

    for group, theirs in ((held.group, held.layout) for held in found):
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
