"""The rules of a manifest. Every breach is one ManifestError that names component, field, value and remedy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvferry.manifest.model import BLOCK, ITEMSIZE, SLOT, Component, Group, ManifestError, Region
from kvferry.manifest.overlap import overlap


def check(regions: Sequence[Region], groups: Sequence[Group], components: Sequence[Component]) -> None:
    """Check every rule that docs/protocol.md lists. Raises ManifestError at the first breach."""
    _unique("regions", "id", (region.id for region in regions))
    _unique("groups", "name", (group.name for group in groups))
    _unique("components", "(layer, name)", (component.label for component in components))
    for group in groups:
        _check_group(group)
    by_name, by_id = {group.name: group for group in groups}, {region.id: region for region in regions}
    for component in components:
        _check_component(component, by_name, by_id)
    _check_apart(components)


def _unique(where: str, key: str, values: Iterable[object]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ManifestError(
                "duplicate",
                f"{where}: {key} {value} occurs {count} times",
                field=f"{where}.{key}",
                value=value,
                remedy="list each once",
            )


def _check_group(group: Group) -> None:
    shard = group.token_shard
    if shard.rank >= shard.size:
        raise ManifestError(
            "token_shard_out_of_range",
            f"group {group.name}: token_shard rank {shard.rank} does not exist among {shard.size}",
            field=f"groups[{group.name}].token_shard.rank",
            value=shard.rank,
            remedy="ranks count from 0 to size - 1",
        )
    if group.kind == "state" and (group.block_size != 1 or group.window is not None or shard.size != 1):
        raise ManifestError(
            "state_group",
            f"state group {group.name} has a block_size, window or token_shard of its own",
            field=f"groups[{group.name}]",
            value=group.model_dump(),
            remedy="one block of a state group holds one request's whole state: leave them out",
        )


def _check_component(component: Component, groups: Mapping[str, Group], regions: Mapping[int, Region]) -> None:
    def breach(code: str, field: str, value: object, message: str, remedy: str) -> ManifestError:
        return ManifestError(
            code,
            f"component {component.label}: {message}",
            component=component.label,
            field=f"components[{component.label}].{field}",
            value=value,
            remedy=remedy,
        )

    group, region = groups.get(component.group), regions.get(component.region)
    if group is None:
        raise breach("unknown_group", "group", component.group, "its group is not listed", f"one of {sorted(groups)}")
    if region is None:
        raise breach(
            "unknown_region", "region", component.region, "its region is not listed", f"one of {sorted(regions)}"
        )
    if component.dtype not in ITEMSIZE:
        raise breach("unknown_dtype", "dtype", component.dtype, "its dtype is not known", f"one of {sorted(ITEMSIZE)}")

    names = {axis.name for axis in component.axes}
    wanted = {BLOCK, SLOT} if group.kind == "paged" else {BLOCK}
    if names & {BLOCK, SLOT} != wanted:
        raise breach(
            "axes",
            "axes",
            sorted(names),
            f"a component of {group.kind} group {group.name} has the wrong token axes",
            "paged components have the axes block and slot, state components have block and no slot",
        )
    for name, total, source in ((BLOCK, group.num_blocks, "num_blocks"), (SLOT, group.block_size, "block_size")):
        if name in wanted and component.extent(name) != total:
            raise breach(
                "axis_extent",
                f"axes[{name}].extent",
                component.extent(name),
                f"its {name} axis does not match {source} = {total} of group {group.name}",
                f"the extents of all {name} axes multiply to {source}",
            )

    shard = component.shard
    if shard is not None:
        if shard.axis not in names - {BLOCK, SLOT}:
            raise breach(
                "shard_axis",
                "shard.axis",
                shard.axis,
                "it is sharded along an axis that it lacks or that is block or slot",
                f"one of {sorted(names - {BLOCK, SLOT})}; tokens are sharded with the group's token_shard",
            )
        if shard.start + component.extent(shard.axis) > shard.total:
            raise breach(
                "shard_range",
                "shard",
                f"[{shard.start}, {shard.start + component.extent(shard.axis)}) of {shard.total}",
                "its shard leaves the global axis",
                "start + extent must not exceed total",
            )

    span = component.itemsize
    for axis in sorted((axis for axis in component.axes if axis.extent > 1), key=lambda axis: axis.stride):
        if axis.stride < span:
            raise breach(
                "overlapping_strides",
                f"axes[{axis.name}].stride",
                axis.stride,
                f"positions of axis {axis.name} lie {axis.stride} bytes apart but span {span}",
                "strides are in bytes; no two elements may share a byte",
            )
        span += (axis.extent - 1) * axis.stride
    if component.offset + span > region.nbytes:
        raise breach(
            "out_of_region",
            "offset",
            component.offset,
            f"it spans {span} bytes from offset {component.offset} and leaves region {region.id} of {region.nbytes}",
            "make the region larger or the strides, extents or offset smaller",
        )


def _check_apart(components: Iterable[Component]) -> None:
    """Every element of a group has bytes of its own. Groups may share memory: they take different blocks of it."""
    together: dict[tuple[str, int], list[Component]] = defaultdict(list)
    for component in components:
        together[component.group, component.region].append(component)
    for (group, region), members in together.items():
        found = overlap(members)
        if found is not None:
            first, second = (members[index] for index in found)
            raise ManifestError(
                "overlapping_components",
                f"component {second.label}: it shares bytes of region {region} with component {first.label}, "
                f"and both are of group {group}",
                component=second.label,
                field=f"components[{second.label}].offset",
                value=second.offset,
                remedy="give each component bytes of its own; only groups may share memory",
            )
