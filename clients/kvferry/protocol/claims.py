"""The blocks that transfers may still write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import Conflict
from kvferry.protocol.frozen import frozen
from kvferry.protocol.values import Sizes
from kvferry.tables import NO_IDS, BlockIds

Blocks: TypeAlias = Mapping[str, BlockIds]
"""Block ids by group."""


@frozen
class _Claim:
    life: int
    request_id: str
    blocks: Blocks


class Claims:
    """A number for every block of every group of each engine: 0 for a free block, otherwise the claim that holds it.

    A reservation takes its claim before its transfer may run, so two transfers never write the same block: neither
    while both run, nor while a read that was given up is not quiet.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Claim] = {}
        self._holders: dict[tuple[int, str], NDArray[np.int64]] = {}
        """An array for each life of an engine and group, as long as its highest block that was claimed."""
        self._gone: set[int] = set()
        """Lives that are over, of which claims are held."""
        self._last = 0

    def take(self, life: int, blocks: Blocks, request_id: str) -> int:
        """The number of a new claim. Raises KvferryError (`blocks_not_quiet`)."""
        for name, ids in blocks.items():
            holder = self._holder(life, name, ids)
            holders = holder[ids]
            if holders.any():
                first = int(np.flatnonzero(holders)[0])
                block, other = int(ids[first]), self._held[int(holders[first])].request_id
                why = f"a transfer of request {other} may still write block {block} of group {name}"
                remedy = "reserve a block again only when its transfer has ended and its blocks are safe"
                field = f"tables.{name}.block_ids"
                raise Conflict("blocks_not_quiet", why, field=field, value=block, remedy=remedy)
        self._last += 1
        self._held[self._last] = _Claim(life, request_id, blocks)
        for name, ids in blocks.items():
            self._holders[life, name][ids] = self._last
        return self._last

    def release(self, number: int) -> None:
        """Idempotent; 0 is no claim."""
        claim = self._held.pop(number, None)
        if claim is not None:
            for name, ids in claim.blocks.items():
                self._holders[claim.life, name][ids] = 0
            if claim.life in self._gone:
                self.leave(claim.life)

    def leave(self, life: int) -> None:
        """Nothing more is reserved in this life of an engine."""
        if any(claim.life == life for claim in self._held.values()):
            self._gone.add(life)
            return
        self._gone.discard(life)
        for key in [key for key in self._holders if key[0] == life]:
            del self._holders[key]

    def _holder(self, life: int, name: str, ids: BlockIds) -> NDArray[np.int64]:
        holder = self._holders.setdefault((life, name), NO_IDS)
        most = int(ids.max()) + 1 if len(ids) else 0
        if len(holder) < most:
            longer = np.zeros(max(most, 2 * len(holder)), dtype=np.int64)
            longer[: len(holder)] = holder
            holder = self._holders[life, name] = longer
        return holder

    def numbers(self) -> set[int]:
        return set(self._held)

    def check(self) -> None:
        holders = {key: holder.tolist() for key, holder in self._holders.items()}
        for number, claim in self._held.items():
            for name, ids in claim.blocks.items():
                assert {*map(holders[claim.life, name].__getitem__, ids.tolist())} <= {number}
        assert set[int]().union(*holders.values()) <= {0, *self._held}
        assert self._gone <= {claim.life for claim in self._held.values()}

    def sizes(self) -> Sizes:
        return {"claims": len(self._held), "claimed groups": len(self._holders), "lives gone": len(self._gone)}
