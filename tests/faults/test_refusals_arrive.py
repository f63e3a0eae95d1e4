"""A stream that is refused says why, also to a reader that is writing at that moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from fleet import TIMEOUT_S, Daemons, peer_stub

from kvferry.engine import EngineClient
from kvferry.errors import Unavailable
from kvferry.rpc import error_of
from kvferry.v1 import engine_pb2_grpc, peer_pb2, peer_pb2_grpc
from kvferry.wire import problem_from_proto

pytestmark = pytest.mark.anyio
OPENING = peer_pb2.ReadOpening(
    engine_id="nobody", epoch="1", reader=peer_pb2.Reader(engine_id="by hand", epoch="1", rank=0, world_size=1)
)


async def test_a_reader_that_writes_while_it_is_refused_learns_why(daemons: Daemons) -> None:
    """grpc.aio sets the status of a call to INTERNAL when a write fails, and so loses what the other side said as it
    ended the stream. A refusal must therefore be a message, or come after the last write."""
    (daemon,) = await daemons.start("refusing")
    async with peer_stub(daemon) as stub:
        codes = [await refused_while_writing(stub) for _ in range(20)]
    assert set(codes) == {"unknown_engine"}


async def refused_while_writing(stub: peer_pb2_grpc.PeerAsyncStub) -> str:
    call = stub.Read()

    async def write() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has been ended
            await call.write(peer_pb2.ReadRequest(opening=OPENING))
            for reading in range(1, 200):
                await call.write(peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=reading, request_id="r")))

    writing = asyncio.create_task(write())
    try:
        reply = await asyncio.wait_for(call.read(), TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error_of(error, "the daemon").code
    finally:
        await asyncio.wait([writing], timeout=TIMEOUT_S)
        call.cancel()
    return problem_from_proto(reply.problem).code if isinstance(reply, peer_pb2.ReadReply) else "an end without a word"


class Breaks(engine_pb2_grpc.EngineServicer):
    """A daemon whose connection breaks as its engine attaches: so gRPC has it."""

    async def Attach(self, requests: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:  # type: ignore[override, type-arg]
        await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
        yield


async def test_an_engine_whose_session_breaks_as_it_begins_is_told_that_its_daemon_is_not_there(tmp_path: Path) -> None:
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(Breaks(), server)
    server.add_insecure_port(f"unix:{tmp_path}/engine.sock")
    await server.start()
    with pytest.raises(Unavailable) as told:
        await EngineClient.connect(f"{tmp_path}/engine.sock", engine_id="e", epoch="1")
    assert told.value.code == "unreachable"
    await server.stop(0)
