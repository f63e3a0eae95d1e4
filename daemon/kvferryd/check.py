"""What can be wrong with the blocks of a request, told before anything is accepted."""

from __future__ import annotations

from kvferry.errors import Malformed
from kvferry.manifest import Manifest
from kvferry.tables import Tables
from kvferryd.config import WAYS
from kvferryd.plan.bind import destination_table_of, local_tokens, table_of

MAX_METADATA = 64 << 10
MAX_SECONDS = 86400.0
MAX_DIGEST = 64


def check_request_id(request_id: str) -> None:
    if not 0 < len(request_id) <= 256:
        raise Malformed(
            "malformed_request_id",
            "a request id has 1 to 256 characters",
            field="request_id",
            value=request_id,
            remedy="use the router's X-Request-Id",
        )


def check_seconds(field: str, seconds: float) -> None:
    """A time to live or a deadline; 0 stands for the default. NaN would upset the order of the event loop's timers."""
    if not 0 <= seconds <= MAX_SECONDS:
        raise Malformed(
            "malformed_seconds",
            f"{field} is no time to wait",
            field=field,
            value=seconds,
            remedy=f"0 for the default, or at most {MAX_SECONDS:g} seconds",
        )


def check_digest(digest: bytes) -> None:
    """Of a prompt; empty where none is given."""
    if len(digest) > MAX_DIGEST:
        raise Malformed(
            "malformed_digest",
            f"a digest has {len(digest)} bytes",
            field="digest",
            value=f"{len(digest)} bytes",
            remedy=f"at most {MAX_DIGEST} bytes, for example a SHA-256 of the prompt's token ids",
        )


def check_way(way: str) -> None:
    """Empty stands for what is configured."""
    if way not in ("", *WAYS):
        raise Malformed(
            "malformed_way", "there is no such way", field="way", value=way, remedy=f"one of {', '.join(WAYS)}"
        )


def check_source(manifest: Manifest, tables: Tables, num_tokens: int, metadata: bytes) -> None:
    """The blocks of a publish hold all its tokens. Raises KvferryError."""
    if num_tokens < 0:
        raise Malformed(
            "malformed_tables",
            "num_tokens is negative",
            field="num_tokens",
            value=num_tokens,
            remedy="publish the tokens [0, num_tokens)",
        )
    if len(metadata) > MAX_METADATA:
        raise Malformed(
            "metadata_too_large",
            f"metadata has {len(metadata)} bytes",
            field="metadata",
            value=f"{len(metadata)} bytes",
            remedy=f"at most {MAX_METADATA} bytes",
        )
    _check_names(manifest, tables)
    for group in manifest.groups:
        table = table_of(tables, group, "source")
        held = table.first_token + len(table.block_ids) * group.block_size
        needed = local_tokens(group.token_shard, num_tokens)
        if group.kind == "paged" and held < needed:
            raise Malformed(
                "tables_too_short",
                f"the table of group {group.name} holds local tokens [{table.first_token}, {held}) of {needed}",
                field=f"tables.{group.name}.block_ids",
                value=f"{len(table.block_ids)} blocks of {group.block_size}",
                remedy="list every block of the request, or publish fewer tokens",
            )
        _check_length(group.name, len(table.block_ids), group.num_blocks)


def check_destination(manifest: Manifest, tables: Tables, tokens: tuple[int, int] | None) -> None:
    """The reserved blocks can take the tokens, each block once. Raises KvferryError."""
    _check_names(manifest, tables)
    for group in manifest.groups:
        table = destination_table_of(tables, group)
        ids = table.block_ids
        _check_length(group.name, len(ids), group.num_blocks)
        held = table.first_token + len(ids) * group.block_size
        if group.kind == "paged" and len(ids) and tokens and held < local_tokens(group.token_shard, tokens[1]):
            raise Malformed(
                "tables_too_short",
                f"the table of group {group.name} holds local tokens [{table.first_token}, {held})",
                field=f"tables.{group.name}.block_ids",
                value=f"{len(ids)} blocks of {group.block_size}",
                remedy=f"reserve blocks for all tokens up to {tokens[1]}",
            )


def _check_names(manifest: Manifest, tables: Tables) -> None:
    unknown = set(tables) - {group.name for group in manifest.groups}
    if unknown:
        raise Malformed(
            "unknown_group",
            f"the tables name groups that the manifest lacks: {sorted(unknown)}",
            field="tables",
            value=sorted(tables),
            remedy=f"groups of this engine: {sorted(group.name for group in manifest.groups)}",
        )


def _check_length(name: str, length: int, num_blocks: int) -> None:
    if length > num_blocks:
        raise Malformed(
            "tables_too_long",
            f"the table of group {name} lists {length} blocks of a cache of {num_blocks}",
            field=f"tables.{name}.block_ids",
            value=length,
            remedy="list the request's own blocks only",
        )
