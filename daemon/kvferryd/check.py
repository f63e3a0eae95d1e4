"""Checks of a request's fields and blocks, made before anything is accepted. Each raises KvferryError."""

from __future__ import annotations

from kvferry.errors import Malformed
from kvferry.manifest import Group, Manifest
from kvferry.schemas import MAX_METADATA, MAX_NUMBER
from kvferry.tables import BlockTable, Tables
from kvferryd.config import WAYS
from kvferryd.plan.bind import check_holds, destination_table_of, table_of
from kvferryd.plan.segments import local_tokens

MAX_SECONDS = 86400.0
MAX_DIGEST = 64


def check_request_id(request_id: str) -> None:
    if not 0 < len(request_id) <= 256:
        why, remedy = "a request id has 1 to 256 characters", "use the router's X-Request-Id"
        raise Malformed("malformed_request_id", why, field="request_id", value=request_id, remedy=remedy)


def check_seconds(field: str, seconds: float) -> None:
    """A time to live or a deadline; 0 stands for the default. NaN would upset the order of the event loop's timers."""
    if not 0 <= seconds <= MAX_SECONDS:
        why, remedy = f"{field} is no time to wait", f"0 for the default, or at most {MAX_SECONDS:g} seconds"
        raise Malformed("malformed_seconds", why, field=field, value=seconds, remedy=remedy)


def check_number(field: str, number: int) -> None:
    """Check the number of a lease or an attempt; daemons count neither. Raises KvferryError (`number_required`)."""
    if not 0 < number < MAX_NUMBER:
        why, remedy = f"{field} has no number", "count in the engine, from 1, the same on all ranks"
        raise Malformed("number_required", why, field=field, value=number, remedy=remedy)


def check_digest(digest: bytes) -> None:
    """digest: of a prompt; empty where none is given."""
    if (length := len(digest)) > MAX_DIGEST:
        remedy = f"at most {MAX_DIGEST} bytes, for example a SHA-256 of the prompt's token ids"
        raise Malformed(
            "malformed_digest", "the digest is too long", field="digest", value=f"{length} bytes", remedy=remedy
        )


def check_way(way: str) -> None:
    """Empty stands for what is configured."""
    if way not in ("", *WAYS):
        remedy = f"one of {', '.join(WAYS)}"
        raise Malformed("malformed_way", "there is no such way", field="way", value=way, remedy=remedy)


def check_source(manifest: Manifest, tables: Tables, num_tokens: int, metadata: bytes) -> None:
    """The blocks of a publish hold all its tokens."""
    if num_tokens < 0:
        remedy = "publish the tokens [0, num_tokens)"
        raise Malformed(
            "malformed_tables", "num_tokens is negative", field="num_tokens", value=num_tokens, remedy=remedy
        )
    if (length := len(metadata)) > MAX_METADATA:
        why, remedy = f"metadata has {length} bytes", f"at most {MAX_METADATA} bytes"
        raise Malformed("metadata_too_large", why, field="metadata", value=f"{length} bytes", remedy=remedy)
    _check_names(manifest, tables)
    for group in manifest.groups:
        table = table_of(tables, group, "source")
        if group.kind == "paged":
            check_holds(table, group, table.first_token, local_tokens(group.token_shard, num_tokens), "source")
        _check_length(group, table)


def check_destination(manifest: Manifest, tables: Tables, tokens: tuple[int, int] | None) -> None:
    """The reserved blocks can take the tokens, each block once."""
    _check_names(manifest, tables)
    for group in manifest.groups:
        table = destination_table_of(tables, group)
        _check_length(group, table)
        if group.kind == "paged" and len(table.block_ids) and tokens:
            check_holds(table, group, table.first_token, local_tokens(group.token_shard, tokens[1]), "destination")


def _check_names(manifest: Manifest, tables: Tables) -> None:
    names = sorted(group.name for group in manifest.groups)
    if unknown := sorted(set(tables) - set(names)):
        why, remedy = f"the tables name groups that the manifest lacks: {unknown}", f"groups of this engine: {names}"
        raise Malformed("unknown_group", why, field="tables", value=sorted(tables), remedy=remedy)


def _check_length(group: Group, table: BlockTable) -> None:
    if (length := len(table.block_ids)) > group.num_blocks:
        why = f"the table of group {group.name} lists {length} blocks of a cache of {group.num_blocks}"
        field, remedy = f"tables.{group.name}.block_ids", "list the request's own blocks only"
        raise Malformed("tables_too_long", why, field=field, value=length, remedy=remedy)
