"""Helpers of tests in all folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.errors import KvferryError


@contextmanager
def refused(
    code: str, error: type[KvferryError] = KvferryError, match: str | None = None, **fields: object
) -> Iterator[pytest.ExceptionInfo[KvferryError]]:
    """The block raises an error with this code, and with these fields: `refused("order_conflict", status=409)`."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    fields["code"] = code
    said = {name: getattr(caught.value, name) for name in fields}
    assert said == fields, f"{said}: {caught.value}"
