"""Fixtures that the modules of this folder share: each has daemons of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from gpu_daemons import daemon

from kvferry.memory import cuda
from kvferryd.demo.fleet import DaemonService, Fleet


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
async def near(fleet: Fleet) -> DaemonService:
    """Beside the first GPU."""
    return await daemon(fleet, "near", 0)


@pytest.fixture(scope="module")
async def far(fleet: Fleet) -> DaemonService:
    """Beside the last one, which may be the first."""
    return await daemon(fleet, "far", len(cuda.devices()) - 1)


@pytest.fixture(scope="module")
async def direct(fleet: Fleet) -> DaemonService:
    return await daemon(fleet, "direct", len(cuda.devices()) - 1, "--way", "direct")
