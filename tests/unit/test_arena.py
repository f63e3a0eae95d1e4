"""Slots of the staging arena: who gets one, and that all come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from alone import first_of

from kvferry.errors import KvferryError
from kvferry.protocol.session_events import Step
from kvferryd.copy import Batch
from kvferryd.copy.copying import HostCopies
from kvferryd.staging.arena import FEWEST, SLOT_NBYTES, Arena, Slot, Use, slot_nbytes
from kvferryd.transport.read import Span

pytestmark = pytest.mark.anyio
KB64 = 64 << 10


@dataclass
class Memory:
    array: np.ndarray = field(default_factory=lambda: np.zeros(4 * KB64, dtype=np.uint8))
    closed: bool = False
    owned = True

    @property
    def span(self) -> Span:
        return Span(self.array.ctypes.data, self.array.nbytes, "host")

    def close(self) -> None:
        self.closed = True


@dataclass
class Gate:
    """A copy that goes on until it is let go."""

    begun: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)
    ended: int = 0

    def copy(self, batches: object) -> None:
        self.begun.set()
        assert self.let_go.wait(60)
        self.ended += 1


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def arena(memory: Memory, gate: Gate) -> AsyncIterator[Arena]:
    arena = Arena(memory, HostCopies(gate.copy))  # type: ignore[arg-type]
    yield arena
    gate.let_go.set()
    assert await arena.close()


async def taken(arena: Arena, use: Use, count: int) -> list[Slot]:
    async with asyncio.timeout(60):
        return [await arena.take(use) for _ in range(count)]


async def started(*waits: asyncio.Task[Slot]) -> None:
    await asyncio.sleep(0)
    assert not any(wait.done() for wait in waits)


def nothing() -> list[Batch]:
    return []


def wait_for(arena: Arena, use: Use) -> asyncio.Task[Slot]:
    return asyncio.create_task(arena.take(use))


def test_a_small_arena_has_smaller_slots_rather_than_fewer() -> None:
    assert slot_nbytes(Span(0, 512 << 20, "host")) == SLOT_NBYTES["host"]
    assert slot_nbytes(Span(0, 1 << 20, "host")) == (1 << 20) // FEWEST
    assert slot_nbytes(Span(0, 512 << 20, "cuda")) == SLOT_NBYTES["cuda"]
    with pytest.raises(KvferryError, match="no room"):
        slot_nbytes(Span(0, 8192, "host"))


async def test_slots_lie_side_by_side_in_the_arena(arena: Arena, memory: Memory) -> None:
    slots = await taken(arena, Use.READ, 3) + await taken(arena, Use.PACKED, 1)
    assert sorted(slot.address - memory.span.address for slot in slots) == [0, KB64, 2 * KB64, 3 * KB64]
    assert arena.slot_nbytes == KB64


async def test_slots_are_lent_in_the_order_in_which_they_are_asked_for(arena: Arena) -> None:
    slots = await taken(arena, Use.READ, 3)
    waits = [wait_for(arena, Use.READ) for _ in range(3)]
    await started(*waits)
    assert (arena.waiting, arena.used_nbytes) == (3, 3 * KB64)
    for slot, wait in zip(slots, waits, strict=True):
        arena.give_back(slot)
        async with asyncio.timeout(60):
            await wait
        assert arena.used_nbytes == 3 * KB64
    assert arena.waiting == 0


async def test_a_transfer_with_many_asks_does_not_hold_up_another_for_more_than_its_turn(arena: Arena) -> None:
    slots = await taken(arena, Use.READ, 3)
    greedy, modest = [wait_for(arena, Use.READ) for _ in range(2)], wait_for(arena, Use.READ)
    late = wait_for(arena, Use.READ)
    await started(*greedy, modest, late)
    for slot in slots:
        arena.give_back(slot)
    async with asyncio.timeout(60):
        await asyncio.gather(*greedy, modest)
    assert not late.done()
    late.cancel()


async def test_neither_direction_may_take_all_slots(arena: Arena) -> None:
    await taken(arena, Use.READ, 3)
    more = wait_for(arena, Use.READ)
    await started(more)
    (packed,) = await taken(arena, Use.PACKED, 1)
    arena.give_back(packed)
    await started(more)
    more.cancel()


async def test_who_keeps_a_slot_learns_who_would_have_it(arena: Arena) -> None:
    """The slots of one direction are no use to a direction that has all it may have."""
    (packed,) = await taken(arena, Use.PACKED, 1)
    reads = await taken(arena, Use.READ, 3)
    assert not arena.sought(Use.READ)
    waiting = wait_for(arena, Use.PACKED)
    await started(waiting)
    assert arena.sought(Use.READ) and arena.sought(Use.PACKED)
    for slot in reads[:2]:
        arena.give_back(slot)
    await waiting
    await taken(arena, Use.PACKED, 1)
    capped = wait_for(arena, Use.PACKED)
    await started(capped)
    assert not arena.sought(Use.READ)
    assert arena.sought(Use.PACKED)
    capped.cancel()
    arena.give_back(packed)


async def test_a_slot_comes_back_only_when_the_read_into_it_is_quiet(arena: Arena) -> None:
    (slot,) = await taken(arena, Use.READ, 1)
    quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    arena.give_back(slot, quiet)
    assert arena.used_nbytes == KB64
    quiet.set_result(None)
    await asyncio.sleep(0)
    assert arena.used_nbytes == 0


async def test_who_gives_up_waiting_takes_nothing_with_it(arena: Arena) -> None:
    (first, *_) = await taken(arena, Use.READ, 3)
    impatient, patient = wait_for(arena, Use.READ), wait_for(arena, Use.READ)
    await started(impatient, patient)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    assert arena.waiting == 1
    arena.give_back(first)
    async with asyncio.timeout(60):
        await patient


async def test_a_slot_that_was_lent_in_the_moment_of_giving_up_comes_back(arena: Arena) -> None:
    (first, *_) = await taken(arena, Use.READ, 3)
    impatient = wait_for(arena, Use.READ)
    await started(impatient)
    arena.give_back(first)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    assert arena.used_nbytes == 2 * KB64


async def test_a_slot_comes_back_once(arena: Arena) -> None:
    (slot,) = await taken(arena, Use.PACKED, 1)
    arena.give_back(slot)
    arena.give_back(slot)
    assert arena.used_nbytes == 0
    assert len({slot.address for slot in await taken(arena, Use.READ, 3)}) == 3


async def test_a_copy_that_nobody_waits_for_is_quiet_when_it_has_ended(arena: Arena, gate: Gate) -> None:
    begun, given_up = arena.copies.start(0, nothing), arena.copies.start(0, nothing)
    await asyncio.to_thread(gate.begun.wait, 60)
    for copy in (begun, given_up):
        copy.done.cancel()
        copy.abandon()
    assert not begun.quiet.done()
    gate.let_go.set()
    await begun.quiet
    assert gate.ended == 1
    await given_up.quiet
    assert gate.ended == 1, "it had not begun"


async def test_closing_waits_for_the_copy_and_tells_those_who_wait(arena: Arena, gate: Gate, memory: Memory) -> None:
    engine = first_of()
    engine.arena = arena
    await taken(arena, Use.READ, 3)
    waiting = wait_for(arena, Use.READ)
    copying = arena.copies.start(0, nothing)
    await asyncio.to_thread(gate.begun.wait, 5)
    closing = asyncio.create_task(engine.close())
    with pytest.raises(KvferryError, match="closed"):
        await waiting
    assert not memory.closed
    gate.let_go.set()
    await asyncio.gather(copying.done, closing)
    assert memory.closed
    with pytest.raises(KvferryError, match="closed"):
        await arena.take(Use.PACKED)


async def test_a_copy_that_hangs_keeps_no_session_from_retiring(
    gate: Gate, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory stays: it may still be written."""
    monkeypatch.setattr("kvferryd.copy.copying.CLOSE_S", 0.1)
    engine = first_of()
    arena = engine.arena = Arena(memory, HostCopies(gate.copy))  # type: ignore[arg-type]
    engine.session.engine = engine
    copying = arena.copies.start(0, nothing)
    await asyncio.to_thread(gate.begun.wait, 60)
    async with asyncio.timeout(50):
        assert not await engine.session.take(Step.STOP, "it has gone", keep=False)
    assert engine.session.stuck and not memory.closed and not copying.quiet.done()
    assert not await arena.close()
    gate.let_go.set()
    await copying.quiet


async def test_an_error_of_the_copy_reaches_the_caller(memory: Memory) -> None:
    def breaks(batches: object) -> None:
        raise ValueError("broken")

    arena = Arena(memory, HostCopies(breaks))  # type: ignore[arg-type]
    with pytest.raises(KvferryError, match="broken"):
        await arena.copies.start(0, nothing).done
    await arena.close()
