"""/v1/drain: take no more work, and wait for what is here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Request

from kvferry.schemas import DrainRequest, DrainStatus
from kvferryd.api.rest.openapi import DRAIN, problems
from kvferryd.api.rest.waiting import while_connected

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry


def routes(ferry: Ferry) -> APIRouter:
    router = APIRouter(prefix="/v1/drain", tags=["daemon"])

    @router.get("")
    async def status() -> DrainStatus:
        """How far a drain is."""
        return ferry.drain_status()

    @router.post("", responses=problems(413, 415))
    async def drain(
        request: Request, body: Annotated[DrainRequest | None, Body(openapi_examples=DRAIN)] = None
    ) -> DrainStatus:
        """Take no new transfers; prefills under way may still publish.

        With `wait_s`, answers when nothing is left or that time has passed.

        A client that leaves ends the wait, not the drain.
        """
        return await while_connected(request, ferry.drain(body.wait_s if body else 0.0))

    return router
