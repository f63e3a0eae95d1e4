"""A test that fails shows how the logs of its engines and daemons end; one beside which one of them dies fails."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator

import pytest

from engines import Engines

LINES = 40


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        services = (service for fleet in Engines.running for service in fleet.services)
        report.sections += [(f"log of {service.name}", service.tail(LINES)) for service in services]
    return report


@pytest.fixture(autouse=True)
def _nothing_ends_on_its_own() -> Iterator[None]:
    """No engine and no daemon that the test itself has not killed."""
    yield
    ended = {service.name: service.process.wait() for fleet in Engines.running for service in fleet.ended()}
    crashed = {name: status for name, status in ended.items() if status != -signal.SIGKILL}
    assert not crashed, f"ended on their own, with status: {crashed}"
