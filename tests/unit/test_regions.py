"""Things that a session and its engine have taken are given back, also where they come too late or are not whole."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from alone import first_of
from test_arena import Memory

from kvferry.errors import KvferryError
from kvferry.memory import cuda
from kvferry.protocol.session_events import Rank, Step
from kvferryd.config import Config
from kvferryd.copy.copying import HostCopies
from kvferryd.copy.runner import Runner
from kvferryd.engine.registration import _made_arena
from kvferryd.engine.registry import Engines
from kvferryd.engine.session import Session
from kvferryd.memory import Probe
from kvferryd.memory.host import HostProvider
from kvferryd.staging.arena import Arena
from kvferryd.transport.agent import Agent
from kvferryd.transport.read import Span

pytestmark = pytest.mark.anyio


class Slow:
    """Makes a region on a thread, when it is let."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.begun, self.let_go = memory, threading.Event(), threading.Event()

    def make(self) -> Any:
        self.begun.set()
        assert self.let_go.wait(60)
        return self.memory

    async def given_up(self, making: Coroutine[Any, Any, Any]) -> None:
        """Cancelled while it is made."""
        task = asyncio.create_task(making)
        await asyncio.to_thread(self.begun.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        self.let_go.set()


async def test_a_region_that_is_made_while_its_session_is_retired_is_closed() -> None:
    """As by a daemon that stops: the engine is still attached."""
    session, slow = Session(Rank("e", "1", 0, 1)), Slow(Memory())
    adding = asyncio.create_task(session.add(0, 1, slow.make))
    await asyncio.to_thread(slow.begun.wait, 60)
    session.retiring = True
    await session.take(Step.FREE, "the daemon stops", keep=False)
    slow.let_go.set()
    with pytest.raises(KvferryError, match="ended"):
        await adding
    assert slow.memory.closed and not session.regions


def test_a_region_that_is_made_while_the_daemon_stops_is_closed() -> None:
    """Its caller is gone by then, and so is the event loop."""
    slow = Slow(Memory())
    asyncio.run(slow.given_up(Session(Rank("e", "1", 0, 1)).add(0, 1, slow.make)))
    assert slow.memory.closed


class Gpu:
    """A driver that takes its time to map."""

    index = 0

    def __init__(self) -> None:
        self.mapped, self.slow = 0, Slow(Memory())
        self.memory = ctypes.create_string_buffer(b"k", 1)

    def bind(self) -> None: ...

    def stream(self) -> Any:
        return SimpleNamespace(copy=ctypes.memmove, synchronize=lambda: None, close=lambda: None)

    def open(self, handle: bytes) -> Any:
        self.slow.make()
        self.mapped += 1
        return SimpleNamespace(address=ctypes.addressof(self.memory), nbytes=1, close=self._unmap)

    def _unmap(self) -> None:
        self.mapped -= 1


async def test_a_mapping_that_comes_when_nobody_waits_for_it_any_more_is_ended() -> None:
    """As that of a handshake that has timed out: it would keep the peer's memory taken."""
    gpu = Gpu()
    runner = Runner(SimpleNamespace(device=gpu, close=lambda: None), 1)  # type: ignore[arg-type]
    await gpu.slow.given_up(runner.open(cuda.Exported(b"", 0, 1, ""), 1, Probe(0, b"k")))
    await runner.call(lambda: None)  # after it, on the thread
    assert gpu.mapped == 0
    assert await runner.close()


async def test_an_arena_for_which_there_was_nothing_left_is_made_when_it_is_needed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shortage of descriptors passes."""
    engine, words = first_of(), np.zeros(8, dtype=np.uint64)
    agent = engine.agent = Agent("short")
    await agent.start()
    await agent.register(Span(words.ctypes.data, words.nbytes, "host"))
    engine.make_arena = functools.partial(_made_arena, engine.session, Config(arena_mb=16), HostProvider(), None, "")

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
    made = functools.partial(_made_arena, engine.session, Config(arena_mb=16), HostProvider(), None, "")

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


class Large(Memory):
    """Its pages are freed only once the event loop has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self._loop, self.gone = asyncio.get_running_loop(), threading.Event()

    def close(self) -> None:
        went_on = threading.Event()
        self._loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(20), "the event loop stands still"
        super().close()
        self.gone.set()


async def _ended_by_retiring(memory: Memory) -> None:
    session = Session(Rank("e", "1", 0, 1))
    await session.add(0, 1, lambda: memory)  # type: ignore[arg-type,return-value]
    await session.take(Step.FREE, "its engine is gone", keep=False)


async def _ended_as_it_came_too_late(memory: Memory) -> None:
    session = Session(Rank("e", "1", 0, 1))
    session.retiring = True
    with pytest.raises(KvferryError, match="ended"):
        await session.add(0, 1, lambda: memory)  # type: ignore[arg-type,return-value]


async def _ended_as_nobody_wants_it(memory: Large) -> None:
    slow = Slow(memory)
    await slow.given_up(Session(Rank("e", "1", 0, 1)).made(slow.make))
    assert await asyncio.to_thread(memory.gone.wait, 60)


async def _ended_with_its_arena(memory: Memory) -> None:
    engine = first_of()
    engine.arena = Arena(memory, HostCopies())  # type: ignore[arg-type]
    await engine.close()


async def _ended_when_it_was_kept_for_another_start(memory: Memory) -> None:
    engines = Engines(Config(), HostProvider(), *(lambda *_: None for _ in range(4)))  # type: ignore[arg-type]
    session = await engines.attach(Rank("e", "1", 0, 1))
    await engines._add(session, 0, 1, lambda: memory)  # type: ignore[arg-type,return-value]
    with contextlib.suppress(KvferryError):
        await engines.end(session.id)
    assert not memory.closed
    await engines.attach(Rank("e", "2", 0, 1))
    assert memory.closed, "before the new start asks for as much"
    await engines.close()


@pytest.mark.parametrize(
    "end",
    [
        _ended_by_retiring, _ended_as_it_came_too_late, _ended_as_nobody_wants_it, _ended_with_its_arena,
        _ended_when_it_was_kept_for_another_start,
    ],
)  # fmt: skip
async def test_the_event_loop_goes_on_while_memory_is_given_back(end: Callable[[Large], Awaitable[None]]) -> None:
    """The kernel takes a third of a second for each GB, and a cache has tens of them."""
    memory = Large()
    await end(memory)
    assert memory.closed
