"""`kvferry transfers`: what moves and what has moved."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from kvferry.schemas import TransferRecord, TransferState
from kvferryd.commands.ask import DONE, bad_argument, client
from kvferryd.commands.say import CLEAR, as_json, duration, moment, rate, size, table
from kvferryd.config import Config

NONE = "no transfers: the daemon that reads lists them, decode's; `kvferry leases` has what is read from this one"


async def transfers(config: Config, arguments: argparse.Namespace) -> int:
    state = _state(arguments.state)
    async with client(config, arguments) as daemon:
        while True:
            records = await daemon.transfers(arguments.request_id, state)
            if arguments.json:
                as_json({"transfers": records})
            else:
                if arguments.watch is not None and sys.stdout.isatty():
                    print(CLEAR, end="")
                print(transfer_table(records), flush=True)
            if arguments.watch is None:
                return DONE
            await asyncio.sleep(max(0.1, arguments.watch))


def _state(text: str | None) -> TransferState | None:
    try:
        return TransferState(text) if text else None
    except ValueError:
        raise bad_argument("--state", text, f"one of {', '.join(TransferState)}") from None


def transfer_table(records: Sequence[TransferRecord]) -> str:
    """Unfinished transfers first, then the newest. RATE is `bytes_per_s` of the record; WAITED is the part of TOTAL in
    which the order, the reservation or the publish was not there yet."""
    rows = []
    for record in sorted(records, key=lambda record: (record.state.ended, -record.created_at)):
        source = record.source.engine_id if record.source else "-"
        why = f"{record.error.code}: {record.error.message}" if record.error else ""
        rows.append((
            record.state.value, record.request_id, str(record.attempt or "-"), str(record.lease or "-"), source,
            record.engine_id, record.path or "-", size(record.bytes), rate(record.bytes_per_s),
            duration(_total_ms(record)), duration(record.phases_ms.get("waiting", 0.0)), moment(record.created_at), why,
        ))  # fmt: skip
    numbers, what = ("ATTEMPT", "LEASE"), ("FROM", "TO", "PATH", "BYTES", "RATE", "TOTAL", "WAITED", "BEGAN", "ERROR")
    return table(("STATE", "REQUEST", *numbers, *what), rows, NONE, bad=(TransferState.FAILED,))


def _total_ms(record: TransferRecord) -> float:
    """An unfinished transfer counts until now, as phases are counted at their end."""
    if record.state.ended:
        return record.phases_ms.get("total", 0.0)
    return max(0.0, (time.time() - record.created_at) * 1000)
