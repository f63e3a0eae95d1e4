"""/v1/requests: end everything that is held for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

from kvferry.schemas import AbortResult
from kvferryd.api.rest.openapi import problems

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry


def routes(ferry: Ferry) -> APIRouter:
    router = APIRouter(prefix="/v1/requests", tags=["requests"])

    @router.post("/{request_id:path}/abort", responses=problems())
    async def abort(request_id: str) -> AbortResult:
        """Abort the request's transfer and revoke its lease, whichever are here. Idempotent."""
        return await ferry.abort_request(request_id)

    return router
