"""Handshakes, again and again: the process that tries peers' metadata keeps a connection of each, so it is replaced."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import Daemons
from lives import engine_on, published, receives

from kvferry.schemas import PeerRequest
from kvferryd.demo.fleet import DaemonService
from kvferryd.transport.metadata import LOADS

pytestmark = pytest.mark.anyio
TCP = ("--ucx", "TLS=tcp NET_DEVICES=lo")


def files_of_children(daemon: DaemonService) -> int:
    pid = daemon.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(len(os.listdir(f"/proc/{child}/fd")) for child in children)


async def test_a_peer_that_is_forgotten_and_met_again(daemons: Daemons, stack: AsyncExitStack) -> None:
    (ours,), (theirs,) = await daemons.start("meeting", 1, *TCP), await daemons.start("met", 1, *TCP)
    reader, router = await engine_on(stack, "meeting", ours)
    source, _ = await engine_on(stack, "met", theirs)
    kv, _ = await published(source, "first")
    await receives(reader, "first", kv, source.source())
    held = [await asyncio.to_thread(files_of_children, ours)]
    for _ in range(2 * LOADS):
        await router.forget_peer("met")
        await router.prewarm(PeerRequest(engine_id="met", address=source.address))
        held.append(await asyncio.to_thread(files_of_children, ours))
    assert max(held) <= held[0] + LOADS
    kv, _ = await published(source, "last")
    await receives(reader, "last", kv, source.source())
