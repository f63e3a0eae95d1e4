"""A warm order of a router, from its route to the first read: by how many modules it goes."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet import TIMEOUT_S, until
from ranks import Shape, TestEngine

from kvferry.router import RouterClient
from kvferry.schemas import OrderBody
from kvferryd.demo.fleet import Fleet

pytestmark = pytest.mark.anyio
TOKENS, WARM, ORDERS = 50, 2, 4
MODULES = 48
"""The modules of an order today, as docs/architecture.md says. Fewer are better."""
SHAPE = Shape.tp(1, num_blocks=64)


class Traced(Fleet):
    """The daemon of this name is traced."""

    def _start(self, name: str, command: Any) -> Any:
        if name.startswith("traced"):
            traced = Path(__file__).with_name("traced_daemon.py")
            command = [sys.executable, str(traced), str(self.directory / "orders"), *command[3:]]
        return super()._start(name, command)


async def test_an_order_goes_by_few_modules(tmp_path: Path) -> None:
    async with Traced(tmp_path) as fleet:
        far, near = fleet.daemons("far", 1), fleet.daemons("traced", 1)
        await fleet.ready(*far, *near, timeout_s=TIMEOUT_S)
        source, reader = await TestEngine.start("s", far, SHAPE), await TestEngine.start("r", near, SHAPE)
        async with RouterClient(near[0].url) as router:
            for at in range(WARM + ORDERS):
                _, blocks = source.filled(TOKENS)
                (lease,) = await source.publish(f"r{at}", blocks, TOKENS)
                receiving = asyncio.create_task(reader.receive(f"r{at}", reader.take(TOKENS)))
                await until(partial(router.transfers, f"r{at}"), "the reservation arrives")
                await router.order(OrderBody(request_id=f"r{at}", source=source.source()))
                await receiving
                await lease.ended()
        await reader.close()
        await source.close()
    orders = [json.loads(line) for line in (tmp_path / "orders").read_text().splitlines()][WARM:]
    assert len(orders) == ORDERS
    always = [module for module in orders[0] if all(module in order for order in orders)]  # timers ring meanwhile
    print(len(always), *always, sep="\n")
    assert len(always) <= MODULES
