"""The part of its blocks that a transfer leaves is zero, where the engine asks for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest
from fleet import Daemons, retired
from ranks import DIM, HEADS, HND, LAYERS, STATE, Blocks, Bytes, Kv, Shape, TestEngine

from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
TOKENS = (3, 50)
ROOM = 128
"""Tokens that the blocks have room for: one is filled in part, one not at all."""
POISON = 0xFF
WAYS = "direct", "staged"


@pytest.fixture(scope="module", params=WAYS)
async def started(shared_daemons: Daemons, request: pytest.FixtureRequest) -> list[list[DaemonService]]:
    """A source's daemon, and those of a reader's two ranks, for engines of each test."""
    way = request.param
    return [await shared_daemons.start(f"left-{way}-{count}", count, "--way", way) for count in (1, 2)]


async def two_engines(
    stack: AsyncExitStack, started: list[list[DaemonService]], *shapes: Shape
) -> tuple[TestEngine, TestEngine]:
    """The source, and the reader, in whose memory nothing is zero. They leave with the test."""
    for daemons in started:
        stack.push_async_callback(retired, *daemons)
    engines = [await TestEngine.start(f"left-{i}", *each) for i, each in enumerate(zip(started, shapes, strict=True))]
    for engine in engines:
        stack.push_async_callback(engine.close)
    source, reader = engines
    for rank in reader.ranks:
        rank.memory[:] = POISON
    return source, reader


@pytest.fixture
async def both(started: list[list[DaemonService]], stack: AsyncExitStack) -> tuple[TestEngine, TestEngine]:
    return await two_engines(stack, started, Shape(), Shape.tp(2, block_size=64, num_blocks=16, axes=HND))


def expected(reader: TestEngine, kv: Kv, blocks: Blocks, tokens: tuple[int, int] = TOKENS) -> list[Bytes]:
    """Zeros from the first token on, and the request's tokens among them."""
    held = reader.snapshot()
    nothing = Kv(np.zeros((LAYERS, 2, ROOM, HEADS, DIM), np.uint16), np.zeros((HEADS, STATE), np.uint16))
    reader.write_into(held, nothing, blocks, (tokens[0], ROOM), state=False)
    reader.write_into(held, kv, blocks, tokens)
    return held


@pytest.mark.parametrize("chunks", [(), (20, 40)], ids=["at once", "chunk by chunk"])
async def test_all_behind_the_last_token_is_zero_and_all_before_the_first_as_it_was(
    both: tuple[TestEngine, TestEngine], request_id: str, chunks: tuple[int, ...]
) -> None:
    source, reader = both
    (kv, given), blocks, (first, *later) = source.filled(TOKENS[1]), reader.take(ROOM), (*chunks, TOKENS[1])
    wanted = expected(reader, kv, blocks)
    await source.publish(request_id, given, first, more=bool(later))
    receiving = asyncio.create_task(reader.receive(request_id, blocks, TOKENS, source=source.source(), zero=True))
    for tokens in later:
        await source.publish(request_id, given, tokens, more=tokens < TOKENS[1])
    await receiving
    assert reader.differences(wanted) == ""


async def test_blocks_of_which_no_token_is_read_are_zero_too(
    started: list[list[DaemonService]], stack: AsyncExitStack, request_id: str
) -> None:
    """A prefix that is there already ends within a block: a stage of a pipeline that has no states has nothing to
    read."""
    shapes = Shape(), Shape.pp(1, LAYERS - 1, block_size=64, num_blocks=16)
    source, reader = await two_engines(stack, started, *shapes)
    (kv, given), blocks, nothing = source.filled(TOKENS[1]), reader.take(ROOM), (TOKENS[1], TOKENS[1])
    wanted = expected(reader, kv, blocks, nothing)
    await source.publish(request_id, given, TOKENS[1])
    await reader.receive(request_id, blocks, nothing, source=source.source(), zero=True)
    assert reader.differences(wanted) == ""


async def test_without_a_range_of_tokens_nothing_tells_what_is_left(
    both: tuple[TestEngine, TestEngine], request_id: str
) -> None:
    source, reader = both
    with refused("malformed_tables", field="zero"):
        await reader.receive(request_id, reader.take(ROOM), source=source.source(), zero=True)
