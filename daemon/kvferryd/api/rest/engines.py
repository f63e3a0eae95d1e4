"""/v1/engines: which engines are here, and how their caches are laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

from kvferry.schemas import EngineList

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry


def routes(ferry: Ferry) -> APIRouter:
    router = APIRouter(prefix="/v1/engines", tags=["engines"])

    @router.get("")
    async def several() -> EngineList:
        """Engine ranks beside this daemon: epochs, manifests, and what their operator should know."""
        return EngineList(engines=ferry.engines())

    return router
