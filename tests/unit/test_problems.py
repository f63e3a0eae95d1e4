"""The one table from an error's code to its HTTP status."""

from __future__ import annotations

import pytest

from kvferry.errors import KvferryError
from kvferry.manifest import ManifestError
from kvferryd.api.rest.problems import status_of


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("unknown_transfer", 404),
        ("unknown_lease", 404),
        ("unknown_engine", 404),
        ("unknown_peer", 404),
        ("unknown_group", 422),
        ("order_conflict", 409),
        ("full", 429),
        ("address_not_allowed", 403),
        ("unauthorized", 401),
        ("draining", 503),
        ("peer_unreachable", 502),
        ("deadline", 504),
        ("malformed_tables", 422),
        ("refused", 422),
        ("any_other", 422),
    ],
)
def test_each_code_has_its_status(code: str, status: int) -> None:
    assert status_of(KvferryError(code, "")) == status
    assert status_of(ManifestError(code, "")) == 422
