"""The CPU time of a staged chunk on its source's event loop: `.venv/bin/python tests/unit/packing_cost.py`.

A stream in this process, 20,000 chunks, copies that do nothing: the machine, its shell, the arena, protobufs. gRPC is
not in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from caches import HND, attention, cache, table

from kvferry.protocol.values import Publication, ReaderId
from kvferry.v1 import peer_pb2
from kvferryd.copy.copying import Copying
from kvferryd.leases import gather
from kvferryd.leases.leases import Leases
from kvferryd.leases.stream import ServedStream
from kvferryd.staging.arena import Arena
from kvferryd.staging.share import Pairings, packs, share_of, wanting
from kvferryd.transport.read import Span

CHUNKS, AT_ONCE, WARM_UP = 20_000, 3, 200


class Copies:
    """As those of a daemon, without a byte."""

    def start(self, nbytes: int, build: Callable[[], Any]) -> Copying:
        loop = asyncio.get_running_loop()
        copying = Copying(nbytes, loop.create_future(), loop.create_future())
        loop.call_soon(copying.end)
        return copying


async def cost_us() -> float:
    source, reader = cache(*attention(dim=64)), cache(*attention(dim=64, order=HND), engine="decode")
    tables = {"full": table(2, 0, 3, 1)}
    opening = wanting(tables, (0, 16), states=True, chunk_nbytes=4096)
    chunks = packs(share_of([source], reader, 0), 0, tables, opening)
    gather._cut = lambda *_: chunks * (CHUNKS // len(chunks) + 1)
    pairings, arena = Pairings(), Arena(SimpleNamespace(span=Span(0, 16 << 20, "host")), Copies())  # type: ignore[arg-type]
    await pairings.add("a plan", source, [source], reader)
    leases = Leases("prefill", "1", lambda account: None, 4)
    leases.publish("r", 1, Publication(tables, 16, b"", more=False), ttl_s=600, readers=1)
    lease = leases.get("r")
    assert lease is not None
    named = peer_pb2.PackOpen(request_id="r", version=1, pairing="a plan", chunks=CHUNKS, word=lease.terms.word)
    opening.MergeFrom(named)
    said: asyncio.Queue[peer_pb2.Pack] = asyncio.Queue()
    said.put_nowait(peer_pb2.Pack(reading=1, packing=1, want=range(AT_ONCE), open=opening))

    async def requests() -> AsyncIterator[peer_pb2.ReadRequest]:
        while True:
            yield peer_pb2.ReadRequest(pack=await said.get())

    gatherer, who = gather.Gatherer(source, {0: 0}, arena, pairings), ReaderId("decode", "1", 0, 1)
    replies = ServedStream(leases, who, gatherer, asyncio.Event(), announcing=False).replies(requests())
    told, began = 0, 0.0
    while told < CHUNKS:
        for packed in (await anext(replies)).pack.packed:
            began, told = time.thread_time() if told == WARM_UP else began, told + 1
            want = [told + AT_ONCE - 1] if told + AT_ONCE <= CHUNKS else []
            said.put_nowait(peer_pb2.Pack(reading=1, packing=1, read=[packed.chunk], want=want))
    took_s = time.thread_time() - began
    await replies.aclose()
    return 1e6 * took_s / (CHUNKS - WARM_UP)


if __name__ == "__main__":
    print(" ".join(f"{asyncio.run(cost_us()):.1f}" for _ in range(5)), "us a chunk")
