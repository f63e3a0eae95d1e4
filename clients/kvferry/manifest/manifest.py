"""The manifest of one engine rank, read and checked. Every breach of a rule is one ManifestError."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated

from pydantic import FailFast, Field, ValidationError

from kvferry.manifest.encoding import ENCODINGS, OPAQUE, fits, is_known
from kvferry.manifest.model import (
    BLOCK,
    ITEMSIZE,
    MOST,
    SLOT,
    Component,
    Group,
    ManifestError,
    ModelInfo,
    Name,
    Part,
    Region,
    Small,
    SmallCount,
    malformed,
)
from kvferry.manifest.overlap import overlap


class Manifest(Part):
    """An engine rank's cache. Build it with `ManifestBuilder`, or read it with `Manifest.from_json`.

    Constructing one directly checks types only; `validated()` checks every rule.
    """

    engine_id: Name
    epoch: Name
    model: ModelInfo
    rank: Small = 0
    world_size: SmallCount = 1
    parallel: dict[str, Small] = Field(default_factory=dict, max_length=MOST["parallel"])
    regions: Annotated[tuple[Region, ...], Field(min_length=1, max_length=MOST["regions"])]
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=MOST["groups"])]
    components: Annotated[tuple[Component, ...], Field(min_length=1, max_length=MOST["components"]), FailFast()]

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse and check. Raises ManifestError naming component, field and value."""
        return _checked(lambda: cls.model_validate_json(text))

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """The same for parsed JSON."""
        return _checked(lambda: cls.model_validate(data))

    def of_engine(self, engine_id: str, epoch: str) -> Manifest:
        """The manifest of another engine whose cache is the same; it shares all parts with this one. Raises
        ManifestError."""
        return _read(lambda: Manifest.model_validate(dict(self) | {"engine_id": engine_id, "epoch": epoch}))

    def to_json(self) -> str:
        return self.model_dump_json(exclude_none=False)

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def validated(self) -> Manifest:
        """Check every rule that docs/protocol.md lists; returns self. Raises ManifestError at the first breach."""
        if self.rank >= self.world_size:
            message = f"rank {self.rank} does not exist in a world of {self.world_size}"
            remedy = "ranks count from 0 to world_size - 1"
            raise ManifestError("rank_out_of_range", message, field="rank", value=self.rank, remedy=remedy)
        _check_unique("regions", "id", (region.id for region in self.regions))
        _check_unique("groups", "name", (group.name for group in self.groups))
        _check_unique("components", "(layer, name)", (component.label for component in self.components))
        for group in self.groups:
            _check_group(group)
        groups, regions = {group.name: group for group in self.groups}, {region.id: region for region in self.regions}
        for component in self.components:
            _check_component(component, groups, regions)
        _check_apart(self.components)
        return self


def _checked(parse: Callable[[], Manifest]) -> Manifest:
    return _read(parse).validated()


def _read(parse: Callable[[], Manifest]) -> Manifest:
    try:
        return parse()
    except ValidationError as error:
        raise malformed(error) from None


def _check_unique(where: str, key: str, values: Iterable[object]) -> None:
    for value, count in Counter(values).most_common(1):
        if count > 1:
            message = f"{where}: {key} {value} occurs {count} times"
            raise ManifestError("duplicate", message, field=f"{where}.{key}", value=value, remedy="list each once")


def _check_group(group: Group) -> None:
    shard = group.token_shard
    if shard.rank >= shard.size:
        message = f"group {group.name}: token_shard rank {shard.rank} does not exist among {shard.size}"
        field, remedy = f"groups[{group.name}].token_shard.rank", "ranks count from 0 to size - 1"
        raise ManifestError("token_shard_out_of_range", message, field=field, value=shard.rank, remedy=remedy)
    if group.kind == "state" and (group.block_size != 1 or group.window is not None or shard.size != 1):
        message = f"state group {group.name} has a block_size, window or token_shard of its own"
        field, remedy = (
            f"groups[{group.name}]",
            "one block of a state group holds one request's whole state: leave them out",
        )
        raise ManifestError("state_group", message, field=field, value=group.model_dump(), remedy=remedy)


