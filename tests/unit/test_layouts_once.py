"""Equal parts in the manifests of many peers are kept once, for as long as any of them is known."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import defaultdict
from typing import Any

import pytest
from alone import first_of, peer_served
from caches import attention, cache

from kvferry.manifest import Manifest
from kvferry.v1 import layout_pb2, peer_pb2, peer_pb2_grpc
from kvferry.wire import manifest_to_proto
from kvferryd.config import Config
from kvferryd.engine import registration
from kvferryd.peers import peer
from kvferryd.peers.channels import Channels
from kvferryd.peers.introduce import Introductions
from kvferryd.plan import plan

pytestmark = pytest.mark.anyio


async def test_equal_layouts_are_read_once_and_others_beside_them() -> None:
    introductions, told = Introductions(Channels(Config()), 1.0), manifest_to_proto(cache(*attention()))

    def met(engine_id: str, world_size: int = 1) -> Manifest:
        told.engine_id, told.epoch, told.world_size = engine_id, f"epoch of {engine_id}", world_size
        return introductions._manifest(told)

    first, second, other = met("first"), met("second"), met("other", 2)
    assert (first.engine_id, second.engine_id, second.epoch) == ("first", "second", "epoch of second")
    assert second.components[0] is first.components[0]
    assert other.components[0] is not first.components[0]
    assert len(introductions._layouts) == 2
    del first, second, other
    gc.collect()
    assert not introductions._layouts


async def test_a_large_manifest_is_written_once_for_all_peers_and_not_by_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrote: list[threading.Thread] = []

    def write(manifest: Manifest) -> layout_pb2.Manifest:
        wrote.append(threading.current_thread())
        return manifest_to_proto(manifest)

    monkeypatch.setattr(registration, "manifest_to_proto", write)
    engine = first_of()
    engine.manifest = cache(*attention(layers=range(100)), engine="e")
    given_up = asyncio.ensure_future(engine.described())
    await asyncio.sleep(0)
    given_up.cancel()
    first, second = await asyncio.gather(engine.described(), engine.described())
    assert first is second and first == manifest_to_proto(engine.manifest)
    (by,) = wrote
    assert by is not threading.current_thread()
    small = first_of()
    assert await small.described() == manifest_to_proto(small.manifest) and wrote[1] is threading.current_thread()


class Planner(peer_pb2_grpc.PeerServicer):
    async def Pair(self, request: Any, context: Any) -> peer_pb2.PairReply:
        return peer_pb2.PairReply(pairing=f"{len(request.sources)} {request.engine_id} {request.epoch}")


async def test_a_large_plan_is_written_once_for_all_ranks_and_not_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    wrote: list[threading.Thread] = []

    def write(manifest: Manifest) -> layout_pb2.Manifest:
        wrote.append(threading.current_thread())
        return manifest_to_proto(manifest)

    monkeypatch.setattr(peer, "manifest_to_proto", write)
    manifests = [cache(*attention(layers=range(100)), engine="p", rank=rank, of=2) for rank in range(2)]
    planned = plan(manifests, cache(*attention(layers=range(100)), engine="e"))
    channels = Channels(Config())
    async with peer_served(Planner()) as address:
        ranks = {
            each.rank: peer.PeerRank(channels.open(address), each, 1, "", "", b"", {}, peer_pb2.ReadOpening())
            for each in manifests
        }
        of_two = peer.PeerEngine("p", "1", ranks, planned, first_of(), defaultdict(float))
        given_up = asyncio.ensure_future(of_two.pair(ranks[0], 60.0))
        await asyncio.sleep(0)
        given_up.cancel()
        names = await asyncio.gather(*(of_two.pair(rank, 60.0) for rank in ranks.values()))
        assert names == ["2 p 1", "2 p 1"] == [await of_two.pair(ranks[0], 60.0, forgotten=names[0]), names[1]]
        assert len(wrote) == 3 and set(wrote).isdisjoint([threading.current_thread()])
        await of_two.close()
        await channels.close()
