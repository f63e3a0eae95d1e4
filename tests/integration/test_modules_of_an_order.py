"""A warm order of a router: by how many modules it goes until the first read, and how many forms its values take until
they are planned. docs/architecture.md shows both. If it differs: python tests/integration/test_modules_of_an_order.py.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleet import TIMEOUT_S, until
from ranks import Blocks, Kv, Shape, TestEngine
from traced_daemon import MARKS, PUBLISHED, RESERVED, SOURCE, TOKENS

from kvferry.router import RouterClient
from kvferry.schemas import OrderBody
from kvferryd.demo.fleet import Fleet

pytestmark = pytest.mark.anyio
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SHOWN = re.compile(r"(?<=<!-- one order -->\n```\n).*?(?=```\n)", re.DOTALL)
WARM, ORDERS = 2, 4
MODULES, CHANGES = 40, 2
"""The modules of an order, and the times that a value takes another form. Fewer are better."""
SHAPE = Shape.tp(1, num_blocks=64)


class Traced(Fleet):
    """The daemon of this name is traced."""

    def _start(self, name: str, command: Any) -> Any:
        if name.startswith("traced"):
            traced = Path(__file__).with_name("traced_daemon.py")
            command = [sys.executable, str(traced), str(self.directory / "orders"), *command[3:]]
        return super()._start(name, command)


async def traced(directory: Path) -> tuple[list[str], dict[str, list[str]]]:
    """The modules of every warm order, and the forms of each of its values, in their order."""
    async with Traced(directory) as fleet:
        far, near = fleet.daemons("far", 1), fleet.daemons("traced", 1)
        await fleet.ready(*far, *near, timeout_s=TIMEOUT_S)
        source, reader = await TestEngine.start(SOURCE, far, SHAPE), await TestEngine.start("r", near, SHAPE)
        async with RouterClient(near[0].url) as router:
            for at in range(WARM + ORDERS):
                kv, blocks = Kv.random(TOKENS), Blocks(PUBLISHED, 1)
                source.write(kv, blocks)
                (lease,) = await source.publish(f"r{at}", blocks, TOKENS)
                receiving = asyncio.create_task(reader.receive(f"r{at}", Blocks(RESERVED, 4), (0, TOKENS)))
                await until(partial(router.transfers, f"r{at}"), "the reservation arrives")
                await router.order(OrderBody(request_id=f"r{at}", source=source.source()))
                await receiving
                await lease.ended()
        await reader.close()
        await source.close()
    orders = [json.loads(line) for line in (directory / "orders").read_text().splitlines()][WARM:]
    assert len(orders) == ORDERS
    first = orders[0]
    always = [module for module in first["modules"] if all(module in order["modules"] for order in orders)]
    return always, first["forms"]  # timers ring meanwhile: not every module is of the order


def page(modules: list[str], forms: dict[str, list[str]]) -> str:
    """The part of the page."""
    rooms = defaultdict(list)
    for module in modules:
        package, _, rest = module.partition(".")
        room, _, name = rest.rpartition(".")
        rooms[room or f"{package}/"].append(name)
    lines = [f"{len(modules)} modules"]
    lines += [f"  {room.replace('.', '/'):<18}{', '.join(sorted(names))}" for room, names in sorted(rooms.items())]
    lines += ["", "forms"]
    lines += [f"  {mark:<18}{' -> '.join([*forms[mark], 'plan'])}" for mark in MARKS]
    return "\n".join([*lines, ""])


async def test_an_order_goes_by_few_modules_and_its_values_take_few_forms(tmp_path: Path) -> None:
    modules, forms = await traced(tmp_path)
    print(page(modules, forms))
    assert forms.keys() == MARKS.keys()
    assert len(modules) <= MODULES
    assert {mark: each for mark, each in forms.items() if len(each) - 1 > CHANGES} == {}
    (shown,) = SHOWN.findall(PAGE.read_text(encoding="utf-8"))
    assert shown == page(modules, forms)


async def _write() -> None:
    with tempfile.TemporaryDirectory() as directory:
        told = page(*await traced(Path(directory)))
    PAGE.write_text(SHOWN.sub(lambda _: told, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(_write())
