"""Between what Python code holds and what travels: manifests, tables and problems as protobuf messages and back.

What comes from the wire is checked here, so that no other code meets an unchecked message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvferry.errors import CLASSES, Internal, Kind, KvferryError, Malformed, Refusal
from kvferry.manifest import Component, Group, Manifest, ManifestError
from kvferry.tables import BlockTable, Tables
from kvferry.v1 import layout_pb2 as pb

T = TypeVar("T")

MAX_PROBLEM_BYTES = 6000
"""A problem travels in trailing metadata, of which gRPC takes 8 KiB and drops the whole call's answer beyond."""

_MEMORY_KINDS = {"host": pb.MEMORY_KIND_HOST, "cuda": pb.MEMORY_KIND_CUDA}
_GROUP_KINDS = {"paged": pb.GROUP_KIND_PAGED, "state": pb.GROUP_KIND_STATE}
_MEMORY_KIND_NAMES = {value: name for name, value in _MEMORY_KINDS.items()}
_GROUP_KIND_NAMES = {value: name for name, value in _GROUP_KINDS.items()}


def manifest_to_proto(manifest: Manifest) -> pb.Manifest:
    """Raises ManifestError (`malformed_manifest`) where a number does not fit its field on the wire."""
    return pb.Manifest(
        engine_id=manifest.engine_id,
        epoch=manifest.epoch,
        model=pb.Model(name=manifest.model.name, fingerprint=manifest.model.fingerprint),
        rank=_fits("rank", manifest.rank),
        world_size=_fits("world_size", manifest.world_size),
        parallel={name: _fits(f"parallel.{name}", value) for name, value in manifest.parallel.items()},
        regions=[
            pb.Region(id=region.id, kind=_MEMORY_KINDS[region.kind], nbytes=region.nbytes)
            for region in manifest.regions
        ],
        groups=[_group_to_proto(group) for group in manifest.groups],
        components=[_component_to_proto(component) for component in manifest.components],
    )


def manifest_from_proto(message: pb.Manifest) -> Manifest:
    """The checked manifest. Raises ManifestError naming component, field and value; nothing unspecified passes."""
    return Manifest.from_dict(
        {
            "engine_id": message.engine_id,
            "epoch": message.epoch,
            "model": {"name": message.model.name, "fingerprint": message.model.fingerprint},
            "rank": message.rank,
            "world_size": message.world_size,
            "parallel": dict(message.parallel),
            "regions": [
                {
                    "id": region.id,
                    "kind": _known(_MEMORY_KIND_NAMES, region.kind, f"regions[{region.id}].kind"),
                    "nbytes": region.nbytes,
                }
                for region in message.regions
            ],
            "groups": [_group_from_proto(group) for group in message.groups],
            "components": [_component_from_proto(component) for component in message.components],
        }
    )


def tables_to_proto(tables: Tables) -> pb.Tables:
    """Raises KvferryError (`malformed_tables`) where a group's name is no text."""
    try:
        return pb.Tables(
            groups={
                name: pb.BlockTable(block_ids=table.block_ids.tolist(), first_token=table.first_token)
                for name, table in tables.items()
            }
        )
    except UnicodeEncodeError as error:  # a lone surrogate, as a JSON body may hold
        raise Malformed(
            "malformed_tables",
            "a group's name is not text",
            field="tables",
            value=ascii(error.object),
            remedy="name groups as the manifest does",
        ) from None


def tables_from_proto(message: pb.Tables, field: str = "tables") -> dict[str, BlockTable]:
    """Raises KvferryError (`malformed_tables`) naming the group."""
    return {
        name: BlockTable.of(
            np.fromiter(table.block_ids, np.int64, count=len(table.block_ids)),
            table.first_token,
            field=f"{field}.{name}",
        )
        for name, table in message.groups.items()
    }


def problem_to_proto(error: KvferryError) -> pb.Problem:
    """At most MAX_PROBLEM_BYTES: the last refusals of very many are left out, the message says how many there were."""
    problem = pb.Problem(
        kind=pb.ProblemKind.Value(f"PROBLEM_KIND_{error.kind.name}"),
        code=error.code,
        message=_text(error.message),
        field=_text(error.field),
        value=_text(error.value),
        remedy=_text(error.remedy),
    )
    for refusal in error.refusals:
        problem.refusals.add(
            code=refusal.code,
            component=_text(refusal.component),
            source=_text(refusal.source),
            destination=_text(refusal.destination),
        )
        if problem.ByteSize() > MAX_PROBLEM_BYTES:
            del problem.refusals[-1]
            break
    return problem


