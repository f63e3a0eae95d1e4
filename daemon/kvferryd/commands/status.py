"""`kvferry status`: whether a daemon is ready, what is wrong, and what it is."""

from __future__ import annotations

import argparse
import asyncio

from kvferryd.commands.ask import DONE, NOT_SO, client
from kvferryd.commands.say import as_json, count, duration, printable, table
from kvferryd.config import Config


async def status(config: Config, arguments: argparse.Namespace) -> int:
    async with client(config, arguments) as daemon:
        ready = await daemon.ready()
        info, engines, left = await asyncio.gather(daemon.info(), daemon.engines(), daemon.drain_status())
    if arguments.json:
        as_json({"ready": ready, "info": info, "engines": engines, "drain": left})
        return DONE if ready.ready else NOT_SO
    print(f"kvferry {info.version} at {daemon.url}: {'ready' if ready.ready else 'not ready'}")
    rows = [
        ("device", info.device),
        ("peers reach", info.advertise),
        ("engine socket", info.engine_socket),
        ("way", info.way + (", strict" if info.strict else "")),
        ("transports", ", ".join(info.transports) or "none yet"),
        ("up", duration(info.uptime_s * 1000)),
        ("left", f"{count(left.leases, 'lease')}, {count(left.transfers, 'transfer')}"),
    ]
    for line in (*ready.reasons, *ready.warnings, *(f"{name:<14} {value}" for name, value in rows)):
        print(f"  {printable(line)}")
    print(table(
        ("ENGINE", "RANK", "ATTACHED", "EPOCH", "GROUPS"),
        [
            (engine.engine_id, f"{engine.rank}/{engine.world_size}", "yes" if engine.attached else "no", engine.epoch,
             ", ".join(group_summary(group) for group in engine.manifest.get("groups", [])))
            for engine in engines
        ],
        "no engine has attached",
    ))  # fmt: skip
    for engine in engines:
        for note in engine.notes:
            print(printable(f"note on {engine.engine_id}: {note}"))
    return DONE if ready.ready else NOT_SO


def group_summary(group: dict[str, object]) -> str:
    if group.get("kind") == "state":
        return f"{group.get('name')} (state, {group.get('num_blocks')})"
    return f"{group.get('name')} ({group.get('num_blocks')} x {group.get('block_size')} tokens)"
