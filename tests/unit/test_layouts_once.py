"""What is equal in the manifests of many peers is kept once, for as long as any of them is known."""

from __future__ import annotations

import gc

import pytest
from caches import attention, cache

from kvferry.manifest import Manifest
from kvferry.wire import manifest_to_proto
from kvferryd.config import Config
from kvferryd.peers.channels import Channels
from kvferryd.peers.introduce import Introductions

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
