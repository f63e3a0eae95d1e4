"""/v1/peers: handshakes made, made now, forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Query, Request

from kvferry.schemas import PeerList, PeerRequest
from kvferryd.api.rest.openapi import PREWARM, problems
from kvferryd.api.rest.waiting import while_connected

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry


def routes(ferry: Ferry) -> APIRouter:
    router = APIRouter(prefix="/v1/peers", tags=["peers"])

    @router.get("")
    async def several() -> PeerList:
        """Engine ranks elsewhere with which a handshake is done."""
        return PeerList(peers=ferry.peers())

    @router.post("", responses=problems(403, 404, 413, 415, 502, 503, 504))
    async def prewarm(request: Request, body: Annotated[PeerRequest, Body(openapi_examples=PREWARM)]) -> PeerList:
        """Shake hands with every rank of an engine now, so that the first transfer need not."""
        return PeerList(peers=await while_connected(request, ferry.prewarm(body)))

    @router.delete("", responses=problems(404))
    async def forget(engine_id: Annotated[str, Query(min_length=1, max_length=256)]) -> PeerList:
        """Forget every rank of an engine. The answer lists what was forgotten."""
        return PeerList(peers=await ferry.forget_peer(engine_id))

    @router.delete("/{engine_id:path}", responses=problems(404))
    async def forget_by_path(engine_id: str) -> PeerList:
        """The same, with the engine in the path."""
        return PeerList(peers=await ferry.forget_peer(engine_id))

    return router
