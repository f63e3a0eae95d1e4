"""SGLang's sender at a real daemon, and what its receivers order and when, without an engine around them."""

from __future__ import annotations

from typing import Any

import pytest
from sglang_engines import sglang_told_by

from engines import lone_daemon
from kvferry.digest import prompt_digest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


def test_a_last_publish_that_is_refused_ends_what_was_published_before_it() -> None:
    """Before the request has failed: its pages are SGLang's again then."""
    with lone_daemon() as daemon:
        told = sglang_told_by("sglang_refused.py", str(daemon.socket), daemon.url)
    assert told["failed"]
    assert "metadata" in told["why"]
    assert told["left"] == []
    assert set(map(tuple, told["rooms"].values())) == {(True, True)}, "SGLang's rows hold none of these rooms"
    assert told["held"] == [True, False, True, False, True], "a room is its request's until SGLang has done with that"


@pytest.mark.parametrize("method", ["failure_exception", "abort"])
def test_an_engine_ends_rather_than_take_back_pages_that_a_reader_may_be_in(method: str) -> None:
    """SGLang survives every Exception of a sender, and gives the pages to another request."""
    with lone_daemon() as daemon:
        told = sglang_told_by("sglang_refused.py", str(daemon.socket), daemon.url, str(daemon.process.pid), method)
    assert told["raised"] == "SystemExit"
    assert "room-7" in told["why"]


def test_the_first_rank_numbers_requests_for_all_ranks() -> None:
    """The number stays, whatever becomes of a request on one rank; a client's own is replaced."""
    first, second = sglang_told_by("sglang_numbers.py")
    assert (first, second) == ([1, 2, 3], [2, 3])


@pytest.fixture(scope="module")
def overlap() -> dict[str, Any]:
    """By sglang_overlap.py."""
    return dict(sglang_told_by("sglang_overlap.py"))


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
    assert sglang_told_by("sglang_unsupported.py") == {
        what: name and f"unsupported_engine: {name}"
        for what, name in {
            "nothing": "",
            "pipeline": "",
            "pipeline of decode": "pipeline parallelism of decode",
            "context of prefill": "context parallelism",
            "context of decode": "context parallelism",
            "DP ranks on two hosts": "prefill's DP ranks on several hosts",
            "a draft model's hidden states": "",
            "larger ones": "131072 bytes beside a request's KV (a draft model's hidden states): more than 65536",
            "state": "",
            "index keys beside a state": "states (dsa)",
            "windows in a pool of their own": "",
            "windows beside a ring": "states (swa_ring)",
            "elastic": "--elastic-ep-backend",
            "stripes": "--enable-kv-cache-sharding",
            "saver": "--enable-memory-saver",
            "role": "--enable-pd-role-switch",
            "checksum": "--disaggregation-enable-kv-checksum",
            "rings": "--enable-linear-replayssm",
            "rings of drafts": "--enable-linear-replayssm-spec",
        }.items()
    }


def test_what_changes_the_kv_changes_the_digest() -> None:
    """SGLang itself says of embeddings that replace those of some tokens that the tokens do not determine their KV."""
    digests = sglang_told_by("sglang_digests.py")
    text = prompt_digest(range(100, 115)).hex()
    assert {name for name, digest in digests.items() if digest == text} == {"text", "another tenant's"}
    assert len(set(digests.values())) == len(digests) - 1
