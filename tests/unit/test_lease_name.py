"""The name of a request at its daemons, made of an id that comes from a client's header."""

from __future__ import annotations

import pytest

from kvferry.handoff import lease_name
from kvferry.schemas import MAX_REQUEST_ID


@pytest.mark.parametrize("request_id", ["a", "cmpl-ü-0-1234abcd", "i" * MAX_REQUEST_ID])
def test_an_id_that_daemons_take_is_the_name(request_id: str) -> None:
    assert lease_name(request_id) == request_id


@pytest.mark.parametrize("request_id", ["i" * (MAX_REQUEST_ID + 1), "ü" * 5000, "\ud800", "i\udfff" * 300])
def test_any_other_gets_one_of_its_own(request_id: str) -> None:
    name = lease_name(request_id)
    assert name == lease_name(request_id)
    assert 0 < len(name.encode().decode()) <= MAX_REQUEST_ID
    assert name != lease_name(request_id + "x")
