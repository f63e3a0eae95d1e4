"""Finds of fuzzing, each with the very input that found it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest
from fleet import SPOKEN, peer_stub, serving
from hostile import Hostile
from raw import raw_engine, streamed
from target import Target
from test_hostile_sources import Impostor

from kvferry.engine import TransferFailed
from kvferry.rpc import error_of
from kvferry.v1 import engine_pb2, layout_pb2, peer_pb2
from kvferry.wire import tables_to_proto
from support import refused

pytestmark = pytest.mark.anyio
METHODS = [("Engine", "Attach"), ("Engine", "End"), ("Peer", "Handshake"), ("Peer", "Map"), ("Peer", "Read")]
"""A method of each kind of call."""


@pytest.mark.parametrize(("service", "method"), METHODS)
async def test_bytes_that_are_no_message_are_refused_by_name(attacked: Target, service: str, method: str) -> None:
    """UNKNOWN or INTERNAL, and a traceback in the log for anybody who sent two bytes."""
    where = f"unix:{attacked.daemon.socket}" if service == "Engine" else attacked.daemon.peer
    with grpc.insecure_channel(where) as door, pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(streamed, door, service, method, layout_pb2.Problem, [b"\xff\xff"], 1)
    assert error_of(caught.value, "it").code == "malformed_message"  # type: ignore[arg-type]


class Nameless(Impostor):
    """Everything is right, but that it gives up with a problem that has no code."""

    problem = layout_pb2.Problem()

    async def Read(
        self, requests: AsyncIterator[peer_pb2.ReadRequest], context: object
    ) -> AsyncIterator[peer_pb2.ReadReply]:
        async for request in requests:
            if request.HasField("open"):
                yield peer_pb2.ReadReply(reading=request.open.reading, problem=self.problem)


@pytest.mark.parametrize("kind", [layout_pb2.PROBLEM_KIND_UNSPECIFIED, layout_pb2.PROBLEM_KIND_CONFLICT, 77])
async def test_a_peer_that_gives_up_without_a_reason_is_no_fault_of_ours(attacked: Target, kind: int) -> None:
    """It was reported as `internal`, with status 500 over REST."""
    service = Nameless(attacked, Hostile(random.Random(1)))
    service.honest, service.problem = 1.0, layout_pb2.Problem(kind=kind)  # type: ignore[arg-type]
    async with peer_stub(attacked.friend.daemons[0]) as stub, serving(service) as address:
        asked = peer_pb2.HandshakeRequest(**SPOKEN, engine_id=attacked.friend.engine_id)
        service.said = await stub.Handshake(asked)
        service.said.members[0].address = address
        await attacked.router.forget_peer(attacked.friend.engine_id)
        source = attacked.friend.source().model_copy(update={"address": address})
        client = attacked.engine.ranks[0].client
        with refused("peer_failed", TransferFailed):
            await client.receive("nameless", attacked.engine.take(20).tables(), (0, 20), source=source, way="direct")
        attacked.loaded += 1
        await attacked.router.forget_peer(attacked.friend.engine_id)


async def test_a_source_without_a_name_is_refused(attacked: Target) -> None:
    """It was taken, and then GET /v1/transfers answered 500 for as long as its record was kept."""
    async with raw_engine(attacked) as raw:
        tables = tables_to_proto(attacked.engine.take(20).tables())
        for engine_id, epoch in (("", ""), ("x" * 257, ""), (attacked.friend.engine_id, "x" * 257)):
            source = engine_pb2.Source(engine_id=engine_id, address=attacked.friend.address, epoch=epoch)
            received = engine_pb2.ReceiveRequest(request_id="unnamed", tables=tables, source=source, attempt=1)
            await raw.say(engine_pb2.Command(receive=received))
        await raw.all_answered()
    assert attacked.said["malformed_source"] == 3
    await attacked.router.transfers()
