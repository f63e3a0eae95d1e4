"""Questions of tests about staging slots, and about the transfers that wait for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import httpx
from fleet import TIMEOUT_S, until

from kvferry.engine import Received, TransferFailed
from kvferry.router import RouterClient
from kvferry.schemas import TransferState
from kvferryd.demo.fleet import DaemonService

Outcomes = list[Received | BaseException]


async def idle(daemons: Sequence[DaemonService], arena_nbytes: int = 1 << 20) -> None:
    """All slots of one engine's arena are back, on each of these daemons."""
    async with httpx.AsyncClient(trust_env=False) as http:
        for daemon in daemons:

            async def back(daemon: DaemonService = daemon) -> bool:
                return await gauge(http, daemon, "kvferry_staging_used_bytes") == 0

            await until(back, f"all slots of {daemon.name} are back")
            assert await gauge(http, daemon, "kvferry_staging_bytes") == arena_nbytes


async def gauge(http: httpx.AsyncClient, daemon: DaemonService, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", (await http.get(f"{daemon.url}/metrics")).text, re.MULTILINE)
    assert found
    return float(found[1])


async def reading(router: RouterClient, request_id: str) -> None:
    async def begun() -> bool:
        states = {record.state for record in await router.transfers(request_id)}
        return bool(states - {TransferState.WAITING, TransferState.CONNECTING})

    await until(begun, "the transfer reads")


async def failed(receiving: asyncio.Task[Outcomes], codes: set[str]) -> None:
    """On all ranks that read from the source's rank 0, and the blocks are safe in the end."""
    async with asyncio.timeout(TIMEOUT_S):
        for outcome in (await receiving)[:2]:
            assert isinstance(outcome, TransferFailed)
            assert outcome.code in codes
            await outcome.quiesced()
