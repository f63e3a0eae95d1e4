"""/v1/leases: what others may read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

from kvferry.schemas import LeaseList, LeaseRecord
from kvferryd.api.rest.openapi import problems

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry


def routes(ferry: Ferry) -> APIRouter:
    router = APIRouter(prefix="/v1/leases", tags=["leases"])

    @router.get("")
    async def several() -> LeaseList:
        """Leases, with their readers and the time they have left."""
        return LeaseList(leases=ferry.leases())

    @router.delete("/{request_id:path}", responses=problems(404))
    async def revoke(request_id: str) -> LeaseRecord:
        """Revoke. Readers in the middle of a read fail at `verifying`. A lease that has ended stays as it ended."""
        return await ferry.revoke_lease(request_id)

    return router
