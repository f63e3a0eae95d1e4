"""An engine that is over while its memory is being registered: nothing is unmapped under NIXL."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from caches import NHD, array, cache

from kvferry.errors import KvferryError
from kvferry.protocol.session_events import Rank
from kvferryd.config import Config
from kvferryd.ferry import Ferry
from kvferryd.observe.metrics import Metrics
from kvferryd.transport.agent import Agent
from kvferryd.transport.read import Span

pytestmark = pytest.mark.anyio
RANK = Rank("e", "e-1", 0, 1)


async def test_memory_stays_until_what_registers_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = (array(name, region=n, order=NHD, block=4, slot=4, head=2, dim=8) for n, name in enumerate("kv"))
    manifest = cache(*arrays, engine="e")
    ferry = Ferry(Config(), Metrics())
    session = await ferry.registry.attach(RANK)
    regions = [
        await session.add(each.id, each.nbytes, lambda n=each.nbytes: ferry.memory.allocate(n))
        for each in manifest.regions
    ]
    register, ending = Agent.register, asyncio.create_task(asyncio.sleep(0))

    async def registers(agent: Agent, *spans: Span) -> bytes:
        nonlocal ending
        if regions[0].span in spans:
            ending = asyncio.create_task(ferry.registry.end(session.id, leave=True))
            await asyncio.wait([ending], timeout=0.3)
            assert list(session.regions.values()) == regions
        return await register(agent, *spans)

    monkeypatch.setattr(Agent, "register", registers)
    with pytest.raises(KvferryError) as refused:
        await ferry.registry.register(session, manifest)
    assert refused.value.code == "session_closed"
    async with asyncio.timeout(60):
        await ending
    assert not session.regions
    assert session.engine is None
    await ferry.close()
