"""A reader that keeps its stream open and reads nothing costs its source no memory."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from fleet import Daemons, agent_of, peer_stub, resident_mb
from lives import engine_on
from ranks import TestEngine

from kvferry.schemas import LeaseState
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2

pytestmark = pytest.mark.anyio
LEASES, METADATA = 1000, bytes(60_000)
KEPT_MB = 25.0
"""The cost of all of them, at most. If the reader's share of each were kept, it would be 60 MB."""


async def test_announcements_do_not_queue_for_a_reader_that_does_not_read(
    daemons: Daemons, stack: AsyncExitStack
) -> None:
    (daemon,) = await daemons.start("announcing")
    engine, _ = await engine_on(stack, "announcing", daemon)
    reader = peer_pb2.Reader(engine_id="deaf", epoch="1", rank=0, world_size=1)
    opening = peer_pb2.ReadOpening(engine_id="announcing", epoch=engine.epoch, reader=reader)
    client, tables = engine.ranks[0].client, engine.take(16).tables()
    async with peer_stub(daemon) as stub:
        opening.agent_name = await agent_of(stub, "announcing")
        call = stub.Read()
        await call.write(peer_pb2.ReadRequest(opening=opening))
        await _publish(engine, "warm-up", tables, 100)
        before = resident_mb(daemon)
        await _publish(engine, "deaf", tables, LEASES)
        assert resident_mb(daemon) - before < KEPT_MB
        call.cancel()
    lease = await client.publish("after", tables, 16)
    await client.abort("after")
    assert await lease.ended() is LeaseState.REVOKED


async def _publish(engine: TestEngine, name: str, tables: Tables, count: int) -> None:
    """Leases that come and go, each announced to whoever reads from this engine."""
    client = engine.ranks[0].client
    for number in range(count):
        await client.publish(f"{name}-{number}", tables, 16, metadata=METADATA)
        await client.abort(f"{name}-{number}")
