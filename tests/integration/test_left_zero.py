"""The part of its blocks that a transfer leaves is zero, where the engine asks for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest
from fleet import Daemons
from ranks import DIM, HEADS, HND, LAYERS, STATE, Bytes, Kv, Shape, TestEngine

from kvferry.errors import KvferryError

pytestmark = pytest.mark.anyio
TOKENS = (3, 50)
ROOM = 128
"""Tokens that the blocks have room for: one is filled in part, one not at all."""
POISON = 0xFF


@pytest.fixture(params=["direct", "staged"])
async def both(
    daemons: Daemons, stack: AsyncExitStack, request: pytest.FixtureRequest
) -> tuple[TestEngine, TestEngine]:
    way = ("--way", request.param)
    started = await daemons.start("left", 1, *way), await daemons.start("left-by", 2, *way)
    shapes = Shape(), Shape.tp(2, block_size=64, num_blocks=16, axes=HND)
    engines = [
        await TestEngine.start(f"left-{i}", each, shape)
        for i, (each, shape) in enumerate(zip(started, shapes, strict=True))
    ]
    for engine in engines:
        stack.push_async_callback(engine.close)
    source, reader = engines
    for rank in reader.ranks:
        rank.memory[:] = POISON
    return source, reader


def expected(reader: TestEngine, kv: Kv, blocks) -> list[Bytes]:
    """Zeros from the first token on, and the request's tokens among them."""
    held = reader.snapshot()
    nothing = Kv(np.zeros((LAYERS, 2, ROOM, HEADS, DIM), np.uint16), np.zeros((HEADS, STATE), np.uint16))
    reader.write_into(held, nothing, blocks, (TOKENS[0], ROOM), state=False)
    reader.write_into(held, kv, blocks, TOKENS)
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


async def test_without_a_range_of_tokens_nothing_tells_what_is_left(
    both: tuple[TestEngine, TestEngine], request_id: str
) -> None:
    source, reader = both
    with pytest.raises(KvferryError) as refused:
        await reader.receive(request_id, reader.take(ROOM), source=source.source(), zero=True)
    assert (refused.value.code, refused.value.field) == ("malformed_tables", "zero")
