"""A request has one X-Request-Id and one trace id in the logs of all ranks of both sides, whichever half came first."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import pytest
from fleet import logged, until
from pair import TOKENS, Pair, is_in, prefilled

from kvferry.schemas import OrderBody, TransferState

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("first", ["the order", "the reservation"])
async def test_all_lines_of_a_request_have_the_routers_ids(pair: Pair, request_id: str, first: str, rank: int) -> None:
    trace_id, name = secrets.token_hex(16), f"x-{secrets.token_hex(4)}"
    await prefilled(pair, request_id)
    body = OrderBody(request_id=request_id, source=pair.prefill.source())
    blocks = pair.decode.take(TOKENS)

    async def order() -> None:
        traceparent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
        await pair.routers[rank].order(body, traceparent=traceparent, x_request_id=name)

    async def reserve() -> None:
        await pair.decode.receive(request_id, blocks)

    async def waits() -> bool:
        return await is_in(pair.routers[0], request_id, TransferState.WAITING)  # which leads

    halves: list[Callable[[], Awaitable[None]]] = [order, reserve] if first == "the order" else [reserve, order]
    begun = asyncio.ensure_future(halves[0]())
    await until(waits, f"{first} comes first")
    await asyncio.gather(begun, halves[1]())

    ends = [(daemon, "transfer ended") for daemon in pair.decode.daemons]
    ends += [(daemon, "lease ended") for daemon in pair.prefill.daemons]
    for daemon, event in ends:
        (line,) = await logged(daemon, event, request_id)
        assert (line.get("x_request_id"), line.get("trace_id")) == (name, trace_id), daemon.name
