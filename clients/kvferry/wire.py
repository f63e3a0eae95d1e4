"""Manifests, block tables and problems as protobuf messages, and back.

Messages are checked here, so that no other code meets an unchecked one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvferry.errors import CLASSES, Kind, KvferryError, Malformed, Refusal, shorten
from kvferry.manifest import Manifest, ManifestError
from kvferry.manifest.model import MOST
from kvferry.schemas import LeaseState, TransferState
from kvferry.tables import BlockTable, Tables, check_count
from kvferry.v1 import layout_pb2 as pb

M = TypeVar("M", bound=Message)
MAX_PROBLEM_BYTES = 6000
"""A problem travels in trailing metadata, of which gRPC takes 8 KiB and drops the whole call's answer beyond."""

LIMIT, MESSAGE_LIMIT = 1000, 2000
"""Characters of one field of a problem, and of its message, which may name ten reasons."""

_KINDS = {kind: pb.ProblemKind.Value(f"PROBLEM_KIND_{kind.name}") for kind in Kind}
TRANSFER_STATES = {state: pb.TransferState.Value(f"TRANSFER_STATE_{state.name}") for state in TransferState}
LEASE_STATES = {state: pb.LeaseState.Value(f"LEASE_STATE_{state.name}") for state in LeaseState}
PATHS = {name.removeprefix("PATH_").lower(): value for name, value in pb.Path.items()}
"""Keyed by the word that records have; `unspecified` where they have none."""
WORDS = {FieldDescriptor.TYPE_STRING: "text", FieldDescriptor.TYPE_BYTES: "bytes",
         FieldDescriptor.TYPE_DOUBLE: "a number", FieldDescriptor.TYPE_BOOL: "True or False"}  # fmt: skip
"""The kinds of fields, except integers."""
_MEMORY_KIND, _GROUP_KIND = "MEMORY_KIND_", "GROUP_KIND_"


def manifest_to_proto(manifest: Manifest) -> pb.Manifest:
    """Raises ManifestError (`malformed_manifest`) where it is none, or a number does not fit its field on the wire."""
    try:
        data = manifest.model_dump()
    except AttributeError:
        message, name = "this is no manifest", type(manifest).__name__
        remedy = "for example what ManifestBuilder.build() returns"
        raise ManifestError("malformed_manifest", message, field="manifest", value=name, remedy=remedy) from None
    for region in data["regions"]:
        region["kind"] = f"{_MEMORY_KIND}{region['kind'].upper()}"
    for group in data["groups"]:
        group["kind"] = f"{_GROUP_KIND}{group['kind'].upper()}"
    try:
        return pb.Manifest(**data)
    except ValueError as error:  # a copy that was changed, which pydantic does not check
        message = f"the manifest cannot be sent: {error}"
        remedy = "read it with Manifest.from_dict, which names what does not fit"
        raise ManifestError("malformed_manifest", message, field="manifest", value=error, remedy=remedy) from None


def manifest_from_proto(message: pb.Manifest) -> Manifest:
    """The checked manifest. Raises ManifestError naming component, field and value; nothing unspecified passes."""
    data = _plain(message)
    for region in data["regions"]:
        region["kind"] = _kind(pb.MemoryKind, _MEMORY_KIND, region["kind"], f"regions[{region['id']}].kind")
    for group in data["groups"]:
        group["kind"] = _kind(pb.GroupKind, _GROUP_KIND, group["kind"], f"groups[{group['name']}].kind")
    return Manifest.from_dict(data)


def layout_digest(message: pb.Manifest) -> bytes:
    """Names all of a manifest but whose it is: equal for engines that differ by their ids and epochs alone."""
    layout = pb.Manifest()
    layout.CopyFrom(message)
    layout.ClearField("engine_id")
    layout.ClearField("epoch")
    return hashlib.sha256(layout.SerializeToString(deterministic=True)).digest()


