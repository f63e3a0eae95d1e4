"""More than one start of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pair import Pair
from ranks import Kv, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.schemas import SourceBody
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def third(near: DaemonService) -> AsyncIterator[TestEngine]:
    """A second decode engine: TP1."""
    engine = await TestEngine.start("decode-b", [near], Shape.tp(1, block_size=5))
    yield engine
    await engine.close()


@pytest.fixture
async def phoenix(far: DaemonService, request_id: str) -> AsyncIterator[list[TestEngine]]:
    """Starts of one engine, the last one alive."""
    starts = [await TestEngine.start(f"phoenix-{request_id[-8:]}", [far], Shape.tp(1))]
    yield starts
    await starts[-1].close()


async def start_anew(starts: list[TestEngine]) -> TestEngine:
    old = starts[-1]
    await old.close()
    starts.append(await TestEngine.start(old.engine_id, old.daemons, old.shape))
    return starts[-1]


async def test_nothing_of_an_old_epoch_is_served_and_the_new_one_is_found(
    pair: Pair, third: TestEngine, phoenix: list[TestEngine], request_id: str
) -> None:
    old = phoenix[0]
    for name in ("known", "left over"):
        blocks = old.take(50)
        old.write(Kv.random(50), blocks)
        await old.publish(f"{request_id}-{name}", blocks, 50)
    await third.receive(f"{request_id}-known", third.take(50), source=old.source())  # a handshake is kept

    new = await start_anew(phoenix)

    with refused("deadline", TransferFailed):
        await third.receive(
            f"{request_id}-left over", third.take(50), source=SourceBody(**old.source().model_dump()), deadline_s=0.5
        )
    with refused("stale_epoch", TransferFailed):
        await third.receive(f"{request_id}-stale", third.take(50), source=old.source(epoch=old.epoch))

    kv, blocks = new.filled(50)
    await new.publish(request_id, blocks, 50)
    await third.gets(request_id, kv, source=new.source(epoch=new.epoch))


async def test_a_reader_shakes_hands_anew_by_itself_when_its_source_has_started_anew(
    third: TestEngine, phoenix: list[TestEngine], request_id: str
) -> None:
    for turn in range(3):
        engine = phoenix[-1] if turn == 0 else await start_anew(phoenix)
        kv, blocks = engine.filled(50)
        await engine.publish(f"{request_id}-{turn}", blocks, 50)
        await third.gets(f"{request_id}-{turn}", kv, source=engine.source())
