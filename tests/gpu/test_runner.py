"""Copies on the event loop: in order, each ended once, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial

import numpy as np
import pytest
from needs import GPUS

from kvferry.errors import KvferryError
from kvferryd.copy import Batch
from kvferryd.copy.batch import Side, packed
from kvferryd.copy.runner import GpuCopy, Runner
from kvferryd.memory.cuda import read

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
GPU = GPUS[-1]
NBYTES, LIMIT_S = 1 << 20, 60.0


@pytest.fixture
def memory() -> Iterator[tuple[int, int]]:
    """(addresses of NBYTES bytes that hold 0, 1, 2, ..., of as many that hold 0)."""
    source, destination, stream = GPU.alloc(NBYTES), GPU.alloc(NBYTES), GPU.stream()
    held = (np.arange(NBYTES) % 256).astype(np.uint8)
    stream.copy(source, held.ctypes.data, NBYTES)
    stream.fill(destination, NBYTES)
    stream.synchronize()
    yield source, destination
    for address in (source, destination):
        GPU.free(address)
    stream.close()


@pytest.fixture
async def runner() -> AsyncIterator[Runner]:
    runner = await Runner.started(GPU, 4)
    yield runner
    await runner.close()


def batch(memory: tuple[int, int], rows: int, nbytes: int) -> Batch:
    """A segment of so many runs, at the start of both."""
    table = packed(rows, nbytes)
    source, destination = (Side(np.array([address], dtype=np.int64), table) for address in memory)
    return Batch(nbytes, rows, source, destination)


async def ended(*copies: GpuCopy) -> list[str]:
    """The code of each error; empty where all was copied."""
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([copy.quiet for copy in copies])
    problems = [copy.done.exception() for copy in copies]
    return [problem.code if isinstance(problem, KvferryError) else "" for problem in problems]


async def test_what_nobody_prepared_is_prepared_and_others_go_on(runner: Runner, memory) -> None:
    known, unknown = batch(memory, 4, 64), batch(memory, 3, 7)
    await runner.prepare([known])
    copies = [
        runner.start(256, lambda: [known]),
        runner.start(21, lambda: [unknown]),
        runner.start(256, lambda: [known]),
    ]
    assert await ended(*copies) == ["", "", ""]
    assert read(GPU, memory[1], 256) == bytes(range(256))


async def test_a_copy_that_cannot_be_made_fails_alone(runner: Runner, memory) -> None:
    def broken() -> list[Batch]:
        raise ValueError("no such block")

    whole = batch(memory, 16, 4096)
    copies = [runner.start(1, build) for build in (lambda: [whole], broken, lambda: [whole], broken, lambda: [whole])]
    assert await ended(*copies) == ["", "copy_failed", "", "copy_failed", ""]
    assert "no such block" in str(copies[1].done.exception())
    assert read(GPU, memory[1], 65536) == bytes(range(256)) * 256


async def test_one_that_was_given_up_before_its_turn_writes_nothing(runner: Runner, memory) -> None:
    every = [runner.start(64, lambda: [batch(memory, 1, 64)]) for _ in range(6)]
    later = runner.start(4096, lambda: [batch(memory, 1, 4096)])
    later.abandon()
    assert await ended(*every, later) == [""] * 6 + ["abandoned"]
    assert read(GPU, memory[1] + 64, 64) == bytes(64)


async def test_closing_ends_every_copy(runner: Runner, memory) -> None:
    every = [batch(memory, 1, 64 << at) for at in range(8)]  # each of a shape of its own
    copies = [runner.start(64, partial(list, [each])) for each in every]
    await runner.close()
    assert set(await ended(*copies)) <= {"", "copies_closed"}
    assert await ended(runner.start(64, lambda: [batch(memory, 1, 64)])) == ["copies_closed"]
