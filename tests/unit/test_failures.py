"""The failures that a daemon counts, and the last one of each engine."""

from __future__ import annotations

import time

from kvferry.schemas import ErrorBody, FailedRequest
from kvferryd.observe.failures import Failures


def test_the_last_failure_of_an_engine_is_the_one_that_ended_last_however_they_are_noted() -> None:
    """Records of the daemon before come in the order in which they began."""
    failures, now = Failures(), time.time()
    for request_id, ago_s in (("late", 10.0), ("early", 60.0)):
        error = ErrorBody(code="deadline", message="the deadline passed", field="", value="", remedy="")
        failures.note(
            FailedRequest(at=now - ago_s, request_id=request_id, transfer_id="t", engine_id="source", error=error)
        )
    assert [each.request_id for each in failures.of_engines()] == ["late"]
    lately = failures.lately()
    assert lately is not None and (lately.failed, lately.last.request_id) == (2, "late")
