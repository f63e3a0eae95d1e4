"""A slow, obviously right answer to what the planner has to do: every element on its own, every byte looked at.

A rank's tables say which elements it holds; an element is known by its logical coordinate (layer, component, token,
position on every other axis), the same on both sides. So a destination element is to be read from any source
element with the same coordinate. No ranges, no strides arithmetic over more than one element, no numpy.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.manifest import BLOCK, SLOT, Component, Group, Manifest
from kvferry.tables import BlockTable, Tables

GARBAGE, SENTINEL = 0xA5, 0x5A

Coordinate = tuple[int, str, int | None, tuple[tuple[str, int], ...]]
"""(layer, component name, token, position on every other axis); a state has no token."""
Run = tuple[int, int, int, int, int, int]
"""(source rank, source region, source offset, destination region, destination offset, nbytes), as `explain --json`
prints it."""


class NotHeld(Exception):
    """The source does not hold a token that is wanted, or the destination has no block for one."""


@dataclass(frozen=True)
class Place:
    region: int
    offset: int
    nbytes: int
    rank: int = 0


@dataclass(frozen=True)
class Need:
    """A destination element and all the places where it may be read.

    optional: a sliding window has passed it, and a replica has dropped it already: that may be the one that is read.
    """

    coordinate: Coordinate
    destination: Place
    sources: frozenset[Place]
    optional: bool = False


def byte_offset(component: Component, position: Mapping[str, int]) -> int:
    """The offset in the component's region of the element at the rank's own logical position."""
    offset = component.offset
    for name in {axis.name for axis in component.axes}:
        rest = position[name]
        for axis in reversed([axis for axis in component.axes if axis.name == name]):
            rest, digit = divmod(rest, axis.extent)
            offset += digit * axis.stride
        assert rest == 0, f"position {position[name]} is not on axis {name}"
    return offset


def global_token(group: Group, local: int) -> int:
    shard = group.token_shard
    turn, within = divmod(local, shard.interleave)
    return (turn * shard.size + shard.rank) * shard.interleave + within


def is_local(group: Group, token: int) -> bool:
    shard = group.token_shard
    return (token // shard.interleave) % shard.size == shard.rank


def elements(manifest: Manifest, tables: Tables) -> Iterator[tuple[Coordinate, Place]]:
    """Every element that the tables hold, with its coordinate."""
    for component in manifest.components:
        if component.group not in tables:
            continue
        group, table = manifest.group(component.group), tables[component.group]
        names = sorted({axis.name for axis in component.axes} - {BLOCK, SLOT})
        starts = dict.fromkeys(names, 0)
        if component.shard is not None:
            starts[component.shard.axis] = component.shard.start
        for index, block in enumerate(table.block_ids.tolist()):
            for slot in range(group.block_size):
                token = None
                if group.kind == "paged":
                    token = global_token(group, table.first_token + index * group.block_size + slot)
                for inner in itertools.product(*(range(component.extent(name)) for name in names)):
                    position = dict(zip(names, inner, strict=True)) | {BLOCK: block, SLOT: slot}
                    where = tuple((name, starts[name] + position[name]) for name in names)
                    yield (
                        (component.layer, component.name, token, where),
                        Place(component.region, byte_offset(component, position), component.itemsize, manifest.rank),
                    )


def needs(
    sources: Sequence[Manifest],
    source_tables: Mapping[int, Tables],
    destination: Manifest,
    destination_tables: Tables,
    tokens: tuple[int, int],
) -> list[Need]:
    """Elements that have to be written. Raises NotHeld where the tables cannot answer the token range."""
    first, last = tokens
    for group in destination.groups:
        table = destination_tables[group.name]
        if group.kind == "paged" and len(table.block_ids):
            held = {global_token(group, table.first_token + i) for i in range(len(table.block_ids) * group.block_size)}
            before = {global_token(group, local) for local in range(table.first_token)}
            for token in range(first, last):
                if is_local(group, token) and token not in held | before:
                    raise NotHeld(f"destination group {group.name} has no block for token {token}")
    windows = [(c, m.group(c.group).window) for m in (destination, *sources) for c in m.components]
    window_of = {
        (component.layer, component.name): next(
            (w for c, w in windows if c.label == component.label and w is not None), None
        )
        for component in destination.components
    }
    holders: dict[Coordinate, set[Place]] = defaultdict(set)
    for manifest in sources:
        for coordinate, place in elements(manifest, source_tables.get(manifest.rank, {})):
            holders[coordinate].add(place)
    found = []
    for coordinate, place in elements(destination, destination_tables):
        layer, name, token, _ = coordinate
        if token is not None and not first <= token < last:
            continue
        window = window_of[layer, name]
        out_of_sight = window is not None and token is not None and token <= last - window
        if coordinate not in holders:
            if out_of_sight:
                continue  # out of sight of the next token: moved only as far as both sides hold it
            raise NotHeld(f"no source holds {coordinate}")
        optional = out_of_sight and len(holders[coordinate]) < sum(covers(source, coordinate) for source in sources)
        found.append(Need(coordinate, place, frozenset(holders[coordinate]), optional))
    return found


def covers(source: Manifest, coordinate: Coordinate) -> bool:
    """Whether the coordinate is of this rank's share, be it in its tables or not."""
    layer, name, token, where = coordinate
    for component in source.components:
        if (component.layer, component.name) == (layer, name):
            shard = component.shard
            inside = shard is None or all(
                shard.start <= at < shard.start + component.extent(axis) for axis, at in where if axis == shard.axis
            )
            return inside and (token is None or is_local(source.group(component.group), token))
    return False


