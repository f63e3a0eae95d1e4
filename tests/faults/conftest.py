"""Real daemons for tests of what goes wrong; the parts that they share with the integration tests lie there."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # these tests start processes beside gRPC's threads
sys.path.append(str(Path(__file__).parents[1] / "integration"))

from fleet import Daemons

from kvferryd.demo.fleet import Fleet


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Daemons]:
    """Every test's own: what happens here harms daemons."""
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield Daemons(fleet)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack
