"""`kvferry status`: whether a daemon is ready, what is wrong, what it has moved and what it holds."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.schemas import (
    DrainStatus,
    EngineRecord,
    FailedRequest,
    Info,
    LeaseState,
    Readiness,
    Standing,
    Totals,
    TransferState,
)
from kvferryd.commands.ask import DONE, NOT_SO, client
from kvferryd.commands.here import Here, all_here, here_text
from kvferryd.commands.ranks import Rank, ranks_of, ranks_text
from kvferryd.commands.say import as_json, count, duration, failed_line, printable, size, table, wrong
from kvferryd.config import Config


async def status(config: Config, arguments: argparse.Namespace) -> int:
    if arguments.host:
        return _here(await all_here(config, Path(arguments.host)), json=arguments.json, ready=arguments.ready)
    async with client(config, arguments) as daemon:
        if arguments.ready:
            return _readiness(await daemon.ready(), json=arguments.json)
        if arguments.all:
            return _all(await ranks_of(config, daemon), json=arguments.json)
        ready, info, engines, left, totals, peers = await asyncio.gather(
            daemon.ready(), daemon.info(), daemon.engines(), daemon.drain_status(), daemon.totals(), daemon.neighbours()
        )
        failed = await daemon.transfers(state=TransferState.FAILED, limit=1)
    if arguments.json:
        as_json({
            "ready": ready, "info": info, "engines": engines, "drain": left, "totals": totals, "peers": peers,
            "last_failure": next(iter(failed), None),
        })  # fmt: skip
    else:
        print(f"kvferry {info.version} at {daemon.url}: {verdict(ready, totals)}")
        before = [FailedRequest.of(each, each.error) for each in failed if each.error and not totals.failed_lately]
        earlier = (f"{'last failure':<14} {failed_line(each)}" for each in before)
        for line in (*wrong(ready, totals), *_figures(info, left, totals), *earlier):
            print(f"  {printable(line)}")
        print(_engines(engines))
        for engine in engines:
            for note in engine.notes:
                print(printable(f"note on {engine.engine_id}: {note}"))
    return DONE if ready.state is Standing.READY else NOT_SO


def _readiness(ready: Readiness, *, json: bool) -> int:
    """Print it alone; the exit status."""
    if json:
        as_json(ready)
    else:
        print("\n".join([verdict(ready), *(f"  {printable(line)}" for line in wrong(ready))]))
    return DONE if ready.ready else NOT_SO


def _all(found: Sequence[Rank], *, json: bool) -> int:
    """Print every rank; the exit status."""
    if json:
        as_json({"ranks": found})
    else:
        print(ranks_text(found))
    return DONE if found and all(rank.well for rank in found) else NOT_SO


def _here(found: Sequence[Here], *, json: bool, ready: bool) -> int:
    """Print every daemon of the host; the exit status, for `ready` that of a probe."""
    if json:
        as_json({"daemons": found})
    else:
        print(here_text(found))
    return DONE if all(each.serves if ready else each.well for each in found) else NOT_SO


def verdict(ready: Readiness, totals: Totals | None = None) -> str:
    """totals: with the failures of five minutes; without them the word of a probe."""
    said = ready.state.value if totals is not None else "ready" if ready.ready else "not ready"
    if totals is not None and totals.failed_lately is not None:
        said += f", {count(totals.failed_lately.failed, 'failure')} in 5 min"
    return f"{said}, {count(len(ready.warnings), 'warning')}" if ready.warnings else said


def _figures(info: Info, left: DrainStatus, totals: Totals) -> Iterator[str]:
    failed, unread = totals.transfers.get(TransferState.FAILED, 0), totals.leases.get(LeaseState.EXPIRED, 0)
    arena = f"{size(totals.staging_bytes)} ({size(totals.staging_used_bytes)} in use)"
    held_back = f"{size(totals.quarantined_bytes)} in quarantine, {size(totals.unfreed_bytes)} not given back"
    rows = {
        "device": info.device,
        "peers reach": info.advertise,
        "engine socket": info.engine_socket,
        "way": info.way + (", strict" if info.strict else ""),
        "transports": ", ".join(info.transports) or "none yet",
        "up": duration(info.uptime_s * 1000),
        "left": f"{count(left.leases, 'lease')}, {count(left.transfers, 'transfer')}",
        "moved": f"{size(totals.read_bytes)} read, {size(totals.served_bytes)} served",
        "remembered": f"{totals.transfers.get(TransferState.DONE, 0)} done, {failed} failed"
        + (f", {count(unread, 'lease')} expired unread" if unread else ""),
        "memory": f"arenas {arena}, process {size(totals.process_bytes)}",
    }
    if totals.quarantined_bytes or totals.unfreed_bytes:
        rows["held back"] = held_back
    yield from (f"{name:<14} {value}" for name, value in rows.items())


def _engines(engines: Sequence[EngineRecord]) -> str:
    heads = ("ENGINE", "RANK", "ATTACHED", "CACHE", "ARENA", "EPOCH", "GROUPS")
    rows = [
        (
            engine.engine_id, f"{engine.rank}/{engine.world_size}", "yes" if engine.attached else "no",
            size(engine.cache_bytes), size(engine.arena_bytes), engine.epoch,
            ", ".join(group_summary(group) for group in engine.manifest.get("groups", [])),
        )
        for engine in engines
    ]  # fmt: skip
    return table(heads, rows, "no engine has attached")


def group_summary(group: dict[str, object]) -> str:
    if group.get("kind") == "state":
        return f"{group.get('name')} (state, {group.get('num_blocks')})"
    return f"{group.get('name')} ({group.get('num_blocks')} x {group.get('block_size')} tokens)"
