"""/v1/transfers: order, look up, wait for, abort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request, Response

from kvferry.errors import Malformed
from kvferry.schemas import OrderBody, Ordered, TransferList, TransferRecord, TransferState
from kvferryd import logs
from kvferryd.api.rest.gate import TRACEPARENT
from kvferryd.api.rest.openapi import ORDERS, problems
from kvferryd.api.rest.waiting import LONGEST_WAIT_S, Wait, while_connected

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry


def routes(ferry: Ferry) -> APIRouter:
    router = APIRouter(prefix="/v1/transfers", tags=["transfers"])
    same: dict[int | str, dict[str, Any]] = {
        200: {"model": Ordered, "description": "the same order was made before: this is its transfer"}
    }

    @router.post("", status_code=202, responses={**same, **problems(403, 404, 409, 413, 415, 429, 503)})
    async def order(
        response: Response,
        body: Annotated[OrderBody, Body(openapi_examples=ORDERS)],
        traceparent: Annotated[str, Header(description="W3C trace context, joined by the daemon's span")] = "",
    ) -> Ordered:
        """Order a transfer. Idempotent: the same order again answers 200 with the same transfer."""
        trace = traceparent if TRACEPARENT.fullmatch(traceparent) else ""
        with logs.bound(request_id=body.request_id):
            record, created = await ferry.order(body, trace)
        response.status_code = 202 if created else 200
        response.headers["location"] = f"/v1/transfers/{record.transfer_id}"
        return Ordered(transfer_id=record.transfer_id, state=record.state)

    @router.get("", responses=problems())
    async def several(
        request: Request,
        request_id: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
        state: TransferState | None = None,
        wait: Wait = 0.0,
    ) -> TransferList:
        """The transfers this daemon knows. With `request_id` and `wait`: waits until that request's transfer
        has come and ended."""
        if wait and request_id is None:
            raise Malformed(
                "malformed_request", "there is nothing to wait for", field="wait", value=wait,
                remedy="name a request_id, or ask for one transfer by its id",
            )  # fmt: skip
        if request_id is None or not wait:
            return TransferList(transfers=ferry.transfers(request_id, state))
        waited = await while_connected(request, ferry.wait_request(request_id, min(wait, LONGEST_WAIT_S)))
        return TransferList(transfers=[record for record in waited if state in (None, record.state)])

    @router.get("/{transfer_id}", responses=problems(404))
    async def one(request: Request, transfer_id: str, wait: Wait = 0.0) -> TransferRecord:
        """A transfer as it is now, or with `wait` as it ended."""
        if not wait:
            return ferry.transfer(transfer_id)
        return await while_connected(request, ferry.wait_transfer(transfer_id, min(wait, LONGEST_WAIT_S)))

    @router.delete("/{transfer_id}", responses=problems(404))
    async def abort(transfer_id: str) -> TransferRecord:
        """Abort. A transfer that has ended stays as it ended, and the answer is the same however often asked."""
        return await ferry.abort_transfer(transfer_id)

    return router
