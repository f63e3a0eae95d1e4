"""Block tables: which blocks of a cache hold a request's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import KvferryError, Malformed

BlockIds: TypeAlias = npt.NDArray[np.int64]
NO_IDS: BlockIds = np.empty(0, np.int64)
MAX_BLOCKS = 1 << 20
"""Blocks in one table; 2^20 blocks of 16 tokens are 16 million tokens."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """`block_ids[i]` holds the rank's local tokens `first_token + i * block_size` onward.

    Sliding windows start later than token 0; a state group has one id. An empty table means that the rank
    holds, or wants, nothing of the group.
    """

    block_ids: BlockIds
    first_token: int = 0

    @cached_property
    def span(self) -> tuple[int, int]:
        """The lowest and the highest id; (0, 0) where there is none."""
        return (int(self.block_ids.min()), int(self.block_ids.max())) if len(self.block_ids) else (0, 0)

    @cached_property
    def twice(self) -> int | None:
        """An id that is there more than once."""
        ids = np.sort(self.block_ids)
        same = ids[1:] == ids[:-1]
        return int(ids[1:][same][0]) if same.any() else None

    @classmethod
    def of(cls, block_ids: Sequence[int] | BlockIds, first_token: int = 0, *, field: str = "tables") -> BlockTable:
        """Its own copy of the ids. Checks types and bounds that need no manifest. Raises KvferryError
        (`malformed_tables`)."""
        try:
            check_count(len(block_ids), field)
            given = np.asarray(block_ids if len(block_ids) else NO_IDS)
            if given.dtype.kind not in "iu":
                raise TypeError("these are no integers")
            ids: BlockIds = given.astype(np.int64)
            if given.dtype != ids.dtype and (ids != given).any():
                raise OverflowError("these are too large")
        except (TypeError, ValueError, OverflowError):
            raise _malformed(f"{field}.block_ids", block_ids, "a list of block ids, each a 64-bit integer") from None
        if ids.ndim != 1:
            raise _malformed(f"{field}.block_ids", f"shape {ids.shape}", "one flat list of block ids")
        if isinstance(first_token, bool) or not isinstance(first_token, int) or not 0 <= first_token < 2**62:
            raise _malformed(f"{field}.first_token", first_token, "an integer of 0 or more")
        ids.setflags(write=False)
        return cls(ids, first_token)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BlockTable)
            and self.first_token == other.first_token
            and np.array_equal(self.block_ids, other.block_ids)
        )

    __hash__ = None  # type: ignore[assignment]  # holds an array


Tables: TypeAlias = Mapping[str, BlockTable]
"""Block tables by group name."""


def check_count(ids: int, field: str) -> None:
    """So many ids may be in one table. Before they are copied, as that takes long. Raises KvferryError."""
    if ids > MAX_BLOCKS:
        raise _malformed(f"{field}.block_ids", f"{ids} ids", f"one flat list of at most {MAX_BLOCKS} ids")


def tables_from_json(data: Any, field: str = "tables") -> dict[str, BlockTable]:
    """`{"<group>": {"block_ids": [...], "first_token": 0}}` as tables. Raises KvferryError (`malformed_tables`)."""
    if not isinstance(data, Mapping):
        raise _malformed(field, data, 'an object such as {"full": {"block_ids": [4, 7], "first_token": 0}}')
    tables = {}
    for name, entry in data.items():
        if not str(name).isprintable():
            raise _malformed(field, ascii(name), "groups by the names that the manifest has")
        where = f"{field}.{name}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("block_ids"), list):
            raise _malformed(where, entry, 'an object such as {"block_ids": [4, 7], "first_token": 0}')
        unknown = set(entry) - {"block_ids", "first_token"}
        if unknown or any(isinstance(i, bool) or not isinstance(i, int) for i in entry["block_ids"]):
            raise _malformed(where, sorted(unknown) or entry["block_ids"], "block_ids (integers) and first_token only")
        tables[str(name)] = BlockTable.of(entry["block_ids"], entry.get("first_token", 0), field=where)
    return tables


def _malformed(field: str, value: object, remedy: str) -> KvferryError:
    return Malformed("malformed_tables", f"{field} is not a block table", field=field, value=value, remedy=remedy)