def content(coordinate: Coordinate, nbytes: int) -> bytes:
    """The same for every replica of an element, different for different elements."""
    return hashlib.blake2b(repr(coordinate).encode(), digest_size=nbytes).digest()


def blank(manifest: Manifest, value: int) -> dict[int, bytearray]:
    return {region.id: bytearray([value]) * region.nbytes for region in manifest.regions}


def filled(manifest: Manifest, tables: Tables) -> dict[int, bytearray]:
    """A source rank's regions: its elements where they belong, garbage everywhere else."""
    regions = blank(manifest, GARBAGE)
    for coordinate, place in elements(manifest, tables):
        regions[place.region][place.offset : place.offset + place.nbytes] = content(coordinate, place.nbytes)
    return regions


def verify(
    sources: Sequence[Manifest],
    source_tables: Mapping[int, Tables],
    destination: Manifest,
    destination_tables: Tables,
    tokens: tuple[int, int],
    runs: Iterable[Run],
) -> None:
    """The invariant: every wanted element is written exactly once, from a right place, and nothing else is touched."""
    runs = list(runs)
    wanted = needs(sources, source_tables, destination, destination_tables, tokens)
    allowed: dict[tuple[int, int], tuple[Coordinate, frozenset[tuple[int, int, int]]]] = {}
    optional: set[tuple[int, int]] = set()
    expected = blank(destination, SENTINEL)
    for need in wanted:
        to = need.destination
        if need.optional:
            optional |= {(to.region, to.offset + byte) for byte in range(to.nbytes)}
        for byte in range(to.nbytes):
            assert (to.region, to.offset + byte) not in allowed, "the case itself writes a byte twice"
            origins = frozenset((place.rank, place.region, place.offset + byte) for place in need.sources)
            allowed[to.region, to.offset + byte] = need.coordinate, origins
        expected[to.region][to.offset : to.offset + to.nbytes] = content(need.coordinate, to.nbytes)

    memory = {m.rank: filled(m, source_tables.get(m.rank, {})) for m in sources}
    actual = blank(destination, SENTINEL)
    written: set[tuple[int, int]] = set()
    for run in runs:
        rank, source_region, source_offset, region, offset, nbytes = run
        assert nbytes > 0, f"run {run} is empty"
        assert 0 <= source_offset <= len(memory[rank][source_region]) - nbytes, f"run {run} leaves its source region"
        assert 0 <= offset <= len(actual[region]) - nbytes, f"run {run} leaves its destination region"
        for byte in range(nbytes):
            at, origin = (region, offset + byte), (rank, source_region, source_offset + byte)
            assert at in allowed, f"run {run} writes {at}, which nobody wants"
            assert at not in written, f"run {run} writes {at} a second time"
            coordinate, origins = allowed[at]
            assert origin in origins, f"run {run} reads {origin} for {coordinate}, which lies at {sorted(origins)}"
            written.add(at)
        actual[region][offset : offset + nbytes] = memory[rank][source_region][source_offset : source_offset + nbytes]
    for region, offset in optional - written:
        expected[region][offset] = SENTINEL
    missing = sorted(set(allowed) - optional - written)
    assert not missing, f"{len(missing)} bytes were never written, the first at {missing[0]}: {allowed[missing[0]]}"
    assert actual == expected


