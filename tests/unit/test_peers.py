"""Peers that a daemon tries: those that the settings name, those that the daemon before has noted, and the wait for the
process that tries them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from alone import first_of
from stepped import Daemon, manifest_of
from stepwise import World

from kvferry.errors import Unavailable
from kvferry.file import File
from kvferry.protocol.peers_wanted import GONE_S, HAD
from kvferry.protocol.values import ReaderId
from kvferryd.config import Config
from kvferryd.observe.metrics import Metrics
from kvferryd.peers import known as known_peers
from kvferryd.peers.inbound import Inbound
from kvferryd.peers.known import KnownPeers
from kvferryd.peers.peers import Peers
from kvferryd.peers.remembered import ENGINES, NOBODY, Known, Remembered
from kvferryd.transfers.order import Order
from kvferryd.transport import screen
from kvferryd.transport.metadata import Metadata
from kvferryd.transport.read import TransportError
from kvferryd.transport.screen import ENDS_S, PROCESSES, START_S, Screen
from support import refused

pytestmark = pytest.mark.anyio


# ---- peers that the settings name, where they do not answer or cannot be looked up ----


@asynccontextmanager
async def looked_for(*addresses: str) -> AsyncIterator[KnownPeers]:
    """The settings name them."""
    config = Config(known_peers=addresses, allow_peers=("pod*",))
    peers = Peers(config, Metrics())
    known = KnownPeers(config, peers, list)
    running = asyncio.create_task(known.run())
    try:
        yield known
    finally:
        running.cancel()
        await asyncio.wait([running])
        await peers.close()


async def test_a_name_whose_lookup_hangs_takes_one_thread_and_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, others = threading.Event(), threading.Semaphore(0)
    hanging: list[str] = []

    def looked_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host == "pod-silent":
            hanging.append(host)
            answered.wait()
        others.release()
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(known_peers, "SOON_S", 0.01)
    async with looked_for("pod-silent:7411", "pod-0:7411") as known:
        try:
            for _ in range(2 * known_peers.LOOKUPS):
                assert await asyncio.to_thread(others.acquire, timeout=60)
                known.look()
            assert len(hanging) == 1
        finally:
            answered.set()


async def test_names_that_cannot_be_looked_up_keep_no_other_work_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Semaphore(0), threading.Event()

    def hangs(*_: Any, **__: Any) -> list[Any]:
        asked.release()
        answered.wait()
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    async with looked_for(*(f"pod-{number}:7411" for number in range(64))):
        try:
            async with asyncio.timeout(60):
                while not asked.acquire(blocking=False):  # noqa: ASYNC110  a thread tells
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(int)
        finally:
            answered.set()


async def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)

    def fails(*_: Any, **__: Any) -> list[Any]:
        asked.release()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    async with looked_for("pod:7411") as known:
        for _ in range(2):
            known.look()
            assert await asyncio.to_thread(asked.acquire, timeout=60)


# ---- peers that the daemon before has noted are read with suspicion ----


MET = (("a", "h:1"),)


class Own:
    """As much of an engine as its readers concern."""

    engine_id = "own"

    def __init__(self) -> None:
        self.session: Any = SimpleNamespace(retiring=False)


@pytest.fixture
def opened() -> Callable[[], File]:
    """Another descriptor of one file, as each daemon has it."""
    file = File(os.memfd_create("peers"))
    return lambda: File(os.dup(file.fileno()))


def written(said: object, **header: int) -> bytes:
    body = json.dumps(said).encode()
    about = {"crc": zlib.crc32(body), "nbytes": len(body)} | header
    return b"%08x %d\n%b" % (about["crc"], about["nbytes"], body)


def put(opened: Callable[[], File], said: bytes) -> None:
    with opened() as file:
        os.pwrite(file.fileno(), said, 0)


def test_the_next_daemon_knows_what_was_put_last(opened: Callable[[], File]) -> None:
    ours = Remembered(opened())
    assert ours.of("reader") == NOBODY
    ours.put("other", met=[("x", "h:1")], readers=[("y", 1, 0.0), ("y", 0, 5.5)])
    ours.put("reader", met=[("a", "h:1"), ("b", "h:2")])
    ours.put("reader", met=[("b", "h:2")])
    ours.put("other", met=[])
    theirs = Remembered(opened())
    assert theirs.of("reader") == Known(met=(("b", "h:2"),))
    assert theirs.of("other") == Known(readers=(("y", 0, 5.5), ("y", 1, 0.0)))


def test_without_a_keeper_nothing_is_remembered() -> None:
    ours = Remembered()
    ours.put("reader", met=MET)
    assert ours.of("reader") == NOBODY


@pytest.mark.parametrize(
    "found",
    [
        b"",
        b"\n",
        b"\xff\xfe",
        b"0 0\n",
        b"-1 -5\n{}",
        written({"reader": [[["a", "h:1"]], []]})[:-4],
        written({"reader": [[["a", "h:1"]], []]}, crc=1),
        written({"reader": [[["a", "h:1"]], []]}, nbytes=9),
        written({"reader": [[["a", 1]], []]}),
        written({"reader": [[["", "h:1"]], []]}),
        written({"reader": [["a"], []]}),
        written({"reader": [[], [["a", "0", 0]]]}),
        written({"reader": [[], [["a", 0]]]}),
        written({"reader": [[["a", "h:1"]]]}),
        written({"reader": {"a": "h:1"}}),
        written({"reader": 5}),
        written([["a", "h:1"]]),
        written(None),
        written({})[:-2] + b"[" * 100_000,
        written({"reader": "\ud800"}),
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_tells_nothing(opened: Callable[[], File], found: bytes) -> None:
    put(opened, found)
    ours = Remembered(opened())
    assert ours.of("reader") == NOBODY
    ours.put("reader", met=MET)
    assert Remembered(opened()).of("reader").met == MET, "it is written over"


def test_it_reads_so_much_of_what_another_version_has_written(opened: Callable[[], File]) -> None:
    many = [[f"a{number}", "h:1"] for number in range(2 * HAD)]
    put(opened, written({f"reader{number}": [many[-3:], []] for number in range(2 * ENGINES)}))
    assert Remembered(opened()).of("reader0") == NOBODY
    put(opened, written({"reader": [many, [["a", rank, 0] for rank in range(2 * HAD)]]}))
    known = Remembered(opened()).of("reader")
    assert known.met == tuple(map(tuple, many[HAD:]))
    assert len(known.readers) == HAD


async def test_a_daemon_that_stops_in_mid_handshake_leaves_to_the_next_one_whom_it_had_met(
    opened: Callable[[], File], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its meeting has let go of everybody by the time that the handshake is over."""
    Remembered(opened()).put("own", met=MET)
    peers, began = Peers(Config(), Metrics(), remembered=Remembered(opened())), asyncio.Event()

    async def at_once() -> None:
        pass

    async def named(*_: Any) -> tuple[Any, dict[int, str]]:
        return SimpleNamespace(let_go=lambda: None, manifest=SimpleNamespace(engine_id="a")), {0: "h:1"}

    async def hangs(*_: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(peers._handshakes.screen, "prepare", at_once)
    monkeypatch.setattr(peers._introductions, "ask", named)
    monkeypatch.setattr(peers._handshakes, "shake", hangs)
    own = Own()
    peers.expect(own)  # type: ignore[arg-type]
    await asyncio.wait_for(began.wait(), 60)
    await peers.of(own).end(Unavailable("engine_gone", "it stops"))  # type: ignore[arg-type]
    assert Remembered(opened()).of("own").met == MET
    peers.unbind("another")
    await peers.close()
    assert Remembered(opened()).of("own").met == MET


def test_a_file_that_cannot_be_written_harms_nobody() -> None:
    ours = Remembered(File(os.open("/dev/null", os.O_RDONLY)))
    ours.put("reader", met=MET)
    assert ours.of("reader").met == MET


@pytest.mark.anyio
async def test_an_engine_waits_for_those_that_it_had_met_until_they_are_met_or_missed(
    opened: Callable[[], File],
) -> None:
    Remembered(opened()).put("e", met=[("gone", "127.0.0.1:9")])
    peers, engine = Peers(Config(), Metrics(), None, Remembered(opened())), first_of()
    peers.expect(engine)
    assert peers.awaited(engine) == 1
    async with asyncio.timeout(60):
        while peers.awaited(engine):  # noqa: ASYNC110  it ends by time as well
            await asyncio.sleep(0.01)
    await peers.forget_engine(engine)
    await peers.close()


def test_readers_that_have_left_lately_are_awaited_and_no_others(opened: Callable[[], File]) -> None:
    now, engine = time.monotonic(), Own()
    readers = [("reads", 0, 0.0), ("left now", 0, now), ("left long ago", 0, now - GONE_S)]
    Remembered(opened()).put("own", readers=readers)
    inbound = Inbound(Remembered(opened()))
    inbound.expect(engine)
    assert inbound.awaited(engine) == 2
    with inbound.reading(engine, ReaderId("reads", "1", 0, 1)), inbound.reading(engine, ReaderId("new", "1", 0, 1)):
        assert inbound.awaited(engine) == 1
        assert {each[0] for each in Remembered(opened()).of("own").readers} == {"left now", "reads", "new"}
        engine.session.retiring = True
    assert [each[2] for each in Remembered(opened()).of("own").readers] == [0.0] * 3, "it was we who ended the streams"


# ---- the process that tries peers: one start of it, and one place, are waited for by all at a time ----


SOURCE, READER, WAIT_S = "127.0.0.1:7001", "127.0.0.1:7002", 5.0


def check(world: World, each: Screen, number: int) -> asyncio.Task[None]:
    task = world.loop.create_task(each.check(Metadata(f"peer-{number}", b""), [], WAIT_S))
    world.loop.settle()
    return task


def without_a_place() -> Screen:
    """All its processes have peers that do not answer."""
    each = Screen()
    each._places = asyncio.Semaphore(0)
    return each


def test_peers_for_which_there_is_no_place_are_all_told_within_one_wait(world: World) -> None:
    waiting = [check(world, each := without_a_place(), 0), *(check(world, each, number) for number in range(1, 4))]
    world.loop.pass_time(START_S - 1.0)
    assert not any(task.done() for task in waiting)
    world.loop.pass_time(2.0)
    for task in waiting:
        with refused(
            "transport_failed",
            TransportError,
            match="all processes that try peers' metadata are in use",
            value=str(PROCESSES),
        ):
            task.result()
    assert each._waiting == 0


def test_a_killed_process_that_does_not_end_holds_nobody_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernel it may stay for as long as a driver keeps it there."""
    silent = SimpleNamespace(
        stdout=asyncio.StreamReader(), returncode=None, kill=lambda: None, wait=asyncio.Event().wait
    )

    async def start(*_: object, **__: object) -> SimpleNamespace:
        return silent

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    waiting = check(world, each := Screen(), 0)
    world.loop.pass_time(START_S + ENDS_S + 1.0)
    with pytest.raises(TransportError, match="did not start"):
        waiting.result()
    assert each._places._value == PROCESSES


def test_a_place_and_the_start_after_it_have_one_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, ends = SimpleNamespace(stdout=asyncio.StreamReader(), returncode=None), []

    async def start(*_: object, **__: object) -> SimpleNamespace:
        return silent

    async def wait() -> None:
        ends.append("awaited")

    silent.kill, silent.wait = lambda: ends.append("killed"), wait
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    waiting = check(world, each := without_a_place(), 0)
    world.loop.pass_time(START_S - 1.0)
    each._places.release()
    world.loop.settle()
    assert not waiting.done() and each._places.locked()
    world.loop.pass_time(2.0)
    with pytest.raises(TransportError, match="did not start"):
        waiting.result()
    assert ends == ["killed", "awaited"] and not each._places.locked()


def test_who_leaves_does_not_end_the_start_that_others_wait_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = 0

    async def start(*_: object) -> None:
        nonlocal starts
        starts += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(screen, "_started", start)
    each = Screen()
    first, second = check(world, each, 0), check(world, each, 1)
    first.cancel()
    world.loop.settle()
    assert first.cancelled() and not second.done() and starts == 1
    world.loop.complete(each.close())
    assert second.done()


def test_an_order_ends_at_its_own_deadline_while_its_peer_waits_for_a_place(world: World) -> None:
    source = Daemon(world, SOURCE, manifest_of("prefill", heads=2), {0: SOURCE})
    reader = Daemon(world, READER, manifest_of("decode", heads=2), {0: READER})
    source.publish("r", range(2))
    reader.ferry.peers_known._handshakes.screen = without_a_place()
    transfer = reader.receive("r", 1, range(2), Order("prefill", SOURCE, deadline_s=2.0))
    world.run()
    world.loop.pass_time(1.9)
    assert transfer.problem is None
    world.loop.pass_time(0.2)
    assert transfer.problem is not None and transfer.problem.code == "deadline"
    assert "all processes that try peers' metadata are in use" in transfer.problem.message
