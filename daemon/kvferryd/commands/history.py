"""`kvferry history`: since when something is as it is."""

from __future__ import annotations

import argparse

from kvferry.schemas import History, HistoryFigures, HistoryMark, MarkKind
from kvferryd.commands.ask import DONE, client
from kvferryd.commands.say import as_json, duration, moment, size, table
from kvferryd.config import Config

HOUR_S, ROWS = 3600, 12
HEADS = ("READ", "SERVED", "DONE", "FAILED", "P50", "P99", "CODES")


async def history(config: Config, arguments: argparse.Namespace) -> int:
    span_s = HOUR_S * arguments.hours
    step_s = HOUR_S // ROWS if arguments.hours == 1 else HOUR_S
    async with client(config, arguments) as daemon:
        told = await daemon.history(span_s, step_s, peers=True)
    if arguments.json:
        as_json(told)
    else:
        print(history_table(told))
        if told.peers:
            print()
            rows = [(each.engine_id, *_cells(each)) for each in told.peers]
            print(table(("PEER", *HEADS), rows, ""))
    return DONE


def history_table(told: History) -> str:
    """A row for each time in which something ended, and one for each mark, in their order."""
    rows = [(float(each.at), [moment(each.at), *_cells(each)]) for each in told.points]
    rows += [(mark.at, [_said(mark), *[""] * (len(HEADS) - 1), mark.why]) for mark in told.marks]
    died = {_said(mark) for mark in told.marks if mark.kind is MarkKind.DEATH}
    return table(("FROM", *HEADS), [row for _, row in sorted(rows)], "nothing has ended", bad=died)


def _said(mark: HistoryMark) -> str:
    return f"{moment(mark.at)} {mark.kind.value}"


def _cells(figures: HistoryFigures) -> tuple[str, ...]:
    p50, p99 = ("-" if ms is None else duration(ms) for ms in (figures.p50_ms, figures.p99_ms))
    codes = ", ".join(f"{code} {times}" for code, times in sorted(figures.failures.items()))
    read, served = size(figures.read_bytes), size(figures.served_bytes)
    return read, served, f"{figures.done}", f"{figures.failed}", p50, p99, codes
