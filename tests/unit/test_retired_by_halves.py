"""The end of an engine's session does not stop half-way: a step that fails stops no other, and is said by its name.

But for those that free memory: while anything may still read or write it, it stays, and no engine is told otherwise.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from stepped import Daemon, manifest_of
from stepwise import Agent, World

from kvferry.errors import KvferryError
from kvferry.process import Process
from kvferry.protocol.session import STEP_S
from kvferry.protocol.session_events import Allocated, Rank
from kvferry.v1 import engine_pb2
from kvferryd.engine import registration
from kvferryd.engine.session import Session
from kvferryd.memory import Files

ADDRESS = "127.0.0.1:7001"


def breaks(*_: object, **__: object) -> None:
    raise RuntimeError("the context is broken")


async def breaks_later(*_: object, **__: object) -> None:
    breaks()


async def does_not_stop(*_: object, **__: object) -> bool:
    return False


def a_daemon(world: World) -> Daemon:
    """With a staging arena, and an engine that has published."""
    daemon = Daemon(world, ADDRESS, manifest_of("e", heads=1), {0: ADDRESS}, way="staged")
    daemon.publish("r", range(2))
    return daemon


def region(daemon: Daemon) -> Any:
    return daemon.engine.session.regions[0]


def ended(daemon: Daemon) -> tuple[asyncio.Task[None], list[Any]]:
    """(the call that ends the session, what was logged of its steps meanwhile)."""
    session, registry = daemon.engine.session, daemon.ferry.registry
    with structlog.testing.capture_logs() as logged, daemon.world.within(daemon.process):
        ending = daemon.world.loop.create_task(registry.end(session.id))
        daemon.world.loop.settle()
        daemon.world.loop.pass_time(60.0)
    assert ending.done() and session.retired.is_set() and session not in registry.sessions
    return ending, [line for line in logged if "step" in line]


def attached_anew(daemon: Daemon, resume: str = "") -> Session:
    with daemon.world.within(daemon.process):
        return daemon.world.loop.complete(daemon.ferry.registry.attach(Rank("e", "e-2", 0, 1), resume))


STEPS: dict[str, tuple[Callable[[Daemon], Any], str, Callable[..., Any]]] = {
    "free region 0": (region, "close", breaks),
    "free its arena": (lambda it: it.engine.arena.region, "close", breaks),
    "end its transfers": (lambda it: it.ferry.jobs, "abort_engine", breaks),
    "leave its roster": (lambda it: it.ferry.roster, "leave", breaks_later),
    "leave its other ranks": (lambda it: it.ferry.jobs, "leave", breaks_later),
    "forget its peers": (lambda it: it.ferry.peers_known, "forget_engine", breaks_later),
    "end its leases": (lambda it: it.engine.leases, "revoke_all", breaks),
    "ClearWord": (lambda it: it.engine.leases.words, "clear", breaks),
    "tell of the end of a lease": (lambda it: it.engine.session, "tell", breaks),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_stops_no_other(world: World, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    daemon = a_daemon(world)
    engine, memory, arena = daemon.engine, region(daemon), daemon.engine.arena.region
    where, name, broken = STEPS[step]
    monkeypatch.setattr(where(daemon), name, broken)
    process = engine.session.process = Process(os.pidfd_open(os.getpid()))
    ending, logged = ended(daemon)
    assert ending.result() is None
    assert step in {line["step"] for line in logged}
    assert all(line["engine_id"] == "e" for line in logged)
    assert memory.closed is (step != "free region 0") and arena.closed is (step != "free its arena")
    assert engine.agent._closed and not engine.leases.words._words.any()
    assert process._file.fileno() == -1, "its descriptor stays open"
    monkeypatch.undo()
    assert attached_anew(daemon, engine.session.id).id != engine.session.id


@pytest.mark.parametrize("step", ["free region 0", "free its arena"])
def test_memory_that_could_not_be_freed_is_accounted_for(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    daemon = a_daemon(world)
    where, name, broken = STEPS[step]
    unfreed = where(daemon)
    monkeypatch.setattr(unfreed, name, broken)
    ended(daemon)
    assert daemon.ferry.totals().unfreed_bytes == unfreed.span.nbytes
    (warning,) = daemon.ferry.readiness().warnings
    assert f"engine e: {unfreed.span.nbytes} bytes" in warning and "the context is broken" in warning
    assert f"kvferry_unfreed_bytes {float(unfreed.span.nbytes)}" in daemon.ferry.scrape()[0].decode()


FENCES: dict[str, Callable[[Daemon], Any]] = {
    "clear the words of its leases": lambda it: it.engine.leases.words,
    "close its checksums": lambda it: it.engine.sums,
    "close its copies": lambda it: it.engine.copies,
    "close its agent": lambda it: it.engine.agent,
    "close its arena": lambda it: it.engine.arena.copies,
}


@pytest.mark.parametrize("step", FENCES)
@pytest.mark.parametrize("broken", [breaks_later, does_not_stop])
def test_memory_that_may_still_be_used_is_neither_freed_nor_called_quiet(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, broken: Callable[..., Any]
) -> None:
    daemon = a_daemon(world)
    engine, memory, arena = daemon.engine, region(daemon), daemon.engine.arena.region
    taken: list[str] = []
    for name, where in FENCES.items():
        close = broken if name == step else _noted(where(daemon).close, taken, name)
        monkeypatch.setattr(where(daemon), "close", close)
    ending, logged = ended(daemon)
    error = ending.exception()
    assert isinstance(error, KvferryError) and error.code == "not_quiet"
    assert taken == [name for name in FENCES if name != step], "a step that fails stops another"
    assert step in {line["step"] for line in logged}
    assert not memory.closed and not arena.closed
    assert daemon.ferry.totals().unfreed_bytes == memory.span.nbytes + arena.span.nbytes
    with pytest.raises(KvferryError, match="could not be stopped"):
        attached_anew(daemon, engine.session.id)
    monkeypatch.undo()
    assert attached_anew(daemon).id != engine.session.id


def test_memory_is_freed_when_what_used_it_stops_after_it_was_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = a_daemon(world)
    agent, memory, arena, stops = daemon.engine.agent, region(daemon), daemon.engine.arena.region, asyncio.Event()
    close = agent.close

    async def closes_late() -> bool:
        await stops.wait()
        return await close()

    monkeypatch.setattr(agent, "close", closes_late)
    with world.within(daemon.process):
        ending = world.loop.create_task(daemon.ferry.registry.end(daemon.engine.session.id))
        world.loop.settle()
        assert not ending.done()
        world.loop.pass_time(STEP_S + 1.0)
        assert getattr(ending.exception(), "code", "") == "not_quiet" and not memory.closed
        world.loop.call(stops.set)
        world.loop.pass_time(1.0)
    assert memory.closed and arena.closed and not daemon.ferry.totals().unfreed_bytes
    assert not daemon.ferry.registry._sessions


@pytest.mark.parametrize("stops", [True, False])
def test_memory_of_a_registration_that_ends_late_is_freed_if_what_it_began_has_stopped(
    world: World, monkeypatch: pytest.MonkeyPatch, *, stops: bool
) -> None:
    daemon = a_daemon(world)
    ended(daemon)
    session, registry, over = attached_anew(daemon), daemon.ferry.registry, asyncio.Event()

    async def waits(*_: object) -> None:
        await over.wait()

    monkeypatch.setattr(registration, "_rehearse", waits)
    manifest = daemon.engine.manifest.model_copy(update={"epoch": "e-2"})
    with world.within(daemon.process):
        world.loop.complete(registry.adopt(session, engine_pb2.Memory(region=0, nbytes=daemon.memory.nbytes), Files()))
        memory = session.regions[0]
        registering = world.loop.create_task(registry.register(session, manifest))
        world.loop.settle()
        ending = world.loop.create_task(registry.end(session.id))
        world.loop.settle()
        world.loop.pass_time(STEP_S + 1.0)
        assert getattr(ending.exception(), "code", "") == "not_quiet" and not memory.closed
        if not stops:
            monkeypatch.setattr(Agent, "close", does_not_stop)
        world.loop.call(over.set)
        world.loop.pass_time(1.0)
    assert getattr(registering.exception(), "code", "") == "session_closed"
    assert memory.closed is stops and (session.id not in registry._sessions) is stops


def _noted(close: Callable[[], Any], taken: list[str], name: str) -> Callable[[], Any]:
    def noted() -> Any:
        taken.append(name)
        return close()

    return noted


def test_memory_that_waited_for_its_engine_and_cannot_be_freed_keeps_no_other_start_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = a_daemon(world)
    kept = region(daemon)
    kept.owned = True
    session, registry = daemon.engine.session, daemon.ferry.registry
    with world.within(daemon.process):
        world.loop.call(registry._feed, Allocated(session.id, owned=True))
        world.loop.complete(registry.end(session.id))
    assert session.id in registry._sessions and not kept.closed
    monkeypatch.setattr(kept, "close", breaks)
    with structlog.testing.capture_logs() as logged:
        attached_anew(daemon)
    assert "free region 0" in {line.get("step") for line in logged}
    assert daemon.ferry.totals().unfreed_bytes == kept.span.nbytes
    assert session.id not in registry._sessions


def test_a_region_that_comes_too_late_and_cannot_be_freed_is_accounted_for(world: World) -> None:
    daemon = a_daemon(world)
    ended(daemon)
    session, registry = attached_anew(daemon), daemon.ferry.registry

    async def adopted() -> None:
        adopt = daemon.ferry.memory.adopt

        def late(*_: object) -> Any:
            made = adopt(engine_pb2.Memory())
            made.close = breaks  # type: ignore[method-assign]
            session.retiring = True
            return made

        daemon.ferry.memory.adopt = late  # type: ignore[method-assign]
        await registry.adopt(session, engine_pb2.Memory(region=0, nbytes=1), Files())

    with world.within(daemon.process), pytest.raises(KvferryError, match="has ended"):
        world.loop.complete(adopted())
    assert daemon.ferry.totals().unfreed_bytes
