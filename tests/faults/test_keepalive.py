"""A daemon that falls silent, while its connections stay open, is noticed by the daemons at their other ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, until
from lives import engine_on
from pair import is_in, waits_for
from ranks import Kv, TestEngine

from kvferry.engine import Lease, TransferFailed
from kvferry.schemas import Awaited, LeaseState, TransferState

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
NOTICED_S = 15.0
"""Three times what the keepalive of the channels amounts to; by gRPC's defaults it is 70 s."""
HALF, ALL = 16, 32


async def half_read(
    daemons: Daemons, stack: AsyncExitStack, name: str
) -> tuple[TestEngine, Lease, TestEngine, asyncio.Task[object]]:
    """(source, its lease, reader, its transfer that waits for the second half)"""
    (theirs,), (ours,) = await daemons.start(f"{name}-source"), await daemons.start(f"{name}-reader")
    source, _ = await engine_on(stack, f"{name}-source", theirs)
    reader, router = await engine_on(stack, f"{name}-reader", ours)
    blocks = source.take(ALL)
    source.write(Kv.random(ALL), blocks)
    receiving = asyncio.create_task(
        reader.ranks[0].client.receive("r", reader.take(ALL).tables(), source=source.source(), deadline_s=300)
    )
    await until(lambda: waits_for(router, "r", Awaited.PUBLISH), "the source knows of its reader")
    (lease,) = await source.publish("r", blocks, HALF, more=True, ttl_s=0.5)
    await until(lambda: is_in(router, "r", TransferState.READING), "it reads")
    return source, lease, reader, receiving


async def test_a_silent_reader_holds_no_lease_and_a_silent_source_no_transfer(
    daemons: Daemons, stack: AsyncExitStack, record_property: Callable[[str, object], None]
) -> None:
    (_, held, mute, aborted), (deaf, _, _, reading) = await asyncio.gather(
        half_read(daemons, stack, "one"), half_read(daemons, stack, "two")
    )
    silent = [mute.daemons[0], deaf.daemons[0]]
    for daemon in silent:
        daemon.signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        async with asyncio.timeout(NOTICED_S):
            with pytest.raises(TransferFailed) as failed:
                await reading
            by_reader_s = time.monotonic() - began
            assert await held.ended() is LeaseState.EXPIRED
            by_source_s = time.monotonic() - began
        assert failed.value.code in ("peer_lost", "peer_unreachable")
    finally:
        for daemon in silent:
            daemon.signal(signal.SIGCONT)
    with pytest.raises(TransferFailed):
        await aborted
    record_property("seen", ["a source's daemon falls silent", failed.value.code, f"{by_reader_s:.2f}", ""])
    record_property("seen", ["a reader's daemon falls silent", "expired", f"{by_source_s:.2f}", ""])
