"""What a session and its engine have taken is given back, also where it comes too late or is not whole."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from test_arena import Memory
from test_channels_of_ranks import first_of

from kvferry.errors import KvferryError
from kvferryd.engine.session import Rank, Session
from kvferryd.staging.arena import Arena
from kvferryd.staging.copies import HostCopies
from kvferryd.transport.agent import Agent
from kvferryd.transport.read import Span

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_region_that_is_made_while_its_session_is_retired_is_closed() -> None:
    """As by a daemon that stops: the engine is still attached."""
    session, memory, begun, let_go = Session(Rank("e", "1", 0, 1)), Memory(), threading.Event(), threading.Event()

    def make() -> Any:
        begun.set()
        assert let_go.wait(60)
        return memory

    adding = asyncio.create_task(session.add(0, 1, make))
    await asyncio.to_thread(begun.wait, 60)
    await session.retire("the daemon stops", keep=False)
    let_go.set()
    with pytest.raises(KvferryError, match="ended"):
        await adding
    assert memory.closed and not session.regions


async def test_an_arena_of_which_peers_cannot_be_told_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its memory would be freed under NIXL."""
    engine, memory, words = first_of(), Memory(), np.zeros(8, dtype=np.uint64)
    agent = engine.agent = Agent("a")
    await agent.start()
    before = await agent.register(Span(words.ctypes.data, words.nbytes, "host"))

    async def make() -> Arena:
        return Arena(memory, HostCopies())  # type: ignore[arg-type]

    def breaks() -> bytes:
        raise RuntimeError("broken")

    engine.make_arena = make
    with monkeypatch.context() as broken:
        broken.setattr(agent._nixl, "get_agent_metadata", breaks)
        await engine.need_arena()
    assert engine.arena is None and memory.closed
    assert any("broken" in note for note in engine.notes)
    assert memory.span not in agent._registered
    assert len(await agent.register()) == len(before)
    await agent.close()
