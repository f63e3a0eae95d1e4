"""The end of an engine's session does not stop half-way: a step that fails stops no other, and is said by its name.

But for those that free memory: while anything may still read or write it, it stays, and no engine is told otherwise.
Nothing is left behind of the engine's peers.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog
from alone import first_of, peer_served
from caches import attention, cache
from stepped import Daemon, manifest_of, stepping
from stepwise import Agent, World

from kvferry.errors import KvferryError
from kvferry.process import Process
from kvferry.protocol.session import STEP_S
from kvferry.protocol.session_events import Rank
from kvferry.v1 import engine_pb2, peer_pb2, peer_pb2_grpc
from kvferryd.config import Config
from kvferryd.engine import Engine, registration
from kvferryd.engine.session import Session
from kvferryd.memory import Files
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import reader_stream
from kvferryd.peers.peer import PeerEngine, PeerRank, as_reader
from kvferryd.peers.peers import Peers
from kvferryd.plan import plan
from kvferryd.transport.read import TransportError

pytestmark = pytest.mark.anyio
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


# ---- peers, however many they are, and whether they answer ----


PEERS = 3


class Sources(peer_pb2_grpc.PeerServicer):
    """No stream ends before every reader has ended its own."""

    def __init__(self) -> None:
        self.read = self.left = 0
        self.changed = asyncio.Condition()

    async def Read(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[peer_pb2.ReadReply]:
        self.read += 1
        async for _ in requests:
            async with self.changed:
                self.changed.notify_all()
        self.left += 1
        async with self.changed:
            self.changed.notify_all()
            await self.changed.wait_for(lambda: self.left == PEERS)
        if False:
            yield


async def test_streams_to_all_peers_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_stream, "CLOSE_S", 3600.0)
    sources, peers = Sources(), Peers(Config(), Metrics())

    async def shake(engine: Engine, name: str, address: str, *_: object) -> PeerEngine:
        manifest = cache(*attention(), engine=name)
        opening = peer_pb2.ReadOpening(reader=as_reader(engine, name))
        rank = PeerRank(peers.channels.open(address), manifest, 1, "", "a", b"", {}, opening)
        assert not rank.stream.over
        return PeerEngine(name, "1", {0: rank}, plan([manifest], manifest), engine, defaultdict(float))

    monkeypatch.setattr(peers._handshakes, "shake", shake)
    async with asyncio.timeout(60), peer_served(sources) as address:
        engine = first_of(address)
        for name in map(str, range(PEERS)):
            await peers.of(engine).get(name, address)
        async with sources.changed:
            await sources.changed.wait_for(lambda: sources.read == PEERS)
        await peers.forget_engine(engine)
        assert not len(peers.channels)
        await peers.close()


class Silent(peer_pb2_grpc.PeerServicer):
    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)

    async def Handshake(self, request: Any, context: Any) -> peer_pb2.HandshakeReply:
        self.asked.release()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("end", ["retired", "closed"])
async def test_no_handshake_outlives_its_engine(end: str) -> None:
    """Nor does it keep anybody waiting: each caller is told at once."""
    silent, peers = Silent(), Peers(Config(connect_timeout_s=600), Metrics())
    async with asyncio.timeout(60), peer_served(silent) as address:
        engine = first_of(address)
        getting = [asyncio.create_task(peers.of(engine).get(name, address)) for name in ("far", "far", "farther")]
        peers.want(engine, (address,))
        for _ in range(3):
            await silent.asked.acquire()
        assert len(of_meetings()) == 3
        await (peers.forget_engine(engine) if end == "retired" else peers.close())
        assert not of_meetings() and not len(peers.channels)
        await asyncio.wait(getting)
        errors = [each.exception() for each in getting]
        assert [each.code for each in errors if isinstance(each, KvferryError)] == 3 * ["engine_gone"]
        await peers.close()


def of_meetings() -> list[str]:
    """All that is under way for an engine, its callers aside."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return [name for name in names if name.startswith("Meeting._")]


@pytest.mark.parametrize("cut", ["stopped", "retired"])
def test_a_handshake_that_is_stopped_while_it_is_undone_leaves_nothing(cut: str) -> None:
    """Its bound passes, or its engine leaves, while NIXL takes its time over the first name."""
    with stepping() as world:
        homes = {0: "127.0.0.1:7001", 1: "127.0.0.1:7002"}
        for rank, address in homes.items():
            Daemon(world, address, manifest_of("prefill", rank=rank, of=2, heads=2), homes)
        reader = Daemon(world, own := "127.0.0.1:7003", manifest_of("decode", heads=2), {0: own})
        peers, agent = reader.ferry.peers_known, world.agents[reader.engine.agent.name]
        remove, unloading = agent.remove_peer, asyncio.Event()

        async def warm(peer: str, span: object) -> None:
            raise TransportError("transport_failed", "NIXL does not connect")

        async def remove_peer(alias: str) -> None:
            await unloading.wait()
            await remove(alias)

        agent.warm, agent.remove_peer = warm, remove_peer  # type: ignore[method-assign]
        with world.within(reader.process):
            asked = world.loop.create_task(peers.of(reader.engine).get("prefill", homes[0]))
            world.loop.settle()
            world.run()
            assert len(agent._peers) == 2 and not asked.done()
            if cut == "stopped":
                world.loop.pass_time(peers._handshakes.within_s)
            else:
                world.loop.create_task(peers.forget_engine(reader.engine))
                world.loop.settle()
            assert isinstance(asked.exception(), KvferryError)
            world.loop.call(unloading.set)
            world.run()
        assert not agent._peers and not len(peers.channels)
