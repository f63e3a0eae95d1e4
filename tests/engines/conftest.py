"""A test that fails shows how the logs of its engines and daemons end; those that need more cores are marked."""

from __future__ import annotations

import os
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM's ranks on a CPU spin while they wait for each other: with more ranks than cores a daemon may not run for
    many seconds, and a test says more of the machine than of what it tests."""
    for item in items:
        given = getattr(item, "callspec", None)
        ranks = (
            max((sum(value.tp) for value in given.params.values() if hasattr(value, "tp")), default=0) if given else 0
        )
        if ranks > (os.cpu_count() or 1):
            item.add_marker(pytest.mark.crowded)
