"""The tables of a lease that is published progressively, as its readers were told them one after another."""

from __future__ import annotations

import numpy as np

from kvferry.errors import Conflict
from kvferry.tables import Tables

WINDOWS = 64
"""Tables kept of a prefill that drops the first blocks of its sliding windows as it goes on."""


class Versions:
    """Counts publishes from 1. Tables are kept only where later ones do not contain them."""

    def __init__(self) -> None:
        self._last = 0
        self._kept: list[tuple[int, Tables]] = []

    def add(self, tables: Tables) -> int:
        """Another publish; its version."""
        since = self._last = self._last + 1
        if self._kept and _extends(tables, self._kept[-1][1]):
            since, _ = self._kept.pop()
        self._kept.append((since, tables))
        del self._kept[:-WINDOWS]
        return self._last

    def tables(self, version: int) -> Tables:
        """Tables that begin where those of this version did and reach at least as far.

        Raises KvferryError (`lease_version`).
        """
        for since, tables in reversed(self._kept):
            if since <= version <= self._last:
                return tables
        raise Conflict(
            "lease_version",
            f"the tables of publish {version} are not kept",
            field="version",
            value=version,
            remedy="follow the lease from its first publish, and do not lag behind",
        )


def _extends(later: Tables, earlier: Tables) -> bool:
    """Whether blocks were added at the end only."""
    return all(
        name in later
        and later[name].first_token == table.first_token
        and np.array_equal(later[name].block_ids[: len(table.block_ids)], table.block_ids)
        for name, table in earlier.items()
    )