def _check_component(component: Component, groups: Mapping[str, Group], regions: Mapping[int, Region]) -> None:
    def breach(code: str, field: str, value: object, message: str, remedy: str) -> ManifestError:
        return ManifestError(code, message, component=component.label, field=field, value=value, remedy=remedy)

    def unlisted(field: str, value: object, listed: Iterable[int] | Iterable[str]) -> ManifestError:
        return breach(f"unknown_{field}", field, value, f"its {field} is not listed", f"one of {sorted(listed)}")

    group, region = groups.get(component.group), regions.get(component.region)
    if group is None:
        raise unlisted("group", component.group, groups)
    if region is None:
        raise unlisted("region", component.region, regions)
    if component.dtype not in ITEMSIZE:
        raise unlisted("dtype", component.dtype, ITEMSIZE)
    encoding = component.encoding
    if encoding is not None and not is_known(encoding):
        message = "nobody knows its encoding"
        remedy = f"one of {sorted(ENCODINGS)}; {OPAQUE}NAME for bytes that are only moved whole"
        raise breach("unknown_encoding", "encoding", encoding, message, remedy)
    if encoding is not None and not fits(component.dtype, component.itemsize, encoding):
        sizes = f"{ENCODINGS[encoding]} and {component.itemsize} bytes"
        message = f"elements of dtype {component.dtype} cannot be so encoded ({sizes} an element)"
        remedy = "leave out the encoding of a float dtype; view raw bytes as integers as wide as the encoding"
        raise breach("encoding_dtype", "encoding", encoding, message, remedy)

    names = {axis.name for axis in component.axes}
    wanted = {BLOCK, SLOT} if group.kind == "paged" else {BLOCK}
    if names & {BLOCK, SLOT} != wanted:
        message = f"a component of {group.kind} group {group.name} has the wrong token axes"
        remedy = "paged components have the axes block and slot, state components have block and no slot"
        raise breach("axes", "axes", sorted(names), message, remedy)
    for name, total, source in ((BLOCK, group.num_blocks, "num_blocks"), (SLOT, group.block_size, "block_size")):
        extent = component.extent(name)
        if name in wanted and extent != total:
            message = f"its {name} axis does not match {source} = {total} of group {group.name}"
            remedy = f"the extents of all {name} axes multiply to {source}"
            raise breach("axis_extent", f"axes[{name}].extent", extent, message, remedy)

    if unknown := sorted({*component.whole} - (names - {BLOCK})):
        message = "an axis that may not be divided is none of its axes, or is block"
        remedy = f"one or more of {sorted(names - {BLOCK})}; a block is never divided but along its other axes"
        raise breach("whole_axis", "whole", unknown[0], message, remedy)

    shard = component.shard
    if shard is not None:
        if shard.axis not in names - {BLOCK, SLOT}:
            message = "it is sharded along an axis that it lacks or that is block or slot"
            remedy = f"one of {sorted(names - {BLOCK, SLOT})}; tokens are sharded with the group's token_shard"
            raise breach("shard_axis", "shard.axis", shard.axis, message, remedy)
        stop = shard.start + component.extent(shard.axis)
        if stop > shard.total:
            value, remedy = f"[{shard.start}, {stop}) of {shard.total}", "start + extent must not exceed total"
            raise breach("shard_range", "shard", value, "its shard leaves the global axis", remedy)

    span = component.itemsize
    for axis in sorted((axis for axis in component.axes if axis.extent > 1), key=lambda axis: axis.stride):
        if axis.stride < span:
            message = f"positions of axis {axis.name} lie {axis.stride} bytes apart but span {span}"
            remedy = "strides are in bytes; no two elements may share a byte"
            raise breach("overlapping_strides", f"axes[{axis.name}].stride", axis.stride, message, remedy)
        span += (axis.extent - 1) * axis.stride
    at = component.offset
    if at + span > region.nbytes:
        message = f"it spans {span} bytes from offset {at} and leaves region {region.id} of {region.nbytes}"
        remedy = "make the region larger or the strides, extents or offset smaller"
        raise breach("out_of_region", "offset", at, message, remedy)


def _check_apart(components: Sequence[Component]) -> None:
    """Every element of a group has bytes of its own. Groups may share memory: they take different blocks of it."""
    together: dict[tuple[str, int], list[Component]] = defaultdict(list)
    for component in components:
        together[component.group, component.region].append(component)
    for (group, region), members in together.items():
        found = overlap(members)
        if found is not None:
            first, second = (members[index] for index in found)
            message = f"it shares bytes of region {region} with component {first.label}, and both are of group {group}"
            remedy = "give each component bytes of its own; only groups may share memory"
            breach = partial(ManifestError, component=second.label)
            raise breach("overlapping_components", message, field="offset", value=second.offset, remedy=remedy)
