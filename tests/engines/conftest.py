"""A test that fails shows how the logs of its engines and daemons end."""

from __future__ import annotations

from collections.abc import Generator

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
