"""Helpers that the tests of faults share. Each module is named after what must hold, and starts daemons of its own.

A test may say what it has seen, `record_property("seen", [scenario, end, seconds to notice, seconds to recover])`: the
table is printed at the end.

Helpers: `stopping.stopped` and `stopping.stepped` (a process stands still, or runs step by step), `wire.tcp_pair` (a
read that is really in flight), `hosts.daemons_apart` (a host that vanishes), `remote.remote` (an engine in a process of
its own), and those of tests/integration (fleet, ranks, lives, ...).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from fleet import Daemons
from hosts import Host, host

LAST = 40
"""Lines of each log that are told of a failure, and as many of warnings and worse."""


@pytest.fixture
def far() -> Iterator[Host]:
    """Another host: skips, saying so, where this process may not make network namespaces."""
    with host() as far:
        yield far


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