MEANT = {"bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "fp8_e4m3fn", "float8_e5m2": "fp8_e5m2"}


def meant(component: Component) -> str:
    return component.encoding or MEANT.get(component.dtype, f"opaque:{component.dtype}")


Unit = dict[Coordinate, int]
"""The elements of one block that stay together, with their byte offsets."""


def undivided(components: Iterable[Component]) -> set[str]:
    """Axes that one of these, which mean the same, says may not be divided."""
    found = list(components)
    opaque = any(meant(each).startswith("opaque:") for each in found)
    return (
        {axis.name for axis in found[0].axes} - {BLOCK} if opaque else {name for each in found for name in each.whole}
    )


def units(component: Component, group: Group, whole: set[str], blocks: Iterable[tuple[int, int]]) -> list[Unit]:
    """The units of a component in these blocks, each (id, its first local token)."""
    names = sorted({axis.name for axis in component.axes} - {BLOCK})
    start = {component.shard.axis: component.shard.start} if component.shard else {}
    found: dict[object, Unit] = defaultdict(dict)
    for block, first in blocks:
        for inner in itertools.product(*(range(component.extent(name)) for name in names)):
            at = dict(zip(names, inner, strict=True))
            token = global_token(group, first + at[SLOT]) if group.kind == "paged" else None
            where = tuple((name, start.get(name, 0) + at[name]) for name in names if name != SLOT)
            key = block, first, tuple(at[name] for name in names if name not in whole)
            coordinate = (component.layer, component.name, token, where)
            found[key][coordinate] = byte_offset(component, at | {BLOCK: block})
    return list(found.values())


def alike(one: Unit, other: Unit) -> bool:
    """The same elements, and in the same places but for where all of them begin."""
    return one.keys() == other.keys() and len({one[each] - other[each] for each in one}) == 1


def can_stay_whole(sources: Sequence[Manifest], destination: Manifest, wanted: Component) -> bool:
    """Whether every unit of it is somewhere a unit as well, of a sequence long enough for all blocks to meet."""
    held = [(m.group(c.group), c) for m in sources for c in m.components if c.label == wanted.label]
    own, whole = destination.group(wanted.group), undivided([wanted, *(c for _, c in held)])
    sides = [own, *(group for group, _ in held)]
    rings = [g.token_shard.size * (g.token_shard.interleave if g.token_shard.size > 1 else 1) for g in sides]
    sizes = [group.block_size * group.token_shard.size for group in sides if SLOT in whole]
    length = math.lcm(*rings, *sizes)

    def all_units(component: Component, group: Group) -> list[Unit]:
        if group.kind == "state":
            return units(component, group, whole, [(0, 0)])
        local = length // group.token_shard.size
        found = units(component, group, whole, [(0, first) for first in range(0, local, group.block_size)])
        return [unit for unit in found if SLOT in whole or all(token < length for _, _, token, _ in unit)]

    theirs = defaultdict(list)
    for group, component in held:
        for unit in all_units(component, group):
            theirs[frozenset(unit)].append(unit)
    return all(any(alike(unit, each) for each in theirs[frozenset(unit)]) for unit in all_units(wanted, own))


def cuts(tokens: tuple[int, int], group: Group, table: BlockTable) -> bool:
    """Whether the token range takes only a part of a block."""
    for i in range(len(table.block_ids)):
        local = table.first_token + i * group.block_size
        inside = [tokens[0] <= global_token(group, local + slot) < tokens[1] for slot in range(group.block_size)]
        if any(inside) and not all(inside):
            return True
    return False


def torn(
    sources: Sequence[Manifest],
    source_tables: Mapping[int, Tables],
    destination: Manifest,
    destination_tables: Tables,
    runs: Iterable[Run],
) -> list[Coordinate]:
    """Units of which a part is written, or that are no unit where they are read, by an element of each."""
    origins = {
        (region, to + byte): (rank, source_region, source + byte)
        for rank, source_region, source, region, to, nbytes in runs
        for byte in range(nbytes)
    }

    def blocks(tables: Tables, group: Group) -> list[tuple[int, int]]:
        table = tables[group.name]
        ids = table.block_ids.tolist()
        return [(id, table.first_token + i * group.block_size) for i, id in enumerate(ids)]

    found = []
    for wanted in destination.components:
        held = [(m, c) for m in sources for c in m.components if c.label == wanted.label]
        whole = undivided([wanted, *(c for _, c in held)])
        theirs = {
            (source.rank, component.region, frozenset(unit.values()))
            for source, component in held
            for group in [source.group(component.group)]
            for unit in units(component, group, whole, blocks(source_tables[source.rank], group))
        }
        for unit in units(wanted, own := destination.group(wanted.group), whole, blocks(destination_tables, own)):
            came = {at: origins.get((wanted.region, at)) for at in unit.values()}
            if set(came.values()) == {None}:
                continue
            if None in came.values() or len({(r, g, byte - at) for at, (r, g, byte) in came.items()}) != 1:
                found.append(min(unit))
                continue
            ((rank, region),) = {origin[:2] for origin in came.values()}
            if (rank, region, frozenset(byte for _, _, byte in came.values())) not in theirs:
                found.append(min(unit))
    return found


def mergeable(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs that could have been one: adjacent on both sides. Maximal runs have none."""
    ordered = sorted(runs, key=lambda run: (run[0], run[1], run[3], run[4]))
    return [
        (a, b)
        for a, b in itertools.pairwise(ordered)
        if a[:2] == b[:2] and a[3] == b[3] and a[2] + a[5] == b[2] and a[4] + a[5] == b[4]
    ]
