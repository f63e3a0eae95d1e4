"""`kvferry top`: all ranks of the engines beside a daemon and what they move, again and again."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Mapping, Sequence

from kvferry.schemas import Totals
from kvferryd.commands.ask import DONE, NOT_SO, client
from kvferryd.commands.ranks import Rank, ranks_of, ranks_text
from kvferryd.commands.say import CLEAR, as_json
from kvferryd.commands.transfers import transfer_table
from kvferryd.config import Config

SHOWN = 20
"""Transfers, the newest."""


async def top(config: Config, arguments: argparse.Namespace) -> int:
    """The exit status is that of the last look."""
    before: dict[tuple[str, int], tuple[float, Totals]] = {}
    rounds = range(arguments.times) if arguments.times else itertools.count()
    found: list[Rank] = []
    async with client(config, arguments) as daemon:
        for number in rounds:
            if number:
                await asyncio.sleep(arguments.every)
            found, records = await asyncio.gather(ranks_of(config, daemon), daemon.transfers(limit=SHOWN))
            now = time.monotonic()
            _measure(found, before, now)
            if arguments.json:
                as_json({"ranks": found, "transfers": records})
            else:
                clear = CLEAR if sys.stdout.isatty() else ""
                print(f"{clear}{ranks_text(found, speeds=True)}\n\n{transfer_table(records)}", flush=True)
            before = {(each.engine_id, each.rank): (now, each.totals) for each in found if each.totals is not None}
    return DONE if found and all(each.well for each in found) else NOT_SO


def _measure(found: Sequence[Rank], before: Mapping[tuple[str, int], tuple[float, Totals]], now: float) -> None:
    """Set what each rank has read and served a second since the last look, if it is the same daemon."""
    for each in found:
        at, then = before.get((each.engine_id, each.rank), (now, None))
        if then is None or each.totals is None or now <= at:
            continue
        read, served = each.totals.read_bytes - then.read_bytes, each.totals.served_bytes - then.served_bytes
        if read >= 0 and served >= 0:  # they begin at 0 with each daemon
            each.read_bytes_per_s, each.served_bytes_per_s = read / (now - at), served / (now - at)
