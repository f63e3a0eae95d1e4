"""Peers wait for a process that tries them: for one start of it, and one place, all at a time and not by turns."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from stepped import Daemon, manifest_of
from stepwise import World

from kvferryd.transfers.order import Order
from kvferryd.transport import screen
from kvferryd.transport.metadata import Metadata
from kvferryd.transport.read import TransportError
from kvferryd.transport.screen import ENDS_S, PROCESSES, START_S, Screen

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
        with pytest.raises(TransportError, match="all processes that try peers' metadata are in use") as caught:
            task.result()
        assert (caught.value.code, caught.value.value) == ("transport_failed", str(PROCESSES))
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
