"""Fixtures that the modules of this folder share: each has daemons of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvferryd.demo.fleet import Fleet


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
