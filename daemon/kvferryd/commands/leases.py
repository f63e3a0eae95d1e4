"""`kvferry leases`: what was published here, who reads it, and how it ended."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvferry.schemas import LeaseRecord, LeaseState
from kvferryd.commands.ask import DONE, client
from kvferryd.commands.say import as_json, duration, moment, size, table
from kvferryd.config import Config


async def leases(config: Config, arguments: argparse.Namespace) -> int:
    async with client(config, arguments) as daemon:
        found = await daemon.leases(limit=arguments.limit, ended=arguments.ended)
    if arguments.json:
        as_json({"leases": found})
    else:
        print(lease_table(found))
    return DONE


def lease_table(found: Sequence[LeaseRecord]) -> str:
    """Held leases come first, then the newest. READERS: who reads or has read it, in which attempt, and the bytes."""
    rows = []
    for lease in sorted(found, key=lambda lease: (lease.state.ended, -lease.created_at)):
        readers = (
            f"{each.engine_id}/{each.rank} {each.state} in attempt {each.attempt}, {size(each.bytes)}"
            for each in lease.readers
        )
        left = duration(lease.expires_in_ms) if lease.expires_in_ms is not None else "-"
        rows.append((
            lease.state.value, lease.request_id, str(lease.lease), lease.engine_id, str(lease.num_tokens),
            size(lease.bytes), "; ".join(readers) or "-", duration(lease.age_ms), left, moment(lease.created_at),
            lease.reason,
        ))  # fmt: skip
    heads = (
        "STATE", "REQUEST", "LEASE", "ENGINE", "TOKENS", "SERVED", "READERS", "AGE", "EXPIRES IN", "BEGAN", "REASON",
    )  # fmt: skip
    return table(heads, rows, "no leases", bad=(LeaseState.EXPIRED, LeaseState.REVOKED))
