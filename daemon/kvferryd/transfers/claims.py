"""The blocks that a reservation claims."""

from __future__ import annotations

from kvferry.manifest import Group, Manifest
from kvferry.protocol.claims import Blocks
from kvferry.tables import BlockIds, BlockTable
from kvferryd.plan.segments import local_tokens
from kvferryd.transfers.order import Reservation


def written(manifest: Manifest, reservation: Reservation) -> Blocks:
    """The blocks that tokens of the reservation are written to; its tables have been checked."""
    groups = {group.name: group for group in manifest.groups}
    return {name: _written(groups[name], table, reservation.tokens) for name, table in reservation.tables.items()}


def _written(group: Group, table: BlockTable, tokens: tuple[int, int] | None) -> BlockIds:
    """The blocks of a table that lie in the token range. Blocks before it may be shared, for example a cached
    prefix."""
    if tokens is None or group.kind == "state":
        return table.block_ids
    start, stop = (max(0, local_tokens(group.token_shard, token) - table.first_token) for token in tokens)
    return table.block_ids[start // group.block_size : -(-stop // group.block_size)]
