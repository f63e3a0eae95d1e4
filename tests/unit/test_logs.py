"""One line per event, for people or for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvferryd.config import Config
from kvferryd.observe import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.getLogger("kvferryd").setLevel(logging.NOTSET)
    structlog.reset_defaults()


def configured(**settings: object) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(Config(**settings), stream)  # type: ignore[arg-type]
    return stream


def test_json_lines_carry_what_is_bound() -> None:
    stream = configured(log_format="json")
    with logs.bound(request_id="r1", engine_id=""):
        logs.get("kvferryd.x").info("transfer ended", state="done")
    line = json.loads(stream.getvalue())
    assert {"event": "transfer ended", "state": "done", "request_id": "r1", "level": "info"}.items() <= line.items()
    assert "engine_id" not in line


def test_lines_below_the_level_are_not_written_and_libraries_only_warn() -> None:
    stream = configured(log_level="warning")
    logs.get("kvferryd.x").info("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    logging.getLogger("uvicorn.access").warning("quiet")
    logging.getLogger("uvicorn.error").warning("heard")
    assert [("quiet" in line, "heard" in line) for line in stream.getvalue().splitlines()] == [(False, True)]


def test_configured_twice_a_line_is_written_once() -> None:
    configured()
    stream = configured()
    logs.get("kvferryd.x").info("once")
    assert stream.getvalue().count("once") == 1


def test_a_traceback_shows_no_local_variables() -> None:
    stream = configured()
    token = "hunter2"
    try:
        raise ValueError("wrong")
    except ValueError:
        logs.get("kvferryd.x").exception("failed")
    assert "ValueError: wrong" in stream.getvalue()
    assert token not in stream.getvalue().replace('token = "hunter2"', "")


def test_an_event_writes_so_many_lines_a_second_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    stream = configured(log_format="json")
    log = logs.get("kvferryd.x")
    for _ in range(3 * logs.MOST):
        log.info("handshake")
    log.info("another")
    assert len(stream.getvalue().splitlines()) == logs.MOST + 1
    now += 1
    log.info("handshake")
    log.info("handshake")
    *_, first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["left_out"] == 2 * logs.MOST
    assert "left_out" not in second
