"""SGLang's sender at a real daemon, and what its receivers order and when, without an engine around them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sglang_engines import PYTHON, START_S

from engines import lone_daemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


def test_a_last_publish_that_is_refused_ends_what_was_published_before_it() -> None:
    """Before the request has failed: its pages are SGLang's again then."""
    with lone_daemon() as daemon:
        told = _told(str(daemon.socket), daemon.url)
    assert told["failed"]
    assert "metadata" in told["why"]
    assert told["left"] == []
    assert set(map(tuple, told["rooms"].values())) == {(True, True)}, "SGLang's rows hold none of these rooms"
    assert told["held"] == [True, False, True, False, True], "a room is its request's until SGLang has done with that"


@pytest.mark.parametrize("method", ["failure_exception", "abort"])
def test_an_engine_ends_rather_than_take_back_pages_that_a_reader_may_be_in(method: str) -> None:
    """SGLang survives every Exception of a sender, and gives the pages to another request."""
    with lone_daemon() as daemon:
        told = _told(str(daemon.socket), daemon.url, str(daemon.process.pid), method)
    assert told["raised"] == "SystemExit"
    assert "room-7" in told["why"]


def test_the_first_rank_numbers_requests_for_all_ranks() -> None:
    """The number stays, whatever becomes of a request on one rank; a client's own is replaced."""
    first, second = _said_by("sglang_numbers.py")
    assert (first, second) == ([1, 2, 3], [2, 3])


@pytest.fixture(scope="module")
def overlap() -> dict[str, Any]:
    """By sglang_overlap.py."""
    told: dict[str, Any] = _said_by("sglang_overlap.py")
    return told


def test_a_receive_begins_behind_the_step_that_still_writes_to_its_pages(overlap: dict[str, Any]) -> None:
    """SGLang waits for no step of a CUDA graph, which writes one more token of a request that has ended."""
    told = overlap["graphs"]
    assert told["holds"] == ["received"]
    assert told["arrived"] and told["receives"] == 1
    assert told["under way"] and not told["at once"], "the scheduler has not waited for the step"


def test_a_receive_begins_at_once_where_no_step_is_under_way(overlap: dict[str, Any]) -> None:
    """An eager step has ended when SGLang knows the pages' numbers; without overlap, when it knows its tokens."""
    for scene in ("eager", "no overlap"):
        told = overlap[scene]
        assert told["holds"] == ["received"]
        assert told["arrived"] and told["at once"] and not told["under way"], scene


def test_a_request_that_leaves_before_its_receive_has_begun_receives_nothing(overlap: dict[str, Any]) -> None:
    told = overlap["leaves"]
    assert told["receives"] == 0
    assert told["quiet"] and not told["arrived"]


def test_what_is_not_carried_is_refused_at_the_start_by_name() -> None:
    """A cache that a manifest does not say would be moved to the wrong places."""
    assert _said_by("sglang_unsupported.py") == {
        what: name and f"unsupported_engine: {name}"
        for what, name in {
            "nothing": "",
            "pipeline": "",
            "pipeline of decode": "pipeline parallelism of decode",
            "context of prefill": "context parallelism",
            "context of decode": "context parallelism",
            "DP ranks on two hosts": "prefill's DP ranks on several hosts",
            "draft model": "a draft model's cache",
            "state": "",
            "index keys beside a state": "states (dsa)",
            "windows in a pool of their own": "",
            "windows beside a ring": "states (swa_ring)",
            "elastic": "--elastic-ep-backend",
            "stripes": "--enable-kv-cache-sharding",
            "saver": "--enable-memory-saver",
            "role": "--enable-pd-role-switch",
            "checksum": "--disaggregation-enable-kv-checksum",
        }.items()
    }


def _told(*arguments: str) -> dict[str, Any]:
    told: dict[str, Any] = _said_by("sglang_refused.py", *arguments)
    return told


def _said_by(script: str, *arguments: str) -> Any:
    if not PYTHON.exists():
        pytest.skip("there is no SGLang here: make engines-sglang installs one")
    command = [PYTHON, Path(__file__).with_name(script), *arguments]
    done = subprocess.run(command, timeout=START_S, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
