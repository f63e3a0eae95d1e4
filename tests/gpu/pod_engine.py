"""An engine in a pod: `python pod_engine.py SOCKET ROLE`. It answers each line of its stdin, JSON, with a line.

The source publishes the large request of `kvferry bench gpu` (671 MB), the reader receives it as often as it is told,
and compares the last word by word. Each sees one GPU, and names those that it sees.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch

from kvferry.memory import cuda
from kvferry.router import RouterClient
from kvferry.schemas import SourceBody
from kvferry.tables import BlockTable
from kvferryd.bench.gpu_cases import FULL, NHD, POISON, Case, Model, Pair
from kvferryd.bench.gpu_engines import Rank
from kvferryd.bench.gpu_engines import _allocate as allocate

from kvferry.engine import EngineClient  # isort: skip

CASE = Case("permuted blocks", Pair(Model(FULL.layers, "kv", 2, 128), NHD, NHD, FULL.pool), FULL.large)


async def record_of(rest: str, transfer_id: str) -> dict[str, Any]:
    async with RouterClient(rest) as router:
        record = await router.transfer(transfer_id)
        (ways,) = [peer.ways for peer in await router.peers() if peer.engine_id == "source"]
    told = record.model_dump(include={"path", "transport", "bytes_per_s", "phases_ms"})
    return {**told, "ways": ways}


class PodEngine:
    def __init__(self, rank: Rank) -> None:
        self._rank, self._ids = rank, CASE.ids()

    @classmethod
    async def open(cls, socket: str, role: str) -> PodEngine:
        (cache,) = CASE.pair.sources()
        client = await EngineClient.connect(socket, engine_id=role, epoch="1", timeout_s=60)
        pool, release = await allocate(client, cache.nbytes, 0)
        await client.register(cache.manifest(role, "1", "cuda"))
        if role == "source":
            cache.fill(pool)
        torch.cuda.synchronize()
        return cls(Rank(client, pool, release))

    async def do(self, asked: dict[str, Any]) -> object:
        client = self._rank.client
        match asked["do"]:
            case "tell":
                return {"gpus": [each.uuid for each in cuda.devices()], "address": client.peer_address}
            case "publish":
                await client.publish(asked["request_id"], self._tables(0), CASE.tokens, lease=1)
            case "receive":
                source, received = SourceBody(engine_id="source", address=asked["address"]), []
                for each in asked["request_ids"]:  # with no pause between: a link that has rested is slower
                    self._rank.pool.fill_(POISON)
                    torch.cuda.synchronize()
                    got = await client.receive(each, self._tables(1), (0, CASE.tokens), source=source, attempt=1)
                    received.append(got.transfer_id)
                torch.cuda.synchronize()
                CASE.check(self._ids, 0, self._rank.pool)
                return received
            case "record":
                return await record_of(asked["rest"], asked["transfer_id"])
        return {}

    def _tables(self, side: int) -> dict[str, BlockTable]:
        (blocks,) = self._ids[side]
        return {"full": BlockTable.of(blocks)}


async def main(socket: str, role: str) -> None:
    engine = await PodEngine.open(socket, role)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = await engine.do(json.loads(line))
        except Exception as error:  # noqa: BLE001  its test prints it
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
