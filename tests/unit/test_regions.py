"""What a session and its engine have taken is given back, also where it comes too late or is not whole."""

from __future__ import annotations

import asyncio
import errno
import functools
import threading
from typing import Any

import numpy as np
import pytest
from test_arena import Memory
from test_channels_of_ranks import first_of

from kvferry.errors import KvferryError
from kvferryd.config import Config
from kvferryd.engine.registration import _made_arena
from kvferryd.engine.session import Rank, Session
from kvferryd.memory.host import HostProvider
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


async def test_an_arena_for_which_there_was_nothing_left_is_made_when_it_is_needed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shortage of descriptors passes."""
    engine, words = first_of(), np.zeros(8, dtype=np.uint64)
    agent = engine.agent = Agent("short")
    await agent.start()
    await agent.register(Span(words.ctypes.data, words.nbytes, "host"))
    engine.make_arena = functools.partial(_made_arena, Config(arena_mb=16), HostProvider(), None, "")

    def short(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    for where in ("os.memfd_create", "kvferryd.memory.host._available"):
        with monkeypatch.context() as shortage:
            shortage.setattr(where, short)
            for _ in range(2):
                await asyncio.gather(engine.need_arena(60), engine.need_arena(60))
        assert engine.arena is None
        (note,) = engine.notes
        assert "no staged transfers" in note and "Too many open files" in note
    await engine.need_arena(60)
    assert engine.arena is not None and not engine.notes
    assert await agent.register() == engine.agent_metadata, "peers are told of it"
    made = engine.arena
    await engine.need_arena(60)
    assert engine.arena is made
    await agent.close()
    await made.close()


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
        await engine.need_arena(60)
    assert engine.arena is None and memory.closed
    assert any("broken" in note for note in engine.notes)
    assert memory.span not in agent._registered
    assert len(await agent.register()) == len(before)
    await agent.close()


async def test_an_arena_that_is_slow_to_make_is_not_waited_for_beyond_the_bound_and_is_there_later() -> None:
    """Or a handshake would fail for want of what it can do without."""
    engine, words, go_on = first_of(), np.zeros(8, dtype=np.uint64), asyncio.Event()
    agent = engine.agent = Agent("slow")
    await agent.start()
    await agent.register(Span(words.ctypes.data, words.nbytes, "host"))
    made = functools.partial(_made_arena, Config(arena_mb=16), HostProvider(), None, "")

    async def slowly() -> Arena:
        await go_on.wait()
        return await made()

    engine.make_arena = slowly
    async with asyncio.timeout(60):
        await asyncio.gather(engine.need_arena(0.01), engine.need_arena(0.01))
        assert engine.arena is None and not engine.notes
        go_on.set()
        await engine.need_arena(60)
    assert engine.arena is not None
    arena = engine.arena
    await agent.close()
    await arena.close()
