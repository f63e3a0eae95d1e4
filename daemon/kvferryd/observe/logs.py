"""A structured line per event, on stderr: text for people, JSON for machines.

Modules take their logger with `logs.get(__name__)` and name what a line is about with `bound(transfer_id=...)`.
uvicorn, grpc and everything else that logs through the standard library goes to the same place.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, ProcessorReturnValue, WrappedLogger

from kvferry.output import LOST, Writer
from kvferryd.config import Config

MOST = 1000
"""Lines of one event in a second."""
LONGEST = 1 << 14
"""Characters of a text in a line: a library may log what a stranger sent it."""


class _Bounded:
    """At most MOST lines a second of one event; the next line says how many were left out."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        """For each event: the second of its last line, and the lines wanted since that second began."""

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        event, now = str(line.get("event")), int(time.monotonic())
        second, wanted = self._seen.get(event, (now, 0))
        if second == now and wanted >= MOST:
            self._seen[event] = second, wanted + 1
            raise structlog.DropEvent
        if wanted > MOST:
            line["left_out"] = wanted - MOST
        self._seen[event] = now, wanted + 1 if second == now else 1
        return line


def _cut(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """Texts that are too long lack their middle: a traceback ends with what is wrong."""
    for name, value in line.items():
        if isinstance(value, str) and len(value) > LONGEST:
            line[name] = f"{value[: LONGEST // 2]} ... {value[-LONGEST // 2 :]}"
    return line


def _never_failing(processors: Sequence[Processor]) -> Processor:
    """All of them as one. A line that cannot be made breaks no caller: its event is said."""

    def make(logger: WrappedLogger, method: str, line: EventDict) -> ProcessorReturnValue:
        made: Any = dict(line)
        try:
            for each in processors:
                made = each(logger, method, made)
        except Exception as error:  # noqa: BLE001  values of any kind are logged
            known = {name: str(line[name]) for name in ("event", "level", "logger", "time") if name in line}
            return processors[-1](logger, method, {**known, "unreadable": type(error).__name__})
        return cast("ProcessorReturnValue", made)

    return make


TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class _Told(Protocol):
    """peer_pb2.Trace and OrderRequest."""

    traceparent: str
    x_request_id: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The name by which the lines of a request are found on both sides and all ranks: as its router gave it, or
    empty."""

    traceparent: str = ""
    x_request_id: str = ""

    @classmethod
    def of(cls, told: _Told) -> Trace:
        """The well-formed parts of it."""
        parent, name = TRACEPARENT.fullmatch(told.traceparent), REQUEST_ID.fullmatch(told.x_request_id)
        return cls(parent[0] if parent else "", name[0] if name else "")

    @property
    def about(self) -> dict[str, str]:
        """For a line."""
        about = {"x_request_id": self.x_request_id, "trace_id": self.traceparent[3:35]}
        return {key: value for key, value in about.items() if value}


UNTRACED = Trace()


class _Lines:
    """The end of structlog's chain for our own lines: `logging` would take each apart and put it together again."""

    def __init__(self, name: str, put: Callable[[str], None]) -> None:
        self.name = name
        self.debug = self.info = self.warning = self.error = self.critical = put


class _Handler(logging.Handler):
    """Lines are made by who logs, and written by a thread. When the interpreter ends it waits until they are written;
    not by `logging.shutdown`: logging forgets its handlers where a library (NIXL does) calls `dictConfig`."""

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = Writer(descriptor, self._say_lost)
        atexit.register(self._writer.flush)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  as logging's own handlers
            self.handleError(record)
        else:
            self._writer.put(line)

    def put(self, line: str) -> None:
        """A line that is made already. Called on any thread."""
        with self.lock:  # type: ignore[union-attr]  # None before __init__ alone
            self._writer.put(line)

    def flush(self) -> None:
        self._writer.flush()

    def _say_lost(self, lines: int) -> str:
        said = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": LOST, "lost": lines}
        return self.format(logging.makeLogRecord(said))


def configure(config: Config, descriptor: int = 2) -> None:
    """Send every line to `descriptor` as the settings say. May be called again."""
    about: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    last: list[Processor] = [
        structlog.processors.format_exc_info,  # not rich's, which shows local variables, tokens among them
        _cut,
    ]
    if config.log_format == "json":
        last.append(structlog.processors.JSONRenderer(default=str))
    else:
        last.append(
            structlog.dev.ConsoleRenderer(
                colors=os.isatty(descriptor),
                timestamp_key="time",
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,  # without it, a warning of what is formatted already
            )
        )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*about, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = _Handler(descriptor, formatter)
    structlog.configure(
        processors=[_Bounded(), *about, _never_failing(last)],
        logger_factory=lambda name: _Lines(name, handler.put),
        wrapper_class=structlog.make_filtering_bound_logger(config.log_level),
        cache_logger_on_first_use=False,  # loggers are taken at import, before the settings are known
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries: what is wrong, not what they do
    for name in ("uvicorn", "uvicorn.error"):  # an earlier server in this process gave it a pipe of its own
        theirs = logging.getLogger(name)
        theirs.handlers.clear()
        theirs.propagate = True
        theirs.setLevel(logging.NOTSET)
    logging.getLogger("uvicorn.access").disabled = True  # requests have a line of their own: `kvferryd.api.rest.gate`


def get(name: str) -> FilteringBoundLogger:
    """The logger of a module. Lines are an event and key=value pairs: `log.info("transfer ended", state=...)`."""
    logger: FilteringBoundLogger = structlog.get_logger(name)
    return logger


def begin(**about: object) -> None:
    """Put them on every line of this task from now on."""
    structlog.contextvars.bind_contextvars(**about)


def asked() -> str:
    """The X-Request-Id of the REST call that is being answered."""
    return str(structlog.contextvars.get_contextvars().get("x_request_id", ""))


def bound(**about: object) -> AbstractContextManager[object]:
    """Put request_id, transfer_id, engine_id and the like on every line logged within, in this task."""
    return structlog.contextvars.bound_contextvars(**{key: value for key, value in about.items() if value})
