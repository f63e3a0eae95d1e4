"""The table of `kvferry bench gpu`: every row printed as soon as it is known, and kept as a line of JSON if asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from kvferry.errors import KvferryError, Malformed

LEGEND = """\
total ms: from the engine's order to its done event, median (of a raw row: the operation). reading ms: of it, the phase
in which bytes move, binding included. copy ms, NIXL ms: of that, kernels between launch and event, and NIXL requests
(staged has both, and they overlap). GB/s and % are of the request over total and over reading; 100% is the plain copy.
CPU ms: of all daemons of both sides together, user and system, for each request, publishing included.
"""
COLUMNS = (
    "way", "case", "MB", "total ms", "reading ms", "copy ms", "NIXL ms", "GB/s", "%", "reading GB/s", "reading %",
    "CPU ms", "path",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds, medians of `repeats`; None for what such a row has not. `nbytes`: of all requests of one repeat.

    reading_s: of several requests at once, the median of theirs, and no rate. error: why there is nothing else.
    """

    way: str
    case: str
    nbytes: int = 0
    total_s: float | None = None
    reading_s: float | None = None
    nixl_s: float | None = None
    copy_s: float | None = None
    cpu_s: float | None = None
    requests: int = 1
    repeats: int = 0
    path: str = ""
    error: str = ""

    @property
    def rate(self) -> float | None:
        """Bytes per second over the whole."""
        return self.nbytes / self.total_s if self.total_s else None

    @property
    def reading_rate(self) -> float | None:
        return self.nbytes / self.reading_s if self.reading_s and self.requests == 1 else None


class Table:
    """`ceiling` in bytes per second, once it is known. `failures`: rows with an error. Close it."""

    def __init__(self, path: Path | None) -> None:
        """path: for one JSON object per line, new. Raises KvferryError (`not_writable`)."""
        self.ceiling: float | None = None
        self.failures = 0
        self._file: TextIO | None = None
        if path is not None:
            try:
                self._file = path.open("w")
            except OSError as error:
                raise Malformed(
                    "not_writable", f"the rows cannot be kept: {error.strerror}", field="json", value=path,
                    remedy="name a file in a folder that exists and is yours",
                ) from None  # fmt: skip

    def head(self, machine: Mapping[str, object]) -> None:
        print(f"{', '.join(f'{name} {value}' for name, value in machine.items())}\n\n{LEGEND}")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        self.keep({"machine": machine})

    def add(self, row: Row) -> None:
        if row.error:
            self.failures += 1
            error = " ".join(row.error.split()).replace("|", "/")
            print(f"| {row.way} | {row.case} | {' | ' * (len(COLUMNS) - 3)}FAILED: {error} |", flush=True)
        else:
            cells = [
                row.way, row.case, f"{row.nbytes / 1e6:.0f}", *map(_ms, (row.total_s, row.reading_s, row.copy_s)),
                _ms(row.nixl_s), *self._rated(row.rate), *self._rated(row.reading_rate), _ms(row.cpu_s), row.path,
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
        self.keep({**asdict(row), "rate": row.rate, "reading_rate": row.reading_rate, "ceiling": self.ceiling})

    def keep(self, line: Mapping[str, object]) -> None:
        """Write a line of JSON to disk at once: a run that is cut off has what it measured."""
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    @contextmanager
    def failing(self, way: str, case: str) -> Iterator[None]:
        """An error inside is a row, and the run goes on."""
        try:
            yield
        except TimeoutError:
            self.add(Row(way, case, error="deadline: it did not end in time"))
        except Exception as error:  # noqa: BLE001  CUDA's, NIXL's and torch's are of many kinds
            self.add(Row(way, case, error=said(error)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _rated(self, rate: float | None) -> tuple[str, str]:
        if rate is None:
            return "", ""
        return f"{rate / 1e9:.1f}", f"{rate / self.ceiling:.1%}" if self.ceiling else ""


def said(error: BaseException) -> str:
    """An error's code and message."""
    code, message = (error.code, error.message) if isinstance(error, KvferryError) else (type(error).__name__, error)
    return f"{code}: {message}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"
