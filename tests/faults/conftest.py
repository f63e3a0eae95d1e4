"""Helpers that the tests of faults share. Each module is named after what must hold, and starts daemons of its own.

A test may say what it has seen, `record_property("seen", [scenario, end, seconds to notice, seconds to recover])`: the
table is printed at the end.

Helpers: `stopping.stopped` and `stopping.stepped` (a process stands still, or runs step by step), `wire.tcp_pair` (a
read that is really in flight), `hosts.daemons_apart` (a host that vanishes), `remote.remote` (an engine in a process of
its own), and those of tests/integration (fleet, ranks, lives, ...).
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import pytest
from fleet import Daemons
from hosts import Host, host

from kvferryd.demo.fleet import Fleet

LAST = 40
"""Lines of each log that are told of a failure, and as many of warnings and worse."""


@pytest.fixture(scope="module")
async def daemons(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Daemons]:
    """Starts the daemons of one module; they end with it, stopped or not."""
    async with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield Daemons(fleet)


@pytest.fixture
def far() -> Iterator[Host]:
    """Another host: skips, saying so, where this process may not make network namespaces."""
    with host() as far:
        yield far


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the end of its daemons' logs, and what went wrong in them before: files go."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        found = [item.funcargs.get(name) for name in ("daemons", "own_fleet")]
        fleets = [each.fleet if isinstance(each, Daemons) else each for each in found if each is not None]
        for log in (log for fleet in fleets for log in sorted(fleet.directory.glob("*.log"))):
            lines = log.read_text(errors="replace").splitlines()
            wrong = [line for line in lines[:-LAST] if '"level": "info"' not in line]
            report.sections.append((f"log of {log.stem}", "\n".join([*wrong[-LAST:], *lines[-LAST:]])))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = terminalreporter.getreports("passed")
    seen = [value for report in passed for name, value in report.user_properties if name == "seen"]
    if seen:
        terminalreporter.section("what was seen")
        for row in [("scenario", "end", "noticed after, s", "recovered after, s"), ("---",) * 4, *seen]:
            terminalreporter.write_line(f"| {' | '.join(map(str, row))} |")
