"""The messages between the ranks of one engine."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvferry.errors import Conflict
from kvferry.protocol.leader_events import End
from kvferry.schemas import Awaited, ErrorBody, RankTransfer, TransferState, Wait
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import problem_from_proto, tables_to_proto
from kvferryd.engine import Engine
from kvferryd.paths.move import MOST
from kvferryd.transfers.order import Reservation, attempt_to_proto
from kvferryd.transfers.transfer import Transfer

B = TypeVar("B", bound=BaseModel)


def abort_request(engine: Engine, end: End) -> peer_pb2.AbortRequest:
    return peer_pb2.AbortRequest(
        engine_id=engine.engine_id, request_id=end.request_id, reason=f"rank {engine.rank}: {end.code}",
        attempt=attempt_to_proto(end.attempt), failed=end.failed, key=engine.roster.key,
    )  # fmt: skip


def said(body: type[B], json: bytes) -> B:
    """The answer of rank 0. Raises KvferryError (`protocol`)."""
    try:
        return body.model_validate_json(json)
    except ValidationError as error:
        why = f"rank 0 answered with what is no {body.__name__}: {error.error_count()} fields"
        raise Conflict("protocol", why, field="order", remedy="run one version of kvferry on all ranks") from None


def order_request(transfer: Transfer, engine: Engine, brought: object | None, leader: str) -> peer_pb2.OrderRequest:
    """brought: the reservation of the rank that is asked, where the router's order has brought it."""
    order = transfer.order
    assert order is not None
    left_s = transfer.deadline - asyncio.get_running_loop().time()
    request = peer_pb2.OrderRequest(
        engine_id=engine.engine_id,
        request_id=transfer.request_id,
        priority=order.priority,
        source=engine_pb2.Source(
            engine_id=order.engine_id, address=order.address, epoch=order.epoch, lease=order.lease
        ),
        deadline_s=max(1e-3, left_s),
        ordered_s=transfer.ordered_s,
        traceparent=order.trace.traceparent,
        x_request_id=order.trace.x_request_id,
        attempt=attempt_to_proto(transfer.attempt),
        way=order.way,
        key=engine.roster.key,
        leader=leader,
    )
    if isinstance(brought, Reservation):
        request.tables.CopyFrom(tables_to_proto(brought.tables))
        if brought.tokens is not None:
            start, stop = brought.tokens
            request.tokens.CopyFrom(layout_pb2.TokenRange(start=start, stop=stop))
    return request


def rank_transfer(reply: peer_pb2.RankTransfer, rank: int, address: str) -> RankTransfer:
    if reply.state not in {state.value for state in TransferState} or reply.rank != rank:
        why = f"peer {address} answered with state {reply.state} of rank {reply.rank}"
        raise Conflict("protocol", why, field="state", value=reply.state)
    phases_ms = dict(reply.phases_ms)
    moving_ms = phases_ms.get("moving", 0.0)
    return RankTransfer(
        rank=reply.rank,
        state=TransferState(reply.state),
        bytes=reply.nbytes,
        descriptors=reply.descriptors,
        path=reply.path,
        transport=reply.transport,
        phases_ms=phases_ms,
        bytes_per_s=round(1e3 * reply.nbytes / moving_ms) if moving_ms > 0 else 0.0,
        waits_for=Awaited(reply.waits_for) if reply.waits_for in set(Awaited) else None,
        waits=[
            Wait(what=Awaited(wait.what), on=wait.on, part=wait.part, began_at=wait.began_at, ms=wait.ms)
            for wait in reply.waits[:MOST]
            if wait.what in set(Awaited)
        ],
        error=ErrorBody.of(problem_from_proto(reply.problem)) if reply.HasField("problem") else None,
    )
