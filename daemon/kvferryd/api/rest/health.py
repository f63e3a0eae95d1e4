"""/healthz, /readyz, /metrics and /v1/info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from kvferry.schemas import Health, Info, Readiness

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry
    from kvferryd.metrics import Metrics


def routes(ferry: Ferry, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["daemon"])
    not_yet: dict[int | str, dict[str, Any]] = {
        503: {"model": Readiness, "description": "not ready, with every reason"}
    }

    @router.get("/healthz")
    async def healthz() -> Health:
        """The process answers. Restart it when it does not."""
        return Health()

    @router.get("/readyz", responses=not_yet)
    async def readyz(response: Response) -> Readiness:
        """Whether to send work here, and every reason why not."""
        readiness = ferry.readiness()
        response.status_code = 200 if readiness.ready else 503
        return readiness

    @router.get("/v1/info")
    async def info() -> Info:
        """Version, addresses, device, and the transports in use."""
        return ferry.info()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def scrape(request: Request) -> Response:
        """Prometheus metrics, in the format that Accept asks for."""
        ready = ferry.readiness().ready
        body, kind = metrics.exposition(ferry.stats(), ready=ready, accept=request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    return router
