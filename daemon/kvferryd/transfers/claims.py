"""Which destination blocks of one engine rank a transfer may still write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.errors import Conflict
from kvferry.manifest import Group, Manifest
from kvferry.tables import BlockIds, BlockTable
from kvferryd.plan.segments import local_tokens
from kvferryd.transfers.order import Reservation


@dataclass(slots=True, eq=False)
class Claim:
    """Blocks that belong to one transfer until it is quiet. `release` gives them up; idempotent."""

    _claims: Claims
    number: int
    request_id: str
    blocks: dict[str, BlockIds]
    """By group."""

    def release(self) -> None:
        claims = self._claims
        if claims._held.pop(self.number, None) is not None:
            for name, ids in self.blocks.items():
                claims._holder[name][ids] = 0


class Claims:
    """A number for every block of every group: 0 for a free block, otherwise the claim that holds it.

    A reservation takes its claim before its transfer may run, so two transfers never write the same block: neither
    while both run, nor while a read that was given up is not quiet.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._groups = {group.name: group for group in manifest.groups}
        self._holder = {group.name: np.zeros(group.num_blocks, dtype=np.int64) for group in manifest.groups}
        self._held: dict[int, Claim] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, reservation: Reservation, request_id: str) -> Claim:
        """Claim the blocks that tokens of the reservation are written to; its tables have been checked.

        Raises KvferryError (`blocks_not_quiet`).
        """
        blocks = {
            name: _written(self._groups[name], table, reservation.tokens) for name, table in reservation.tables.items()
        }
        for name, ids in blocks.items():
            holders = self._holder[name][ids]
            if holders.any():
                first = int(np.flatnonzero(holders)[0])
                block, holder = int(ids[first]), self._held[int(holders[first])].request_id
                why = f"a transfer of request {holder} may still write block {block} of group {name}"
                remedy = "reserve a block again only when its transfer has ended and its blocks are safe"
                field = f"tables.{name}.block_ids"
                raise Conflict("blocks_not_quiet", why, field=field, value=block, remedy=remedy)
        self._last += 1
        claim = self._held[self._last] = Claim(self, self._last, request_id, blocks)
        for name, ids in blocks.items():
            self._holder[name][ids] = claim.number
        return claim


def _written(group: Group, table: BlockTable, tokens: tuple[int, int] | None) -> BlockIds:
    """The blocks of a table that lie in the token range. Blocks before it may be shared, for example a cached
    prefix."""
    if tokens is None or group.kind == "state":
        return table.block_ids
    start, stop = (max(0, local_tokens(group.token_shard, token) - table.first_token) for token in tokens)
    return table.block_ids[start // group.block_size : -(-stop // group.block_size)]
