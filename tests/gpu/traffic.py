"""An engine of its own process, to be killed in the middle of its work: one of `kvferryd.bench`, filled as that does.

    python traffic.py publish SOCKET ENGINE_ID GPU PREFIX (owned | adopted)
    python traffic.py receive SOCKET ENGINE_ID GPU PREFIX SOURCE_ENGINE_ID SOURCE_ADDRESS

Requests are called PREFIX-0, PREFIX-1, ... A publisher says "ready" when all are published. A receiver says so when it
could begin, begins when it is told to by a line, and says "reading" when it has EARLY of them. GPU -1: host memory.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.bench.gpu_cases import Scale, cases
from kvferryd.bench.gpu_engines import Engine
from kvferryd.demo.fleet import DaemonService

SCALE = Scale(layers=2, latent_layers=1, pool=1 << 17, large=2000, middle=300, small=20, crowd=24)
"""Pools of 268 MB, so that one that is left behind is seen; requests of 4 MB, 600 kB and 40 kB."""
SAME = cases(SCALE, 1)[:3]
CASE = SAME[0]
COUNT, EARLY, TTL_S = 100, 20, 10.0


async def publish(engine: Engine, prefix: str) -> None:
    tables = {"full": BlockTable.of(CASE.ids()[0][0])}
    for number in range(COUNT):
        await engine.ranks[0].client.publish(f"{prefix}-{number}", tables, CASE.tokens, ttl_s=TTL_S)


async def receive(engine: Engine, prefix: str, number: int, source: SourceBody) -> str:
    """Returns the transfer's id. Raises what it failed with."""
    tables, tokens = {"full": BlockTable.of(CASE.ids()[1][0])}, (0, CASE.tokens)
    received = await engine.ranks[0].client.receive(f"{prefix}-{number}", tables, tokens, source=source)
    return received.transfer_id


def beside(socket: str) -> list[DaemonService]:
    """As much of a daemon as an engine needs to know."""
    return [DaemonService("beside", "", "", None, Path(), peer="", socket=Path(socket))]


async def main(role: str, socket: str, engine_id: str, gpu: str, prefix: str, *more: str) -> None:
    caches = CASE.pair.sources() if role == "publish" else CASE.pair.destinations()
    gpus = [int(gpu)] if int(gpu) >= 0 else []
    engine = await Engine.open(engine_id, beside(socket), caches, gpus, more == ("adopted",))
    if role == "publish":
        engine.fill(caches)
        await publish(engine, prefix)
        print("ready", flush=True)
    else:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for number in range(COUNT):
            if number == EARLY:
                print("reading", flush=True)
            await receive(engine, prefix, number, SourceBody(engine_id=more[0], address=more[1]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
