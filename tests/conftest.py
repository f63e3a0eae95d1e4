"""Fixtures that several folders share."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # processes are started beside gRPC's threads; none forks to use gRPC

os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX would also use a device that another test makes, and takes away

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of some hundred processes would compile all of our sources again

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads spin for each other, for minutes on a busy machine

sys.path.insert(0, str(Path(__file__).parent / "integration"))  # its helpers are those of other folders too

import pytest
from browser import Browser, browser
from fleet import Daemons

import warm
from kvferryd.demo import fleet as demo_fleet

demo_fleet.Fleet.popen = staticmethod(warm.start)
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
demo_fleet.PORTS = demo_fleet.PORTS[WORKER::WORKERS]
"""A port is found free before a daemon takes it: workers beside each other must not find the same one."""


FOLDERS = ("soak", "faults", "e2e", "integration", "fuzz", "deploy")
"""Folders whose modules take the longest come first, so that no process is left alone with one at the end."""
SHARED = {"pair", "victim", "near", "far"}
"""Daemons of tests/integration: one process starts them, and has all modules that use them."""

FUZZ_SEED = os.environ.setdefault("FUZZ_SEED", str(random.randrange(1 << 32)))
"""The seed of the cases of tests/fuzz. In the environment, so that workers have the same."""


STEPWISE_SEED = os.environ.setdefault("STEPWISE_SEED", str(random.randrange(1 << 48)))
"""The seed of runs of daemons in a world without time (tests/unit/stepwise.py)."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: the tests of a module go to one process, which has its daemons, unless they say more."""
    groups = {item.path: item.nodeid.partition("::")[0] for item in items}
    sharing = {item.path for item in items if SHARED & {*getattr(item, "fixturenames", ())}}
    groups |= {path: "shared" for path in sharing if path.parent.name == "integration"}
    groups |= {path: "gpu" for path in groups if path.parent.name == "gpu"}  # serially: they measure free GPU memory
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(groups[item.path]))
    folders = dict(zip(FOLDERS, itertools.count(), strict=False))
    items.sort(key=lambda item: (groups[item.path] != "shared", folders.get(item.path.parent.name, len(folders))))


def pytest_collection_finish(session: pytest.Session) -> None:
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist does not see its groups with this pytest: make setup")


def pytest_report_header() -> str:
    return f"FUZZ_SEED={FUZZ_SEED} STEPWISE_SEED={STEPWISE_SEED} repeats this run"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The chance of one test."""
    return random.Random(f"{FUZZ_SEED} {request.node.name}")


class Loop(asyncio.SelectorEventLoop):
    """Does not take for its own fault that another loop is closed. gRPC gives what has happened to all loops of a
    process to whichever runs next; where it is for a loop that has been closed, it raises there."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        of_grpc = "PollerCompletionQueue._handle_events" in str(context.get("handle"))
        if not (of_grpc and str(context.get("exception")) == "Event loop is closed"):
            super().call_exception_handler(context)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": Loop}


@pytest.fixture
def request_id(request: pytest.FixtureRequest) -> str:
    """A new one for every test."""
    return f"{request.node.name}-{uuid.uuid4().hex[:8]}"[-200:]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
async def daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Daemons]:
    """Starts the daemons of one module; they end with it, stopped or not."""
    async with demo_fleet.Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield Daemons(fleet)


@pytest.fixture(scope="module")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[demo_fleet.Fleet]:
    """For the daemons of one test alone."""
    fleet = demo_fleet.Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Moves the clock of the wall of the processes that are started meanwhile by so many seconds."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("jumps of the clock need a C compiler")
    clock, ahead = tmp_path / "clock.so", tmp_path / "ahead"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", clock, Path(__file__).parent / "clock.c"], check=True)

    def jump(seconds: int) -> None:
        with ahead.open("r+b") as file:
            file.write(struct.pack("l", seconds))

    ahead.touch()
    jump(0)
    with monkeypatch.context() as inherited:
        inherited.setenv("LD_PRELOAD", str(clock))
        inherited.setenv("WALL_AHEAD", str(ahead))
        yield jump