def _plain(message: Message) -> dict[str, Any]:
    """The fields of a manifest, or of a part of it, by name; absent messages and absent optional fields are left out.
    If there are too many of a kind one too many is read, which Manifest refuses."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if isinstance(value, Message):
            value = _plain(value)
        elif isinstance(value, Mapping):
            value = dict(itertools.islice(value.items(), MOST[field.name] + 1))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            some = itertools.islice(value, MOST[field.name] + 1)
            every = (_plain(each) if isinstance(each, Message) else each for each in some)
            value = every if field.name == "components" else list(every)  # each of many is let go when it is read
        plain[field.name] = value
    return plain


def _kind(enum: Any, prefix: str, number: int, field: str) -> str:
    known: dict[int, str] = {value: name.removeprefix(prefix).lower() for name, value in enum.items() if value}
    if number not in known:
        message = f"the manifest is malformed at {field}: it is unspecified or of a later protocol"
        remedy = f"one of {sorted(known.values())}"
        raise ManifestError("malformed_manifest", message, field=field, value=number, remedy=remedy)
    return known[number]


def tables_to_proto(tables: Tables) -> pb.Tables:
    """Raises KvferryError (`malformed_tables`) where a table is none, or a group's name is no text."""
    try:
        return pb.Tables(
            groups={
                name: pb.BlockTable(block_ids=table.block_ids.tolist(), first_token=table.first_token)
                for name, table in tables.items()
            }
        )
    except AttributeError:
        message, remedy = "these are no block tables", 'for example {"full": BlockTable.of([7, 3, 9])}'
        raise Malformed("malformed_tables", message, field="tables", value=tables, remedy=remedy) from None
    except UnicodeEncodeError as error:  # a lone surrogate, as a JSON body may hold
        message = "a group's name is not text"
        remedy = "name groups as the manifest does"
        raise Malformed("malformed_tables", message, field="tables", value=ascii(error.object), remedy=remedy) from None


def request_of(kind: Callable[..., M], **fields: object) -> M:
    """Raises KvferryError (`malformed_request`) naming the field whose value is of another type, or does not fit."""
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError) as error:
                wanted = kind.DESCRIPTOR.fields_by_name[name]  # type: ignore[attr-defined]  # a class of messages
                fits = wanted.message_type.name if wanted.message_type else WORDS.get(wanted.type, "an integer")
                remedy = f"give {fits}"
                message = f"{name} cannot be sent: {error}"
                raise Malformed("malformed_request", message, field=name, value=value, remedy=remedy) from None
        raise


def tables_from_proto(message: pb.Tables, field: str = "tables") -> dict[str, BlockTable]:
    """Raises KvferryError (`malformed_tables`) naming the group."""
    if (count := len(message.groups)) > (most := MOST["groups"]):
        why, remedy = f"{field} name more groups than a manifest may have", f"name at most {most}"
        raise Malformed("malformed_tables", why, field=field, value=count, remedy=remedy)
    for name, table in message.groups.items():
        check_count(len(table.block_ids), f"{field}.{name}")
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
        kind=_KINDS[error.kind],
        code=error.code,
        message=shorten(error.message, MESSAGE_LIMIT),
        field=shorten(error.field, LIMIT),
        value=error.value,
        remedy=shorten(error.remedy, LIMIT),
    )
    for refusal in error.refusals:
        sides = {name: shorten(getattr(refusal, name), LIMIT) for name in ("component", "source", "destination")}
        problem.refusals.add(code=refusal.code, **sides)
        if problem.ByteSize() > MAX_PROBLEM_BYTES:
            del problem.refusals[-1]
            break
    return problem


def problem_from_proto(message: pb.Problem) -> KvferryError:
    """The error as the other side raised it; one that names no code is `internal`, and so is one of no known kind. No
    more of its refusals than `problem_to_proto` sends."""
    kind = next((kind for kind, number in _KINDS.items() if number == message.kind), Kind.INTERNAL)
    sizes = itertools.accumulate(refusal.ByteSize() for refusal in message.refusals)
    told = message.refusals[: sum(1 for _ in itertools.takewhile(MAX_PROBLEM_BYTES.__ge__, sizes))]
    return CLASSES[kind](
        shorten(message.code) or "internal",
        message.message or "the other side failed and did not say why",
        field=message.field,
        value=message.value,
        remedy=message.remedy,
        refusals=tuple(Refusal(r.code, r.component, r.source, r.destination) for r in told),
    )


@functools.lru_cache(maxsize=1024)  # a reader asks twice for each transfer
def announced_as(request_id: str) -> str:
    """The name for readers that may not know the request id: with the id they could close its lease."""
    return hashlib.sha256(request_id.encode()).hexdigest()
