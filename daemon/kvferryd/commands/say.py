"""How the commands print what a daemon answers: tables and figures for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Container, Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from kvferry.schemas import ErrorBody, FailedRequest, Readiness, Totals

UNBROKEN = 1 << 16
"""Columns where the output is no terminal."""
CLEAR = "\x1b[H\x1b[2J"
"""Begins a terminal's screen anew."""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], none: str, bad: Container[str] = ()) -> str:
    """Columns two blanks apart; in a pipe no cell is cut or broken. Control characters are shown as `?`. bad: first
    cells of rows that are red on a terminal."""
    if not rows:
        return none
    from rich.console import Console  # 50 ms, which the probe of a pod can do without
    from rich.table import Table
    from rich.text import Text

    grid = Table(*heads, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row), style="red" if row[0] in bad else None)
    console = Console(width=None if sys.stdout.isatty() else UNBROKEN)
    with console.capture() as shown:
        console.print(grid)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(nbytes: float) -> str:
    """Bytes in binary units, three digits or so: `1.5 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while nbytes >= 1024 and unit < len(units) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.1f} {units[unit]}" if unit and nbytes < 100 else f"{nbytes:.0f} {units[unit]}"


def duration(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.1f} ms"
    if ms < 120_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms / 60_000:.0f} min" if ms < 7_200_000 else f"{ms / 3_600_000:.1f} h"


def rate(bytes_per_s: float | None) -> str:
    return f"{size(bytes_per_s)}/s" if bytes_per_s else "-"


def moment(at: float | None) -> str:
    """Seconds since 1970, as the clock of this machine has it."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at)) if at else "-"


def error_line(error: ErrorBody) -> str:
    return f"{error.code}: {error.message}{f' -> {error.remedy}' if error.remedy else ''}"


def wrong(ready: Readiness, totals: Totals | None = None) -> Iterator[str]:
    """A line for each reason why a daemon is not ready, for each warning, and for the last failure of five minutes."""
    yield from (f"not ready: {reason}" for reason in ready.reasons)
    yield from (f"warning: {warning}" for warning in ready.warnings)
    if totals is not None and totals.failed_lately is not None:
        yield f"failed: {failed_line(totals.failed_lately.last)}"


def failed_line(failed: FailedRequest) -> str:
    """With the command that says more of it."""
    said = f"request {failed.request_id} at {moment(failed.at)}"
    if not failed.transfer_id:
        return f"{said}: {error_line(failed.error)}"
    reading = f", reading {failed.engine_id}" if failed.engine_id else ""
    return f"{said}{reading}: {error_line(failed.error)}; more: kvferry explain --transfer {failed.transfer_id[:8]}"


def as_json(answer: object) -> None:
    print(json.dumps(TypeAdapter(Any).dump_python(answer, mode="json"), indent=2), flush=True)
