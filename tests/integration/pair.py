"""The two engines that most tests move KV between, and what those tests do with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fleet import Daemons, until
from ranks import HND, Blocks, Kv, Shape, TestEngine

from kvferry.engine import Lease
from kvferry.errors import KvferryError
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, PeerRequest, TransferState
from kvferryd.demo.fleet import DaemonService

TOKENS = 200
MANY = 5000
"""Enough that a read of them takes a good while."""


PREFILL = Shape.tp(2, block_size=16, num_blocks=320)
DECODE = Shape.tp(3, axes=HND, block_size=24, num_blocks=240)


@dataclass
class Pair:
    """Prefill with TP2, blocks of 16, NHD; decode with TP3, blocks of 24, HND."""

    prefill: TestEngine
    decode: TestEngine
    routers: Sequence[RouterClient]
    """Routers of the decode daemons, by rank."""
    prefill_routers: Sequence[RouterClient]

    @property
    def daemons(self) -> list[DaemonService]:
        return [*self.prefill.daemons, *self.decode.daemons]


@asynccontextmanager
async def a_pair(daemons: Daemons) -> AsyncIterator[Pair]:
    # Not auto: these two have runs of 16 bytes, and most tests are about reads that take a while.
    prefill_daemons, decode_daemons = await asyncio.gather(
        daemons.start("p", 2, "--way", "direct"), daemons.start("d", 3, "--way", "direct")
    )
    prefill, decode = await asyncio.gather(
        TestEngine.start("prefill", prefill_daemons, PREFILL), TestEngine.start("decode", decode_daemons, DECODE)
    )
    routers = [RouterClient(daemon.url) for daemon in (*decode_daemons, *prefill_daemons)]
    yield Pair(prefill, decode, routers[:3], routers[3:])
    await asyncio.gather(prefill.close(), decode.close(), *(router.close() for router in routers))


async def prefilled(pair: Pair, request_id: str, tokens: int = TOKENS, **more: Any) -> tuple[Kv, list[Lease]]:
    """KV in the prefill engine's cache, published."""
    kv, blocks = pair.prefill.filled(tokens)
    return kv, await pair.prefill.publish(request_id, blocks, tokens, **more)


async def half_published(pair: Pair, request_id: str) -> Blocks:
    """The first few of MANY tokens are published: readers wait for the others."""
    _, blocks = pair.prefill.filled(MANY)
    await pair.prefill.publish(request_id, blocks, 10, more=True)
    return blocks


async def order(pair: Pair, request_id: str, rank: int = 0, **more: Any) -> str:
    body = OrderBody(request_id=request_id, source=pair.prefill.source(), **more)
    return (await pair.routers[rank].order(body)).transfer_id


async def prewarmed(source: TestEngine, routers: Sequence[RouterClient]) -> None:
    """All these readers have shaken hands with the source: what is timed next is no handshake."""
    peer = PeerRequest(engine_id=source.engine_id, address=source.address)
    await asyncio.gather(*(router.prewarm(peer) for router in routers))


async def meets(router: RouterClient, source: TestEngine) -> None:
    """Until it has: a connect_timeout_s of one or two seconds may be too short on a busy machine."""
    peer = PeerRequest(engine_id=source.engine_id, address=source.address)

    async def met() -> bool:
        with suppress(KvferryError):
            return bool(await router.prewarm(peer))
        return False

    await until(met, f"{source.engine_id} is met")


async def waits_for(router: RouterClient, request_id: str, awaited: Awaited) -> bool:
    return [record.waits_for for record in await router.transfers(request_id)] == [awaited]


async def waits_longest(router: RouterClient, request_id: str, awaited: Awaited, least_ms: float = 0.0) -> None:
    """Until the request waits for this, and for five times as long as for anything before, or as least_ms."""
    await until(lambda: waits_for(router, request_id, awaited), f"{request_id} waits for the {awaited}")
    since = time.monotonic()

    async def longest() -> bool:
        (record,) = await router.transfers(request_id)
        before = max((each.ms for share in record.ranks for each in share.waits), default=0.0)
        return 1e3 * (time.monotonic() - since) > 5 * max(before, least_ms)

    await until(longest, f"{request_id} waits for the {awaited}, and longer than for anything before")


async def is_in(router: RouterClient, request_id: str, *states: TransferState) -> bool:
    return any(record.state in states for record in await router.transfers(request_id))


async def all_read(router: RouterClient, request_id: str) -> None:
    """Wait until every rank reads what is published. Fails with the record if the transfer ends first."""

    async def read() -> bool:
        records = await router.transfers(request_id)
        assert not any(record.state.ended for record in records), records
        return any(record.state is TransferState.READING for record in records)

    await until(read, "all ranks read")


async def all_in(routers: Sequence[RouterClient], request_id: str, state: TransferState) -> None:
    """Until every rank has the request in this state."""
    for router in routers:
        await until(lambda router=router: is_in(router, request_id, state), f"every rank has the request {state}")
