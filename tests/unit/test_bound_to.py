"""Block tables are bound beside the event loop where there is much of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from caches import array, cache

from kvferry.tables import BlockTable
from kvferryd import aio
from kvferryd.paths import source
from kvferryd.paths.source import bound_to
from kvferryd.plan import Bound, bind, plan

pytestmark = pytest.mark.anyio
BLOCKS, SLOTS = 64, 16
LAYERS = source.BOUND_AS_ONE * (aio.FEW // BLOCKS + 1)


@pytest.mark.parametrize("blocks", [1, BLOCKS], ids=["few", "many"])
async def test_only_what_takes_long_is_bound_beside_the_loop(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = []

    def binding(*about: Any, **more: Any) -> Bound:
        loops.append(asyncio._get_running_loop())
        return bind(*about, **more)

    monkeypatch.setattr(source, "bind", binding)
    theirs, ours = (
        cache(
            *(array("k", layer, region=layer, block=BLOCKS, slot=SLOTS, head=1, dim=4) for layer in range(LAYERS)),
            engine=engine,
        )
        for engine in ("p", "d")
    )
    whole, tables = plan([theirs], ours), {"full": BlockTable.of(np.arange(blocks))}
    reader: Any = SimpleNamespace(source=SimpleNamespace(rank=0), lease=SimpleNamespace(tables=tables))
    bound = await bound_to(whole, [reader], tables, (0, blocks * SLOTS))
    assert bound.segment_count == LAYERS * blocks
    assert loops == [asyncio.get_running_loop() if blocks == 1 else None]
