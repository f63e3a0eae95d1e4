from __future__ import annotations

from collections.abc import Iterator

import pytest
from stage import Stage, staged


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with staged() as stage:
        yield stage
