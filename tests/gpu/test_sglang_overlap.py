"""A receive that SGLang's plug-in orders is written behind the step that still writes to its pages.

Needs SGLang for CUDA beside kvferry, as `kvferry.sglang` imports it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from needs import GPUS

# isort: split
pytest.importorskip("sglang.srt.disaggregation", reason="needs SGLang for CUDA")
import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll

from kvferry.blocking import BlockingEngineClient
from kvferry.handoff import Remembered
from kvferry.manifest import ManifestBuilder, ModelInfo, Shard
from kvferry.schemas import SourceBody
from kvferry.sglang.cache import GROUP
from kvferry.sglang.prompt import NUMBER, Prompt, lease_of
from kvferry.sglang.receiver import Receiver
from kvferry.tables import BlockTable
from kvferry.weights import Adapters
from kvferryd.demo.fleet import Fleet

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]
BLOCK, BLOCKS, TOKENS = 16, 64, 300
PAGES = np.arange(1, 1 + -(-TOKENS // BLOCK), dtype=np.int32)
SECOND = 2_000_000_000
"""Cycles of a spinning kernel; H200s run at just below 2 GHz."""
WITHIN_S = 60.0
OLD, LATE, RECEIVED = 1, 2, 3
ROOMS = itertools.count(1)


class Engine:
    """A rank with one component, of bytes."""

    def __init__(self, socket: str, engine_id: str) -> None:
        self.client = BlockingEngineClient.connect(socket, engine_id=engine_id, epoch="1", timeout_s=30)
        region = self.client.allocate(BLOCKS * BLOCK * 64)
        self.rows = region.tensor()[: BLOCKS * BLOCK * 64].view(BLOCKS, BLOCK, 2, 32)
        builder = ManifestBuilder(engine_id, "1", ModelInfo(name="m", fingerprint="f"))
        builder.region(0, region.kind, nbytes=region.nbytes, address=region.address)
        builder.group(GROUP, block_size=BLOCK, num_blocks=BLOCKS)
        axes, heads = ("block", "slot", "head", "dim"), Shard(axis="head", start=0, total=2)
        builder.component(GROUP, layer=0, name="k", array=self.rows, axes=axes, shard=heads, encoding="uint8")
        self.client.register(builder.build())


@dataclass
class Pair:
    prefill: Engine
    decode: Engine
    source: SourceBody
    stream: Any
    """SGLang's forward stream."""

    def receiver(self, *, overlap: bool) -> Receiver:
        """Its request has been prefilled and published, and is bound as the plug-in binds it."""
        room, adapters = next(ROOMS), Adapters()
        req = SimpleNamespace(
            origin_input_ids=list(range(TOKENS)), lora_id=None, input_embeds=None,
            bootstrap_room=room, sampling_params=SimpleNamespace(custom_params={NUMBER: 1}),
        )  # fmt: skip
        tables, digest = {GROUP: BlockTable.of(PAGES.tolist())}, Prompt.of(req, adapters).digest
        self.prefill.client.publish(lease_of(room), tables, TOKENS, digest=digest, lease=1)
        scheduler = SimpleNamespace(enable_overlap=overlap, forward_stream=self.stream)
        rank = SimpleNamespace(
            daemon=self.decode.client, idle=SimpleNamespace(wake_after=lambda end: None), adapters=adapters,
            on_gpu=True, queue=SimpleNamespace(scheduler=scheduler),
        )  # fmt: skip
        manager = SimpleNamespace(
            kv_args=SimpleNamespace(page_size=BLOCK), rank=rank, prefill_info_table=Remembered(), timeout_s=WITHIN_S,
            source=lambda address, dp_rank: self.source, forget=lambda address: None, aux_rows=lambda index: [],
        )  # fmt: skip
        receiver = Receiver(manager, "p:1", room)
        receiver.bind(req)
        receiver.init(0)
        return receiver

    def receive(self, receiver: Receiver) -> bool:
        """As SGLang's scheduler, which polls. Whether the step was still under way when the KV had arrived."""
        receiver.send_metadata(PAGES, 0)
        until = time.monotonic() + WITHIN_S
        while (state := receiver.poll()) not in (KVPoll.Success, KVPoll.Failed):
            assert time.monotonic() < until
            time.sleep(0.001)
        assert state == KVPoll.Success, receiver._why
        return not self.stream.query()

    def ended(self) -> set[int]:
        """The bytes of the request's tokens when the step has ended."""
        self.stream.synchronize()
        return set(self.decode.rows[PAGES.tolist()].view(-1, 64)[:TOKENS].unique().tolist())


def write_late(pair: Pair) -> None:
    """A step that takes a second and writes a token of a request that has ended."""
    with torch.cuda.stream(pair.stream):
        torch.cuda._sleep(SECOND)
        pair.decode.rows[int(PAGES[3]), 5].fill_(LATE)


@pytest.fixture(scope="module")
async def pair(fleet: Fleet) -> AsyncIterator[Pair]:
    """Warm: handshakes are done and kernels compiled."""
    far = len(GPUS) - 1
    source = fleet.daemon("prefill", flags=["--device", "cuda:0"])
    destination = fleet.daemon("decode", flags=["--device", f"cuda:{far}", "--way", "mapped"])
    await fleet.ready(source, destination, timeout_s=60)
    prefill = await asyncio.to_thread(Engine, str(source.socket), "p")
    decode = await asyncio.to_thread(Engine, str(destination.socket), "d")
    with torch.cuda.device(far):
        pair = Pair(prefill, decode, SourceBody(engine_id="p", address=source.peer), torch.cuda.Stream())
        prefill.rows.fill_(RECEIVED)
        torch.cuda.synchronize(0)
        await asyncio.to_thread(pair.receive, pair.receiver(overlap=True))
        yield pair
    decode.client.close()
    prefill.client.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["the race is real", "behind the step"])
async def test_a_step_that_is_under_way_writes_before_the_kv_or_over_it(pair: Pair, overlap: bool) -> None:
    """Without overlap the receiver waits for no step: SGLang has none then, and here the race is seen."""
    with torch.cuda.device(pair.decode.rows.device):
        pair.decode.rows.fill_(OLD)
        torch.cuda.synchronize()
        receiver = pair.receiver(overlap=overlap)
        write_late(pair)
        under_way = await asyncio.to_thread(pair.receive, receiver)
        assert under_way is not overlap
        assert pair.ended() == ({RECEIVED} if overlap else {RECEIVED, LATE})
