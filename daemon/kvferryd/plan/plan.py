"""The first pure function: intersect a destination manifest with the manifests of the source ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from kvferry.errors import Refusal, shorten
from kvferry.manifest import Component, Group, Manifest, TokenShard
from kvferryd.plan.axes import Ints, Layout, Loop, Radix, layouts, step
from kvferryd.plan.choose import Choice, Held, choose
from kvferryd.plan.refused import VALUE, PlanRefused
from kvferryd.plan.rows import Boxes, Pattern, most_runs, patterns
from kvferryd.plan.segments import EVERY, Meeting, Steps


class Place(NamedTuple):
    """The place of tokens on one side: a region, and the digits of the block and slot axes in it."""

    region: int
    block: Radix
    slot: Radix


@dataclass(frozen=True, eq=False)
class Alike:
    """Components of the destination in which the same boxes are read, by one choice; their offsets at the source."""

    choice: Choice
    components: list[Component] = field(default_factory=list)
    source_offsets: list[int] = field(default_factory=list)

    @cached_property
    def origins(self) -> Ints:
        """[side, component]: the byte at which each begins."""
        return np.array([self.source_offsets, [each.offset for each in self.components]], dtype=np.int64)

    @property
    def itemsize(self) -> int:
        return self.components[0].itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one token in one component; of the whole state in a state group."""
        boxes = self.choice.boxes
        return sum(math.prod(loop.extent for loop in box.loops) for box in boxes) * self.itemsize


@dataclass(eq=False)
class Copy:
    """The reads from one group of one source rank, where all components have the same places.

    whole: only whole blocks may be read, as some component's slot axis may not be divided.
    alike: what is read, at block 0, slot 0. Everything that depends on tokens comes later, from `bind`.
    """

    source_rank: int
    source_group: Group
    destination_group: Group
    source: Place
    destination: Place
    meeting: Meeting
    whole: bool
    alike: list[Alike] = field(default_factory=list)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token; of the whole state for a state group."""
        return sum(each.nbytes * len(each.components) for each in self.alike)

    @cached_property
    def boxes(self) -> list[Boxes]:
        return [Boxes(box, each.itemsize, each.origins) for each in self.alike for box in each.choice.boxes]

    @cached_property
    def patterns(self) -> Callable[[int, Steps], list[Pattern]]:
        """The runs of one segment of so many tokens, see `rows.patterns`; computed once per length. Block sizes in the
        hundreds have many partial lengths, so not all of them are kept."""
        return lru_cache(maxsize=64)(lambda tokens, steps: patterns(self.boxes, self._slots(tokens, steps)))

    @cached_property
    def most_runs(self) -> Callable[[int, Steps], int]:
        """At least as many runs as a segment of so many tokens has, without making any; kept as `patterns` are."""
        return lru_cache(maxsize=64)(lambda tokens, steps: most_runs(self.boxes, self._slots(tokens, steps)))

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
        return min(*(each.block_size for each in groups), *self.meeting.grains, *shares)


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
    holders: dict[tuple[int, str], tuple[list[Held], list[Component]]] = defaultdict(lambda: ([], []))
    for source in sources:
        held_as = _looks(source, layout_of)
        for component in source.components:
            found, components = holders[component.layer, component.name]
            found.append(held_as(component))
            components.append(component)

    # Layers of one model look alike: who reads what from whom is settled once for each look, and kept in one place for
    # all components that have it.
    choices: dict[tuple[Held, ...], list[Choice]] = {}
    alike: dict[tuple[Choice, int, int], Alike] = {}
    copies: dict[tuple[object, ...], Copy] = {}
    unlisted: list[Component] = []
    wanted_as = _looks(destination, layout_of)
    for wanted in destination.components:
        if (wanted.layer, wanted.name) not in holders:
            unlisted.append(wanted)
            continue
        own, (found, components) = wanted_as(wanted), holders[wanted.layer, wanted.name]
        look = (own, *found)
        if look not in choices:
            try:
                choices[look] = choose(wanted, own, found)
            except PlanRefused as refused:
                refusals += refused.refusals
                continue
        for choice in choices[look]:
            component = components[choice.position]
            key = (choice, component.region, wanted.region)
            if key not in alike:
                alike[key] = Alike(choice)
                copy = _copy(found[choice.position], component.region, own, wanted.region, choice.whole)
                copies.setdefault(_together(copy), copy).alike.append(alike[key])
            alike[key].components.append(wanted)
            alike[key].source_offsets.append(component.offset)
    if unlisted:
        refusals += _unlisted(unlisted, (each for source in sources for each in source.components), destination)
    if refusals:
        raise PlanRefused(refusals)
    return Plan(destination, {source.rank: source for source in sources}, tuple(copies.values()))


def _unlisted(wanted: Sequence[Component], listed: Iterable[Component], destination: Manifest) -> Iterator[Refusal]:
    """Why none of these is listed: a layer that has others than the destination's is described otherwise."""
    own = {(each.layer, each.name) for each in destination.components}
    others: dict[int, dict[str, None]] = defaultdict(dict)
    for each in listed:
        if (each.layer, each.name) not in own:
            others[each.layer][f"{each.name} {each.meaning}"] = None
    has = {layer: shorten(", ".join(parts), VALUE) for layer, parts in others.items()}
    for each in wanted:
        code = "encoding" if each.layer in has else "missing_component"
        theirs = has.get(each.layer, "no rank that lists it")
        yield Refusal(code, each.label, theirs, f"{each.name} {each.meaning}")


def _looks(manifest: Manifest, layout_of: Callable[[Component], Layout]) -> Callable[[Component], Held]:
    """How the rank of this manifest holds each of its components."""
    groups = {group.name: group for group in manifest.groups}
    made: dict[tuple[Layout, str], Held] = {}
    near: dict[tuple[object, ...], Held] = {}

    def held_as(component: Component) -> Held:
        # Equal axes are one object in most manifests (see Component), which are not compared one by one then.
        axes, shard = id(component.axes), id(component.shard)
        key = (component.group, axes, shard, component.dtype, component.encoding, component.whole)
        held = near.get(key)
        if held is None:
            layout, name = layout_of(component), component.group
            held = near[key] = made.setdefault((layout, name), Held(manifest.rank, groups[name], layout))
        return held

    return held_as


def _copy(theirs: Held, region: int, own: Held, own_region: int, whole: bool) -> Copy:
    source = Place(region, theirs.layout.block, theirs.layout.slot)
    destination = Place(own_region, own.layout.block, own.layout.slot)
    window = theirs.group.window if own.group.window is None else own.group.window
    shards = theirs.group.token_shard, own.group.token_shard
    sizes = theirs.group.block_size, own.group.block_size
    meeting = _meeting(*shards, *sizes, source.slot, destination.slot, window)
    return Copy(theirs.rank, theirs.group, own.group, source, destination, meeting, whole)


def _together(copy: Copy) -> tuple[object, ...]:
    """Equal for copies that are one."""
    groups = copy.source_group.name, copy.destination_group.name
    return (copy.source_rank, *groups, copy.source, copy.destination, copy.whole)


_meeting = lru_cache(maxsize=256)(Meeting)


def _grain(shard: TokenShard, block_size: int) -> int:
    """Global tokens after which every rank of the ring has reached a block's end."""
    return math.lcm(block_size, shard.interleave) * shard.size if shard.size > 1 else block_size
