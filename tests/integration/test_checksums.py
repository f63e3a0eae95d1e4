"""Checksums end to end: a byte that is not what the source holds fails the transfer, on every path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from fleet import Daemons, logged, peer_stub, under_way, until
from ranks import HND, Blocks, Kv, Shape, TestEngine

from kvferry.engine import TransferFailed
from kvferry.router import RouterClient
from kvferry.v1 import peer_pb2

pytestmark = pytest.mark.anyio
FIRST, ALL = 30, 200
WAYS = ["direct", "staged"]


@dataclass
class Scene:
    source: TestEngine
    reader: TestEngine
    router: RouterClient
    """The router of the reader's first rank."""


@pytest.fixture(scope="module")
async def scene(shared_daemons: Daemons) -> AsyncIterator[Scene]:
    """Two ranks to three, other blocks, other axes. Only the readers compare."""
    theirs, ours = await asyncio.gather(
        shared_daemons.start("sums-s", 2, "--way", "staged"),
        shared_daemons.start("sums-r", 3, "--way", "staged", "--checksum"),
    )
    source, reader = await asyncio.gather(
        TestEngine.start("sums-s", theirs, Shape.tp(2)),
        TestEngine.start("sums-r", ours, Shape.tp(3, axes=HND, block_size=24)),
    )
    async with RouterClient(ours[0].url) as router:
        yield Scene(source, reader, router)
    await asyncio.gather(source.close(), reader.close())


def written(engine: TestEngine, tokens: int = ALL) -> tuple[Kv, Blocks]:
    kv, blocks = engine.filled(tokens)
    return kv, blocks


@pytest.mark.parametrize("way", WAYS)
async def test_what_arrives_whole_is_done(scene: Scene, request_id: str, way: str) -> None:
    kv, blocks = written(scene.source)
    leases = await scene.source.publish(request_id, blocks, ALL)
    await scene.reader.gets(request_id, kv, source=scene.source.source(), way=way)
    await asyncio.gather(*(lease.ended() for lease in leases))


async def test_the_first_sum_was_rehearsed_when_the_engine_registered(scene: Scene) -> None:
    """On a GPU its kernel is compiled meanwhile."""
    for daemon in scene.reader.daemons:
        assert await logged(daemon, "engine registered")
        assert "not rehearsed" not in daemon.log.read_text()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["source", "destination"])
async def test_a_byte_that_changes_after_it_was_moved_fails_the_transfer(
    scene: Scene, request_id: str, way: str, side: str
) -> None:
    """The first tokens are read while more are to come; then one of their bytes changes, on either side."""
    _, blocks = written(scene.source)
    reserved = scene.reader.take(ALL)
    await scene.source.publish(request_id, blocks, FIRST, more=True)

    async def first_part_is_there() -> bool:
        (record,) = await scene.router.transfers(request_id) or [None]
        return record is not None and len(record.ranks) > 0 and record.ranks[0].bytes > 0

    receiving = scene.reader.receive(request_id, reserved, source=scene.source.source(), way=way)
    async with under_way(receiving) as received:
        await until(first_part_is_there, "the first tokens are read")
        engine, table = (scene.source, blocks) if side == "source" else (scene.reader, reserved)
        paged, _ = engine.shape.arrays(0, engine.ranks[0].memory)
        paged[0, 0, table.ids[0]].flat[0] ^= 1
        await scene.source.publish(request_id, blocks, ALL)
        with pytest.raises(TransferFailed) as failed:
            await received
    assert failed.value.code == "checksum_mismatch"
    assert "prefill the request again" in failed.value.remedy


async def test_a_reader_of_before_is_told_that_its_sums_are_no_more(scene: Scene, request_id: str) -> None:
    """It asks for CRC-32s: an answer without them would look like bytes that differ."""
    asked = peer_pb2.SumRequest(engine_id=scene.source.engine_id, epoch=scene.source.epoch)
    asked.wanted.request_id = request_id
    async with peer_stub(scene.source.daemons[0]) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Sum(asked, timeout=60)
    assert "CRC-32s, which are not made any more" in str(refused.value.details())
