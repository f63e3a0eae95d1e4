"""The connector's two sides, without an engine around them: a worker's at a daemon, a scheduler's with requests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import PYTHON, installed, leases_at, lone_daemon, told_by

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    """Words of session_order.py; with `leases`, the blocks of those that are left at the end."""
    installed()
    with lone_daemon() as daemon:
        script = Path(__file__).with_name("session_order.py")
        command = [PYTHON, script, str(daemon.socket), daemon.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdin
            said = next((line for line in process.stdout if line.startswith("{")), "")
            leases = [lease.request_id for lease in leases_at(daemon)]
            process.stdin.close()
        assert said, "the script has failed: its error is above"
        yield json.loads(said) | {"leases": leases}


def test_what_is_revoked_is_not_published_however_late_the_loop_comes_to_it(told: dict[str, Any]) -> None:
    """The blocks are another request's in that very step."""
    assert not {"at once", "in two parts"} & {name.partition("/")[0] for name in told["leases"]}, told
    assert "again" in told["leases"]
    assert told["waits for what was published again"]


def test_a_last_publish_that_is_refused_ends_what_was_published_before_it(told: dict[str, Any]) -> None:
    """Before its blocks are reported as free."""
    assert told["refused"] == [["refused", "SENT"], ["refused", "UNPUBLISHED"]]
    assert told["left then"] == []
    assert "refused" not in told["leases"]


@pytest.fixture(scope="module")
def odd() -> dict[str, Any]:
    """Words of odd_requests.py, which stops where the scheduler's side raises."""
    return dict(told_by("odd_requests.py"))


@pytest.mark.parametrize("prompt", ["tokens", "embeddings", "both"])
def test_any_prompt_is_prefilled_up_to_its_last_token_where_the_model_has_a_state(
    odd: dict[str, Any], prompt: str
) -> None:
    to = {"lengths": [31], "prompt": 31, "told": 31}
    assert odd[prompt] == {"kept": True, "names what was computed": True} | to


def test_what_a_reference_window_has_given_up_is_not_published_nor_what_comes_after_it(odd: dict[str, Any]) -> None:
    """vLLM's null block stands in the table for it (R-SWA)."""
    assert odd["a hole"] == {"blocks": [1, 2], "told": 32, "names what is there": True}


def test_a_load_that_fails_is_counted_when_vllm_ends_its_request_before_it_says_so(odd: dict[str, Any]) -> None:
    """As it does unless told to recompute. A request that is ended for another reason has its load cancelled."""
    assert odd["its load has failed"] == {"missed": {"failed": 1}, "cancel": []}
    assert odd["its load is under way"] == {"missed": {}, "cancel": ["a"]}


def test_what_is_kept_of_a_load_that_has_arrived_does_not_grow_with_its_prompt(odd: dict[str, Any]) -> None:
    """Its blocks, 4 KiB of ids, are none of the next request's business; the scheduler remembers 65,536 loads."""
    assert odd["kept of a load"] < 2048


def test_another_connector_that_is_not_emptied_keeps_what_older_weights_computed(odd: dict[str, Any]) -> None:
    """vLLM takes a reset for done where a connector does not know how."""
    assert [odd[others] for others in ("all are emptied", "one is not", "one cannot be")] == [True, False, False]
