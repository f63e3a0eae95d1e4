"""Meaning of the bytes, between real daemons: refused by name where it differs, and never cut where nobody knows it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fleet import TIMEOUT_S, until

from kvferry.engine import EngineClient, TransferFailed
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, SourceBody, TransferState
from kvferry.tables import BlockTable
from kvferryd.commands.cli import main
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio

LAYERS, BLOCKS, SLOTS, DIM = 12, 16, 4, 8
Tables = dict[str, BlockTable]


@dataclass
class Raw:
    """An engine of one rank whose cache is raw bytes: [layer, block, slot, dim]."""

    name: str
    client: EngineClient
    bytes: np.ndarray[Any, np.dtype[np.uint8]]
    daemon: DaemonService

    @property
    def source(self) -> SourceBody:
        return SourceBody(engine_id=self.name, address=self.daemon.peer)


@asynccontextmanager
async def raw(daemon: DaemonService, encoding: str | None) -> AsyncIterator[Raw]:
    name, epoch = f"raw-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    async with await EngineClient.connect(
        str(daemon.socket), engine_id=name, epoch=epoch, timeout_s=TIMEOUT_S
    ) as client:
        region = await client.allocate(LAYERS * BLOCKS * SLOTS * DIM)
        held = region.array().reshape(LAYERS, BLOCKS, SLOTS, DIM)
        builder = ManifestBuilder(name, epoch, ModelInfo(name="m", fingerprint="f"))
        builder.region(0, "host", nbytes=region.nbytes, address=region.address)
        builder.group("full", block_size=SLOTS, num_blocks=BLOCKS)
        for layer, array in enumerate(held):
            axes = "block", "slot", "dim"
            builder.component("full", layer=layer, name="k", array=array, axes=axes, encoding=encoding)
        await client.register(builder.build())
        held[:] = np.random.default_rng().integers(1, 256, held.shape, dtype=np.uint8)
        yield Raw(name, client, held, daemon)


def tables(*block_ids: int) -> Tables:
    return {"full": BlockTable.of(block_ids)}


async def test_encodings_that_differ_are_refused_with_both_values_wherever_one_looks(
    near: DaemonService, far: DaemonService, request_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with raw(near, "fp8_e4m3fn") as prefill, raw(far, "fp8_e5m2") as decode, RouterClient(far.url) as router:
        before = decode.bytes.copy()
        await prefill.client.publish(request_id, tables(1, 2), 2 * SLOTS)
        with refused("refused", TransferFailed) as caught:
            await decode.client.receive(request_id, tables(3, 4), (0, 2 * SLOTS), source=prefill.source)
        assert caught.value.blocks_safe
        assert (decode.bytes == before).all()
        (record,) = await router.transfers(request_id)
        assert record.error is not None
        for told in (str(caught.value), record.error.message):
            assert "layers 0-11 k: encoding: source has fp8_e4m3fn, destination has fp8_e5m2" in told
            assert told.count("encoding:") == 1
        assert "same KV-cache dtype" in record.error.remedy
        for command in (["transfers", "--request-id", request_id], ["explain", "--transfer", request_id]):
            assert await asyncio.to_thread(main, [*command, "--daemon", far.url]) in (0, 2)
            said = capsys.readouterr().out
            assert "source has fp8_e4m3fn, destination has fp8_e5m2" in said
        assert "same KV-cache dtype" in said


@pytest.mark.parametrize("way", ["direct", "staged"])
async def test_what_is_opaque_is_moved_in_whole_blocks(
    near: DaemonService, far: DaemonService, request_id: str, way: str
) -> None:
    async with raw(near, None) as prefill, raw(far, "opaque:uint8") as decode, RouterClient(far.url) as router:
        expected = decode.bytes.copy()
        expected[:, [3, 9]] = prefill.bytes[:, [1, 2]]
        await prefill.client.publish(request_id, tables(1, 2), 2 * SLOTS)
        receiving = asyncio.create_task(decode.client.receive(request_id, tables(3, 9), (0, 2 * SLOTS)))
        await router.order(OrderBody(request_id=request_id, source=prefill.source, way=way))
        assert (await receiving).nbytes == LAYERS * 2 * SLOTS * DIM
        assert (decode.bytes == expected).all()


@pytest.mark.parametrize("tokens", [(0, 2 * SLOTS - 1), (1, 2 * SLOTS)])
async def test_a_range_that_cuts_a_block_of_what_is_opaque_is_refused_before_a_byte_moves(
    near: DaemonService, far: DaemonService, request_id: str, tokens: tuple[int, int]
) -> None:
    """Also where the publish comes in pieces, the first of which are whole blocks."""
    async with raw(near, None) as prefill, raw(far, None) as decode:
        before = decode.bytes.copy()
        await prefill.client.publish(request_id, tables(1, 2), SLOTS, more=True)
        with refused("divided", field="tokens"):
            await decode.client.receive(request_id, tables(3, 9), tokens, source=prefill.source)
        assert (decode.bytes == before).all()


async def test_a_publish_that_grows_by_parts_of_blocks_is_read_in_whole_ones(
    near: DaemonService, far: DaemonService, request_id: str
) -> None:
    async with raw(near, None) as prefill, raw(far, None) as decode, RouterClient(far.url) as router:
        expected = decode.bytes.copy()
        expected[:, [3, 9, 4]] = prefill.bytes[:, [1, 2, 5]]
        final, blocks = 3 * SLOTS, tables(1, 2, 5)
        await prefill.client.publish(request_id, blocks, 1, more=True)
        receiving = asyncio.create_task(
            decode.client.receive(request_id, tables(3, 9, 4), (0, final), source=prefill.source)
        )

        async def waits() -> bool:
            return [record.waits_for for record in await router.transfers(request_id)] == [Awaited.PUBLISH]

        for published in (SLOTS + 1, 2 * SLOTS - 1, 2 * SLOTS, final - 1):
            await until(waits, "all that may be read has been read")
            await prefill.client.publish(request_id, blocks, published, more=True)
        await prefill.client.publish(request_id, blocks, final)
        await receiving
        assert (decode.bytes == expected).all()
        (record,) = await router.transfers(request_id)
        assert record.state is TransferState.DONE
