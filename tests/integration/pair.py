"""The two engines that most tests move KV between, and what those tests do with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet import until
from ranks import Blocks, Kv, TestEngine

from kvferry.engine import Lease
from kvferry.router import RouterClient
from kvferry.schemas import Awaited, OrderBody, PeerRequest, TransferState
from kvferryd.demo.fleet import DaemonService

TOKENS = 200
MANY = 5000
"""Enough that a read of them takes a good while."""


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


async def waits_for(router: RouterClient, request_id: str, awaited: Awaited) -> bool:
    return [record.waits_for for record in await router.transfers(request_id)] == [awaited]


async def is_in(router: RouterClient, request_id: str, *states: TransferState) -> bool:
    return any(record.state in states for record in await router.transfers(request_id))


async def all_read(router: RouterClient, request_id: str) -> None:
    """Wait until every rank reads what is published. Fails with the record if the transfer ends first."""

    async def read() -> bool:
        records = await router.transfers(request_id)
        assert not any(record.state.ended for record in records), records
        return any(record.state is TransferState.READING for record in records)

    await until(read, "all ranks read")


async def all_wait(pair: Pair, request_id: str) -> None:
    """Until every rank knows of the request."""
    for router in pair.routers:
        await until(lambda router=router: is_in(router, request_id, TransferState.WAITING), "the reservation arrives")
