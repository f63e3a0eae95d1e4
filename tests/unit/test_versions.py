"""The tables of a lease that is published progressively."""

from __future__ import annotations

import pytest

from kvferry.errors import KvferryError
from kvferry.tables import BlockTable
from kvferryd.leases.lease import WINDOWS, Versions


def tables(*ids: int, first_token: int = 0) -> dict[str, BlockTable]:
    return {"full": BlockTable.of(ids, first_token)}


def test_tables_that_only_grow_are_kept_once() -> None:
    versions = Versions()
    assert [versions.add(tables(*range(count))) for count in (1, 2, 4)] == [1, 2, 3]
    assert {len(versions.tables(version)["full"].block_ids) for version in (1, 2, 3)} == {4}


def test_a_reader_that_lags_gets_tables_that_begin_where_its_own_do() -> None:
    versions = Versions()
    versions.add(tables(5, 6))
    versions.add(tables(5, 6, 7))
    versions.add(tables(6, 7, 8, first_token=4))
    assert versions.tables(1)["full"] == versions.tables(2)["full"] == BlockTable.of([5, 6, 7])
    assert versions.tables(3)["full"].first_token == 4


@pytest.mark.parametrize("version", [0, 3])
def test_a_version_that_never_was_is_refused(version: int) -> None:
    versions = Versions()
    versions.add(tables(1))
    versions.add(tables(2))
    with pytest.raises(KvferryError) as caught:
        versions.tables(version)
    assert caught.value.code == "lease_version"


def test_what_is_kept_is_bounded() -> None:
    versions = Versions()
    for first in range(WINDOWS + 1):
        versions.add(tables(first, first_token=first))
    with pytest.raises(KvferryError):
        versions.tables(1)
    assert versions.tables(2)["full"].first_token == 1
