"""What a source announces is kept until it is read, and takes no more memory than there is for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from kvferry.rpc import PEER_OPTIONS
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferryd.leases.lease import announced_as
from kvferryd.peers.contact import Contact
from kvferryd.peers.reader_stream import ANNOUNCED_NBYTES, LEAST_NBYTES, ReaderStream

pytestmark = pytest.mark.anyio
LARGE = 64 << 10


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Source(peer_pb2_grpc.PeerServicer):
    """Announces leases of so many bytes, and ends the stream."""

    def __init__(self, nbytes: list[int]) -> None:
        self.nbytes = nbytes

    async def Read(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[peer_pb2.ReadReply]:
        for n, nbytes in enumerate(self.nbytes):
            update = peer_pb2.LeaseUpdate(num_tokens=n, metadata=bytes(nbytes))
            yield peer_pb2.ReadReply(announced=peer_pb2.Announcement(request_id=announced_as(f"r{n}"), update=update))


@pytest.mark.parametrize(
    ("announced", "kept"),
    [
        pytest.param([8] * 2000, range(2000 - ANNOUNCED_NBYTES // LEAST_NBYTES, 2000), id="many"),
        pytest.param([LARGE] * 100, range(100 - ANNOUNCED_NBYTES // (LARGE + 100), 100), id="large"),
        pytest.param([8, ANNOUNCED_NBYTES, 8], [0, 2], id="one that is too large"),
    ],
)
async def test_the_newest_are_kept(announced: list[int], kept: Iterator[int]) -> None:
    server = grpc.aio.server(options=PEER_OPTIONS)
    peer_pb2_grpc.add_PeerServicer_to_server(Source(announced), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address, options=PEER_OPTIONS) as channel:
        stub: peer_pb2_grpc.PeerAsyncStub = peer_pb2_grpc.PeerStub(channel)
        stream = ReaderStream(stub, Contact(address), peer_pb2.ReadOpening(), several=False)
        async with asyncio.timeout(60):
            await stream._reading
        assert [n for n in range(len(announced)) if stream.announced(f"r{n}") is not None] == list(kept)
    await server.stop(0)
