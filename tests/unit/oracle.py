"""A slow, obviously right answer to what the planner has to do: every element on its own, every byte looked at.

A rank's tables say which elements it holds; an element is known by its logical coordinate (layer, component, token,
position on every other axis), the same on both sides. So a destination element is to be read from any source
element with the same coordinate. No ranges, no strides arithmetic over more than one element, no numpy.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.manifest import BLOCK, SLOT, Component, Group, Manifest
from kvferry.tables import Tables

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
    """One destination element and all the places where it may be read.

    optional: a sliding window has passed it, and a replica has dropped it already: that may be the one that is read.
    """

    coordinate: Coordinate
    destination: Place
    sources: frozenset[Place]
    optional: bool = False


def byte_offset(component: Component, position: Mapping[str, int]) -> int:
    """Where the element at the rank's own logical position lies in the component's region."""
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
    """What has to be written. Raises NotHeld where the tables cannot answer the token range."""
    first, last = tokens
    for group in destination.groups:
        table = destination_tables[group.name]
        if group.kind == "paged" and len(table.block_ids):
            held = {global_token(group, table.first_token + i) for i in range(len(table.block_ids) * group.block_size)}
            before = {global_token(group, local) for local in range(table.first_token)}
            for token in range(first, last):
                if is_local(group, token) and token not in held | before:
                    raise NotHeld(f"destination group {group.name} has no block for token {token}")
    windows = [(c, m.group(c.group).window) for m in (*sources, destination) for c in m.components]
    window_of = {
        (component.layer, component.name): min(
            (w for c, w in windows if c.label == component.label and w is not None), default=None
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


def mergeable(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs that could have been one: adjacent on both sides. Maximal runs have none."""
    ordered = sorted(runs, key=lambda run: (run[0], run[1], run[3], run[4]))
    return [
        (a, b)
        for a, b in itertools.pairwise(ordered)
        if a[:2] == b[:2] and a[3] == b[3] and a[2] + a[5] == b[2] and a[4] + a[5] == b[4]
    ]
