"""The demo's steps: start everything, two waves of prompts, compare with an engine that worked alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router import RouterClient
from kvferry.schemas import TransferRecord
from kvferryd.demo.clients import complete_all
from kvferryd.demo.fleet import DaemonService, Fleet, Service
from kvferryd.demo.prompts import waves
from kvferryd.demo.report import LEGEND, Narrator, all_equal, transfer_table, verdict

START_S = 90.0
TRANSFER_END_S = 10.0
"""A transfer may end a moment after the tokens that it made possible: its lease has still to be closed."""


@dataclass(frozen=True, slots=True)
class Cast:
    prefill_daemons: list[DaemonService]
    decode_daemons: list[DaemonService]
    prefill: Service
    decode: Service
    alone: Service
    proxy: Service

    @property
    def daemons(self) -> list[DaemonService]:
        return [*self.prefill_daemons, *self.decode_daemons]


async def start(fleet: Fleet, narrator: Narrator) -> Cast:
    """Everything at once. Engines wait for their daemons by themselves; the proxy needs nobody to start."""
    narrator.say("starting 5 daemons, 3 engines and a proxy")
    ours, theirs = fleet.daemons("prefill", 2), fleet.daemons("decode", 3)
    alone = fleet.engine("alone", tp=1, block_size=16, num_blocks=512)
    await _up(fleet, narrator, [*ours, *theirs], "daemons are up")
    prefill = fleet.engine("prefill", tp=2, layout="NHD", block_size=16, num_blocks=512, daemons=ours)
    decode = fleet.engine("decode", tp=3, layout="HND", block_size=24, num_blocks=384, daemons=theirs)
    proxy = fleet.proxy(prefill, decode, prefill_daemons=ours, decode_daemons=theirs, order="router")
    await _up(
        fleet, narrator, [prefill, decode, alone, proxy], "engines and proxy are up, KV caches lie in the daemons"
    )
    return Cast(ours, theirs, prefill, decode, alone, proxy)


async def _up(fleet: Fleet, narrator: Narrator, services: Sequence[Service], then: str) -> None:
    names = ", ".join(service.name for service in services)
    await narrator.during(fleet.ready(*services, timeout_s=START_S), lambda: f"waiting for {names}")
    narrator.say(then)


async def tell(cast: Cast, narrator: Narrator) -> list[str]:
    """Run both waves, print the table and the verdict; returns the faults, none when all is well."""
    first, second = waves()
    alone = asyncio.create_task(complete_all(cast.alone.url, [*first, *second]))
    try:
        narrator.say(f"first wave through the proxy: {len(first)} prompts, nothing cached")
        completed = await narrator.during(complete_all(cast.proxy.url, first), lambda: "the first wave is under way")
        narrator.say(f"second wave: {len(second)} prompts at once, half of them begin with what decode holds")
        completed += await narrator.during(complete_all(cast.proxy.url, second), lambda: "the second wave is under way")
        narrator.say("the same prompts on a single engine of one rank, without daemons")
        expected = await narrator.during(alone, lambda: "the single engine is at work")
    finally:
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
    records = await _records(cast.decode_daemons[0])
    narrator.console.print()
    narrator.console.print(LEGEND)
    narrator.console.print(transfer_table(completed, records))
    faults = verdict(completed, expected, records)
    if not faults:
        nbytes = sum(record.bytes for record in records)
        narrator.say(f"[bold green]{all_equal(completed)}[/bold green]")
        narrator.say(f"{len(records)} transfers done, {nbytes:,} bytes moved")
    return faults


async def _records(daemon: DaemonService) -> list[TransferRecord]:
    async with RouterClient(daemon.url) as client:
        records = await client.transfers()
        waits = (client.wait(record.transfer_id, timeout_s=TRANSFER_END_S) for record in records)
        return list(await asyncio.gather(*waits))
