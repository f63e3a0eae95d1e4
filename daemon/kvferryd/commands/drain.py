"""`kvferry drain`: take no more work, wait until what is here has ended."""

from __future__ import annotations

import argparse
import sys
import time

from kvferry.schemas import DrainStatus
from kvferryd.commands.ask import DONE, NOT_SO, client
from kvferryd.commands.say import as_json, count
from kvferryd.config import Config

PROGRESS_S = 5.0
"""A line of progress at least this often while draining."""


async def drain(config: Config, arguments: argparse.Namespace) -> int:
    """The daemon holds each answer until nothing is left or the drain is cancelled, at most PROGRESS_S; a line is
    printed at each change."""
    deadline, said = time.monotonic() + arguments.wait, ""
    async with client(config, arguments) as daemon:
        if arguments.status or arguments.cancel:
            left = await (daemon.cancel_drain() if arguments.cancel else daemon.drain_status())
            if arguments.json:
                as_json(left)
            else:
                print(drain_line(left))
            return DONE if left.drained or arguments.cancel else NOT_SO
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            left = await daemon.drain(min(left_s, PROGRESS_S if said else 0.0))
            line = drain_line(left)
            if line != said and not arguments.json:
                print(line, flush=True)
            if left.drained or not left.draining or left_s == 0:
                break
            said = line
    if arguments.json:
        as_json(left)
    if left.draining:
        print("kvferry: it takes no new transfers; `kvferry drain --cancel` ends that", file=sys.stderr)
    return DONE if left.drained else NOT_SO


def drain_line(left: DrainStatus) -> str:
    if left.drained:
        return "drained: no lease and no transfer is left"
    held = f"{count(left.leases, 'lease')}, {count(left.transfers, 'transfer')}"
    return f"draining: {held} left" if left.draining else f"not draining: {held} here"
