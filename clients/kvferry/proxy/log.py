"""The proxy's log: text on stderr, written by a thread, so that a reader that stands still holds up no request."""

from __future__ import annotations

import logging

from kvferry.output import LOST, Writer


class Handler(logging.Handler):
    """For `logging`. `flush` waits a second at most."""

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._writer = Writer(descriptor, lambda lines: f"{LOST}: {lines}")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  a line that cannot be made breaks no request
            line = f"{record.levelname} {record.msg!r}: {type(error).__name__}"
        self._writer.put(line)

    def flush(self) -> None:
        self._writer.flush()
