"""One structured line per event, on stderr: text for people, JSON for machines.

Modules take their logger with `logs.get(__name__)` and name what a line is about with `bound(transfer_id=...)`.
uvicorn, grpc and everything else that logs through the standard library goes through the same pipe.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvferryd.config import Config

MOST = 1000
"""Lines of one event in a second."""


class _Bounded:
    """At most MOST lines a second of one event, whoever causes them; the next one then says how many were left out."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        """Of each event: the second of its last line, and the lines wanted since that second began."""

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


def configure(config: Config, stream: TextIO | None = None) -> None:
    """Send every line to `stream` (stderr where absent) as the settings say. May be called again."""
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor]
    if config.log_format == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        last = [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(),
                timestamp_key="time",
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,  # rich's shows local variables, tokens among them
            )
        ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _Bounded(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # loggers are taken at import, before the settings are known
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # libraries: what is wrong, not what they do
    for name in ("uvicorn", "uvicorn.error"):  # whoever ran uvicorn in this process before gave it a pipe of its own
        theirs = logging.getLogger(name)
        theirs.handlers.clear()
        theirs.propagate = True
        theirs.setLevel(logging.NOTSET)
    logging.getLogger("kvferryd").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # requests have a line of their own: `kvferryd.api.rest.gate`


def get(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module. Lines are an event and key=value pairs: `log.info("transfer ended", state=...)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bound(**about: object) -> AbstractContextManager[object]:
    """Put request_id, transfer_id, engine_id and the like on every line logged within, in this task."""
    return structlog.contextvars.bound_contextvars(**{key: value for key, value in about.items() if value})
