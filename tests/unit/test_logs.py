"""A line per event, for people or for machines."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from kvferry.output import WAITING
from kvferryd.config import Config
from kvferryd.observe import logs

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.getLogger("kvferryd").setLevel(logging.NOTSET)
    structlog.reset_defaults()


class Log:
    """A file that lines are sent to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def configure(self, **settings: object) -> None:
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        logs.configure(Config(**settings), descriptor)  # type: ignore[arg-type]

    def read(self) -> str:
        written()
        return self._path.read_text()


def written() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def test_json_lines_carry_what_is_bound(log: Log) -> None:
    log.configure(log_format="json")
    with logs.bound(request_id="r1", engine_id=""):
        logs.get("kvferryd.x").info("transfer ended", state="done")
    line = json.loads(log.read())
    assert {"event": "transfer ended", "state": "done", "request_id": "r1", "level": "info"}.items() <= line.items()
    assert "engine_id" not in line


def test_lines_below_the_level_are_not_written_and_libraries_only_warn(log: Log) -> None:
    log.configure(log_level="warning")
    logs.get("kvferryd.x").info("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    logging.getLogger("uvicorn.access").warning("quiet")
    logging.getLogger("uvicorn.error").warning("heard")
    assert [("quiet" in line, "heard" in line) for line in log.read().splitlines()] == [(False, True)]


def test_configured_twice_a_line_is_written_once(log: Log) -> None:
    log.configure()
    log.configure()
    logs.get("kvferryd.x").info("once")
    assert log.read().count("once") == 1


def test_a_traceback_shows_no_local_variables(log: Log) -> None:
    log.configure()
    token = "hunter2"
    try:
        raise ValueError("wrong")
    except ValueError:
        logs.get("kvferryd.x").exception("failed")
    assert "ValueError: wrong" in log.read()
    assert token not in log.read().replace('token = "hunter2"', "")


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_of_a_library_is_of_bounded_length_and_ends_with_what_was_wrong(log: Log, form: str) -> None:
    log.configure(log_format=form)
    theirs = logging.getLogger("uvicorn.error")
    theirs.warning("heard %s", "x" * (1 << 20))
    try:
        raise ValueError("y" * (1 << 20) + " last of all")
    except ValueError:
        theirs.exception("failed")
    said = log.read()
    assert len(said) < 4 * logs.LONGEST
    assert "heard" in said and "Traceback" in said and "last of all" in said


class _Unreadable:
    def __repr__(self) -> str:
        raise ValueError("unreadable")


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_value_that_cannot_be_shown_breaks_nobody_and_its_event_is_said(log: Log, form: str) -> None:
    log.configure(log_format=form)
    logs.get("kvferryd.x").warning("transfer ended", value=_Unreadable(), state="done")
    logs.get("kvferryd.x").warning("goes on")
    ended, goes_on = log.read().splitlines()
    assert "transfer ended" in ended and "ValueError" in ended and "goes on" in goes_on


def test_an_event_writes_so_many_lines_a_second_and_says_what_was_left_out(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    log.configure(log_format="json")
    logger = logs.get("kvferryd.x")
    for _ in range(3 * logs.MOST):
        logger.info("handshake")
    logger.info("another")
    assert len(log.read().splitlines()) == logs.MOST + 1
    now += 1
    logger.info("handshake")
    logger.info("handshake")
    *_, first, second = map(json.loads, log.read().splitlines())
    assert first["left_out"] == 2 * logs.MOST
    assert "left_out" not in second


def test_who_logs_does_not_wait_for_who_reads_and_what_was_lost_is_counted() -> None:
    reading, writing = os.pipe()
    logs.configure(Config(log_format="json"), writing)
    lines, pad = 3 * WAITING // 1000, 1000 * "."

    def say() -> None:
        for number in range(lines):
            logs.get("kvferryd.x").info(f"{number}{pad}")

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(TIMEOUT_S)
    assert not saying.is_alive(), "it waits for the pipe"
    written()  # nor does an end

    told: list[dict[str, object]] = []
    read_again = threading.Event()

    def read() -> None:
        with open(reading) as pipe:
            for line in pipe:
                told.append(json.loads(line))
                if len(told) > lines // 5:
                    read_again.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert read_again.wait(TIMEOUT_S), "what waited is written once the pipe is read"
    written()
    logs.get("kvferryd.x").info("last")
    written()
    os.close(writing)
    thread.join(TIMEOUT_S)
    *kept, lost, last = told
    assert [line["event"] for line in kept] == [f"{number}{pad}" for number in range(len(kept))]
    assert (lost["lost"], lost["level"], last["event"]) == (lines - len(kept), "warning", "last")
