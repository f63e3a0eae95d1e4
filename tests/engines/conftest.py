"""Engines that several modules share. A test that fails shows how the logs of its engines and daemons end; one beside
which one of them dies fails."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator

import pytest

from engines import Engines, Pair, pair, worded

LINES = 40
TEXT = ("--no-skip-tokenizer-init",)
SHARE = ("test_vllm_other_prompt", "test_vllm_pair", "test_routers")
"""Modules with the same two engines, which the last of them kills. They run at the end: none beside others' engines."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SHARE.index(item.path.stem) if item.path.stem in SHARE else -1)


@pytest.fixture(scope="session")
def engines() -> Iterator[Pair]:
    """Of modules that have none of their own.

    Prefill as vLLM knows it by a plug-in's name, decode under the name that some routers and runtimes insist on. The
    prefill engine checks bodies, the decode engine does not: what gets past the check must be refused too.
    """
    checked = {
        "flags": (*TEXT, "--middleware", "kvferry.asgi.CheckTransferParams"),
        "transfer": {"kv_connector_module_path": None},
    }
    named = {"flags": TEXT, "transfer": {"kv_connector": "NixlConnector"}}
    flags = ("--lease-ttl-s", "60", "--deadline-s", "30")
    with pair(worded, prefill=checked, decode=named, daemon_flags=flags) as both:
        yield both


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
    ended = [service for fleet in Engines.running for service in fleet.ended()]
    crashed = {one.name: one.process.returncode for one in ended if one.process.returncode != -signal.SIGKILL}
    assert not crashed, f"ended on their own, with status: {crashed}"
