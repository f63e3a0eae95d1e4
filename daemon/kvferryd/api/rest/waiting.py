"""Long polls: how long one may be, and how it ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, TypeVar

from fastapi import Query, Request, Response

T = TypeVar("T")
LONGEST_WAIT_S = 60.0
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; seen in our own log only."""

Wait = Annotated[
    float,
    Query(
        ge=0,
        allow_inf_nan=False,
        description=f"long poll: seconds to wait for the end, {LONGEST_WAIT_S:g} at most (more is taken as that)",
    ),
]


class ClientGone(Exception):
    """The client closed the connection while its answer was being waited for."""


async def nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def while_connected(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection; raises ClientGone then."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
