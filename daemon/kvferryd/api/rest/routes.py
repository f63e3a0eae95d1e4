"""The REST API's resources: paths, statuses, and their text in /openapi.json. `kvferryd.ferry` does the work."""

from __future__ import annotations

import json
import time
from collections.abc import Coroutine
from typing import Annotated, Any, Never, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import AfterValidator

from kvferry import schemas
from kvferry.asgi import unless, while_connected
from kvferry.errors import Malformed, Unavailable
from kvferryd.api.rest.openapi import problems
from kvferryd.ferry import Ferry
from kvferryd.observe import logs
from kvferryd.observe.history import DAY_S, MINUTE_S, SECONDS_S

T = TypeVar("T")
LONGEST_WAIT_S = 60.0
LIMIT, MOST = 100, 10_000
CURSOR = r"^([0-9a-f]{8}-\d{1,15})?$"

Limit = Annotated[int, Query(ge=1, le=MOST, description="at most so many, the newest")]

Wait = Annotated[
    float,
    Query(
        ge=0,
        allow_inf_nan=False,
        description=f"long poll: seconds to wait for the end, {LONGEST_WAIT_S:g} at most (more is taken as that)",
    ),
    AfterValidator(lambda wait_s: min(wait_s, LONGEST_WAIT_S)),
]
Name = Annotated[str, Query(min_length=1, max_length=256)]


async def _stopping(ferry: Ferry) -> Never:
    await ferry.closing.wait()
    raise Unavailable("draining", "the daemon stops", remedy="ask again once another serves")


