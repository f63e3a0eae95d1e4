"""A daemon's threads beside its event loop, and notes that wait for a quiet moment."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from kvferry.errors import Internal
from kvferryd.aio import NOTES, Notes, Worker, made_on, submit

pytestmark = pytest.mark.anyio


# ---- threads that do one thing after another ----


async def test_what_cannot_be_ended_does_not_end_the_thread() -> None:
    """A mapping that the driver does not give up, for example: what comes after it is done all the same."""
    worker, going = Worker("test"), threading.Event()

    def end(_: None) -> None:
        raise Internal("cuda_failed", "it stays")

    making = asyncio.create_task(made_on(worker.put, lambda: going.wait(60) and None, end))
    await asyncio.sleep(0)
    making.cancel()
    await asyncio.wait([making])
    going.set()
    async with asyncio.timeout(10):
        assert await submit(worker.put, lambda: 1, lambda error: Internal("internal", str(error))) == 1
    assert await worker.close(10)


# ---- notes at the end of a transfer: they wait for those under way, and nobody who looks misses them ----


async def until_written(notes: Notes) -> None:
    last = asyncio.Event()
    notes.add(last.set)
    async with asyncio.timeout(60):
        await last.wait()


async def test_notes_wait_for_what_is_under_way_unless_somebody_looks() -> None:
    busy, written = [True], list[int]()
    notes = Notes(lambda: busy[0])
    for number in (1, 2):
        notes.add(partial(written.append, number))
    assert not written
    notes.flush()
    assert written == [1, 2]
    notes.add(partial(written.append, 3))
    busy[0] = False  # the last of those under way has ended
    notes.add(partial(written.append, 4))
    await until_written(notes)
    assert written == [1, 2, 3, 4]


async def test_no_more_notes_wait_than_may() -> None:
    written, first = list[int](), asyncio.Event()
    notes = Notes(lambda: True)
    notes.add(first.set)
    for number in range(NOTES + 500):
        notes.add(partial(written.append, number))
    async with asyncio.timeout(60):
        await first.wait()
    await asyncio.sleep(0)
    assert written == [*range(len(written))]
    assert len(notes) <= NOTES


async def test_notes_are_written_though_something_is_always_under_way() -> None:
    written = asyncio.Event()
    Notes(lambda: True).add(written.set)
    async with asyncio.timeout(60):
        await written.wait()


async def test_a_note_that_breaks_keeps_no_other_from_being_written() -> None:
    written = list[int]()
    notes = Notes(lambda: False)
    notes.add(partial(written.index, 7))  # raises
    notes.add(partial(written.append, 1))
    await until_written(notes)
    assert written == [1]


async def test_what_notes_gather_is_written_a_moment_later_and_at_once_for_who_looks() -> None:
    gathered, written, once = list[int](), list[int](), asyncio.Event()

    def write() -> None:
        written.extend(gathered)
        gathered.clear()
        once.set()

    notes = Notes(lambda: False, write)
    for number in range(3):
        notes.add(partial(gathered.append, number))
    async with asyncio.timeout(60):
        await once.wait()
    assert (gathered, written) == ([], [0, 1, 2])
    notes.add(partial(gathered.append, 3))
    notes.flush()
    assert written[3:] == [3]