def _text(value: str, limit: int = 1000) -> str:
    """What protobuf takes: a value from a JSON body may hold lone surrogates, told as `\\ud800`."""
    clean = value.encode("utf-8", "backslashreplace").decode("utf-8")
    return clean if len(clean) <= limit else f"{clean[: limit - 3]}..."


def problem_from_proto(message: pb.Problem) -> KvferryError:
    """The error as the other side raised it; one that names no code is `internal`, and so is one of no known kind."""
    known = message.kind in pb.ProblemKind.values()
    name = pb.ProblemKind.Name(message.kind).removeprefix("PROBLEM_KIND_") if known else ""
    raised = CLASSES[Kind[name]] if name in Kind.__members__ else Internal
    return raised(
        message.code or "internal",
        message.message or "the other side failed and did not say why",
        field=message.field,
        value=message.value,
        remedy=message.remedy,
        refusals=tuple(Refusal(r.code, r.component, r.source, r.destination) for r in message.refusals),
    )


def _group_to_proto(group: Group) -> pb.Group:
    where, shard = f"groups[{group.name}]", group.token_shard
    return pb.Group(
        name=group.name,
        kind=_GROUP_KINDS[group.kind],
        block_size=_fits(f"{where}.block_size", group.block_size),
        num_blocks=group.num_blocks,
        window=None if group.window is None else _fits(f"{where}.window", group.window),
        token_shard=pb.TokenShard(
            rank=_fits(f"{where}.token_shard.rank", shard.rank),
            size=_fits(f"{where}.token_shard.size", shard.size),
            interleave=_fits(f"{where}.token_shard.interleave", shard.interleave),
        ),
    )


def _group_from_proto(group: pb.Group) -> dict[str, object]:
    shard = group.token_shard
    return {
        "name": group.name,
        "kind": _known(_GROUP_KIND_NAMES, group.kind, f"groups[{group.name}].kind"),
        "block_size": group.block_size,
        "num_blocks": group.num_blocks,
        "window": _given(group, "window", lambda: group.window),
        # an absent token_shard is the whole sequence; one that is there has to be complete
        "token_shard": _given(
            group, "token_shard", lambda: {"rank": shard.rank, "size": shard.size, "interleave": shard.interleave}
        )
        or {},
    }


def _component_to_proto(component: Component) -> pb.Component:
    where, shard = f"components[{component.label}]", component.shard
    return pb.Component(
        group=component.group,
        layer=_fits(f"{where}.layer", component.layer),
        name=component.name,
        dtype=component.dtype,
        region=_fits(f"{where}.region", component.region),
        offset=component.offset,
        axes=[pb.Axis(name=axis.name, extent=axis.extent, stride=axis.stride) for axis in component.axes],
        shard=None if shard is None else pb.Shard(axis=shard.axis, start=shard.start, total=shard.total),
    )


def _component_from_proto(component: pb.Component) -> dict[str, object]:
    shard = component.shard
    return {
        "group": component.group,
        "layer": component.layer,
        "name": component.name,
        "dtype": component.dtype,
        "region": component.region,
        "offset": component.offset,
        "axes": [{"name": axis.name, "extent": axis.extent, "stride": axis.stride} for axis in component.axes],
        "shard": _given(component, "shard", lambda: {"axis": shard.axis, "start": shard.start, "total": shard.total}),
    }


def _given(message: pb.Group | pb.Component, field: str, value: Callable[[], T]) -> T | None:
    return value() if message.HasField(field) else None  # type: ignore[arg-type]  # a checked name


def _known(names: dict[T, str], value: T, field: str) -> str:
    if value not in names:
        raise ManifestError(
            "malformed_manifest",
            f"the manifest is malformed at {field}: it is unspecified or of a later protocol",
            field=field,
            value=value,
            remedy=f"one of {sorted(names.values())}",
        )
    return names[value]


def _fits(field: str, value: int) -> int:
    if not 0 <= value < 2**32:
        raise ManifestError(
            "malformed_manifest",
            f"the manifest is malformed at {field}: it is not an unsigned 32-bit integer",
            field=field,
            value=value,
            remedy="0 to 4294967295",
        )
    return value