async def waited_for(request: Request, ferry: Ferry, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection or the daemon stops; raises
    ClientDisconnect or KvferryError (`draining`) then."""
    return await while_connected(request.receive, unless(_stopping(ferry), work))


def transfers(ferry: Ferry) -> APIRouter:
    """/v1/transfers: order, look up, wait for, abort."""
    router = APIRouter(prefix="/v1/transfers", tags=["transfers"])
    same: dict[int | str, dict[str, Any]] = {
        200: {"model": schemas.Ordered, "description": "the same order was made before: this is its transfer"}
    }

    @router.post("", status_code=202, responses={**same, **problems(403, 404, 409, 413, 415, 429, 503)})
    async def order(
        response: Response,
        body: schemas.OrderBody,
        traceparent: Annotated[str, Header(description="W3C trace context, joined by the daemon's span")] = "",
    ) -> schemas.Ordered:
        """Order a transfer, at any rank of the engine. Idempotent with an `order_id`: the same order again answers 200
        with the same transfer, whatever has ended."""
        trace = logs.Trace(traceparent if logs.TRACEPARENT.fullmatch(traceparent) else "", logs.asked())
        with logs.bound(request_id=body.request_id):
            ordered, created = await ferry.order(body, trace)
        response.status_code = 202 if created else 200
        response.headers["location"] = f"/v1/transfers/{ordered.transfer_id}"
        return ordered

    @router.get("", responses=problems(), response_model=schemas.TransferList)
    async def several(
        request: Request,
        request_id: Name | None = None,
        state: schemas.TransferState | None = None,
        since: Annotated[
            str, Query(pattern=CURSOR, description="`cursor` of an answer before: only what may have changed since")
        ] = "",
        limit: Limit = LIMIT,
        wait: Wait = 0.0,
    ) -> Response:
        """The newest transfers that this daemon knows, the oldest of them first. With `request_id` and `wait`: waits
        until that request's transfer has come and ended."""
        if wait and request_id is None:
            why, remedy = "there is nothing to wait for", "name a request_id, or ask for one transfer by its id"
            raise Malformed("malformed_request", why, field="wait", value=wait, remedy=remedy)
        if wait and request_id is not None:
            await waited_for(request, ferry, ferry.wait_request(request_id, wait))
        records, cursor, whole = ferry.transfers(request_id, state, since, limit)
        rest = json.dumps({"cursor": cursor, "whole": whole, "now": time.time()}).encode()
        return Response(b'{"transfers":[' + b",".join(records) + b"]," + rest[1:], media_type="application/json")

    @router.get("/{transfer_id}", responses=problems(404))
    async def one(request: Request, transfer_id: str, wait: Wait = 0.0) -> schemas.TransferRecord:
        """A transfer as it is now, or with `wait` as it ended."""
        return await waited_for(request, ferry, ferry.transfer(transfer_id, wait))

    @router.get("/{transfer_id}/source", responses=problems(404))
    async def source(request: Request, transfer_id: str) -> schemas.SourceHalf:
        """The source's half, by its own clock: the daemons of its ranks are asked now, and what each says is bounded by
        `connect_timeout_s`. Ask the daemon whose transfer it is."""
        return await waited_for(request, ferry, ferry.source_half(transfer_id))

    @router.delete("/{transfer_id}", responses=problems(404))
    async def abort(transfer_id: str) -> schemas.TransferRecord:
        """Abort. A transfer that has ended stays as it ended, and the answer is the same however often asked."""
        return await ferry.transfer(transfer_id, abort=True)

    return router


def held(ferry: Ferry) -> APIRouter:
    """Routes to what the daemon holds: requests, leases, engines, peers."""
    router = APIRouter(prefix="/v1")

    @router.post("/requests/{request_id:path}/abort", tags=["requests"], responses=problems())
    async def abort(request_id: str) -> schemas.AbortResult:
        """Abort the request's transfer and revoke its lease, whichever are here. Idempotent."""
        return await ferry.abort_request(request_id)

    @router.get("/leases", tags=["leases"], responses=problems())
    async def leases(
        limit: Limit = LIMIT,
        ended: Annotated[int, Query(ge=0, le=4096, description="so many of those that ended last, too")] = 0,
    ) -> schemas.LeaseList:
        """The newest leases, with their readers and the time they have left."""
        return ferry.leases(limit, ended)

    @router.delete("/leases/{request_id:path}", tags=["leases"], responses=problems(404))
    async def revoke(request_id: str) -> schemas.LeaseRecord:
        """Revoke. Readers in the middle of a read fail at `verifying`. A lease that has ended stays as it ended."""
        return ferry.revoke_lease(request_id)

    @router.get("/engines", tags=["engines"], responses=problems())
    async def engines(
        manifests: Annotated[bool, Query(description="false: leave the manifests out, which may be large")] = True,
    ) -> schemas.EngineList:
        """Engine ranks beside this daemon: epochs, manifests, and what their operator should know."""
        return schemas.EngineList(engines=ferry.engines(manifests=manifests))

    @router.get("/peers", tags=["peers"])
    async def peers() -> schemas.PeerList:
        """Engine ranks elsewhere with which a handshake is done, how they fare, and those that read here."""
        return ferry.peers()

    @router.post("/peers", tags=["peers"], responses=problems(403, 404, 413, 415, 502, 503, 504))
    async def prewarm(request: Request, body: schemas.PeerRequest) -> schemas.PeerList:
        """Shake hands with every rank of an engine now, so that the first transfer need not.

        All ranks of the engine that will read do, whichever is asked; the answer is this one's. An error names the rank
        that could not.
        """
        return schemas.PeerList(peers=await waited_for(request, ferry, ferry.prewarm(body)))

    @router.delete("/peers", tags=["peers"], responses=problems(404))
    async def forget(engine_id: Name) -> schemas.PeerList:
        """Forget every rank of an engine. The answer lists what was forgotten."""
        return schemas.PeerList(peers=ferry.forget_peer(engine_id))

    @router.delete("/peers/{engine_id:path}", tags=["peers"], responses=problems(404))
    async def forget_by_path(engine_id: str) -> schemas.PeerList:
        """The same, with the engine in the path."""
        return schemas.PeerList(peers=ferry.forget_peer(engine_id))

    return router


def daemon(ferry: Ferry) -> APIRouter:
    """Drain, probes and metrics."""
    router = APIRouter(tags=["daemon"])
    not_yet: dict[int | str, dict[str, Any]] = {
        503: {"model": schemas.Readiness, "description": "not ready, with every reason"}
    }

    @router.get("/v1/drain")
    async def status() -> schemas.DrainStatus:
        """How far a drain is."""
        return ferry.drain_status()

    @router.post("/v1/drain", responses=problems(413, 415))
    async def drain(request: Request, body: schemas.DrainRequest | None = None) -> schemas.DrainStatus:
        """Take no new transfers; prefills under way may still publish.

        With `wait_s`, answers when nothing is left or that time has passed.

        A client that leaves ends the wait, not the drain.
        """
        return await waited_for(request, ferry, ferry.drain(body.wait_s if body else 0.0, _who(request)))

    @router.delete("/v1/drain", responses=problems(409))
    async def cancel(request: Request) -> schemas.DrainStatus:
        """Take new transfers again. Idempotent; too late once the daemon was told to stop."""
        return ferry.cancel_drain(_who(request))

    @router.get("/healthz")
    async def healthz() -> schemas.Health:
        """The process answers. Restart it when it does not."""
        return schemas.Health()

    @router.get("/readyz", responses=not_yet)
    async def readyz(response: Response) -> schemas.Readiness:
        """Whether to send work here, and every reason why not."""
        readiness = ferry.readiness()
        response.status_code = 200 if readiness.ready else 503
        return readiness

    @router.get("/v1/info")
    async def info() -> schemas.Info:
        """Version, addresses, device, and the transports in use."""
        return ferry.info()

    @router.get("/v1/totals")
    async def totals() -> schemas.Totals:
        """Totals held now and moved so far: a daemon's throughput is the difference of two answers."""
        return ferry.totals()

    @router.get("/v1/history", responses=problems(503))
    async def history(
        span_s: Annotated[int, Query(ge=SECONDS_S, le=DAY_S, description="how far back, in seconds")] = 3600,
        step_s: Annotated[
            int,
            Query(
                ge=SECONDS_S, le=3600, description="seconds of a point: 5 (of the last 300 s only), or a multiple of 60"
            ),
        ] = MINUTE_S,
        since: Annotated[
            float,
            Query(
                ge=0,
                lt=schemas.MAX_NUMBER,
                allow_inf_nan=False,
                description="nothing that has ended before, in seconds since 1970",
            ),
        ] = 0.0,
        peers: Annotated[bool, Query(description="figures of each peer over the span, too")] = False,
    ) -> schemas.History:
        """Figures of the last day by the minute, and marks of starts, deaths, upgrades and drains. Under a keeper, or
        with a state folder, those of daemons before this one too."""
        if step_s != SECONDS_S and step_s % MINUTE_S:
            remedy = "ask for 5, or a multiple of 60"
            raise Malformed("malformed_request", "no such step is kept", field="step_s", value=step_s, remedy=remedy)
        return await ferry.told(span_s, step_s, since, peers=peers)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def scrape(request: Request) -> Response:
        """Prometheus metrics, in the format that Accept asks for."""
        body, kind = ferry.scrape(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    return router


def _who(request: Request) -> str:
    """The caller, for the log: address and program, of which the second is its own word."""
    host = request.client.host if request.client else "an unknown address"
    return f"{host} ({request.headers.get('user-agent', 'unnamed')[:80]})"
