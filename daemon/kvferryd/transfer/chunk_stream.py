"""The reader's end of one source rank's `Pack` stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2
from kvferryd.copy import Chunk
from kvferryd.peers.channels import asking
from kvferryd.peers.peers import PeerRank
from kvferryd.transport import Span


class ChunkStream:
    """Opened with the first `want`. `listen` must run beside everything else: it tells who waits."""

    def __init__(self, source: PeerRank, opening: peer_pb2.PackOpen, chunks: Sequence[Chunk], timeout_s: float) -> None:
        assert source.staging is not None
        self.chunks = chunks
        self.agent_name = source.agent_name
        self._source, self._staging, self._opening = source, source.staging, opening
        self._timeout_s = timeout_s
        self._call: grpc.aio.StreamStreamCall[peer_pb2.PackRequest, peer_pb2.Packed] | None = None
        self._opened = asyncio.Event()
        self._writing = asyncio.Lock()
        self._unread = len(chunks)
        self._over = asyncio.Event()
        self._why: KvferryError | None = None
        loop = asyncio.get_running_loop()
        self._packed: list[asyncio.Future[peer_pb2.Packed]] = [loop.create_future() for _ in chunks]

    @property
    def span(self) -> Span:
        """The source's arena."""
        return self._staging.span

    async def want(self, index: int) -> peer_pb2.Packed:
        """Ask for a chunk that there is a slot for, and wait until it is packed. The caller bounds the wait."""
        await self._say(peer_pb2.PackRequest(want=[index]))
        return await self._packed[index]

    async def was_read(self, index: int) -> None:
        """The source may have its slot back. After the last one it says whether all was well: see `listen`."""
        await self._say(peer_pb2.PackRequest(read=[index]))

    async def listen(self) -> None:
        """Until the source has ended the stream. Raises KvferryError when that was early or not in peace."""
        try:
            await self._opened.wait()
            assert self._call is not None
            async with asking(self._source.address):
                async for packed in self._call:
                    self._hear(packed)
            if not all(future.done() for future in self._packed):
                raise self._broken("ended the stream early")
        except KvferryError as error:
            self._why = error
            raise
        finally:
            self._over.set()

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _say(self, request: peer_pb2.PackRequest) -> None:
        async with self._writing:  # gRPC takes one message at a time
            if self._call is None:
                request.open.CopyFrom(self._opening)
                async with asking(self._source.address):
                    self._call = self._source.stub.Pack(timeout=self._timeout_s)
                self._opened.set()
            try:
                await self._call.write(request)
                self._unread -= len(request.read)
                if not self._unread:
                    await self._call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._over.wait()  # `listen` hears why
                raise self._why or self._broken("ended the stream early") from None

    def _hear(self, packed: peer_pb2.Packed) -> None:
        if packed.chunk >= len(self.chunks) or self._packed[packed.chunk].done():
            raise self._broken(f"packed chunk {packed.chunk}, which is not awaited")
        inside = packed.address - self.span.address
        if packed.nbytes != self.chunks[packed.chunk].nbytes or not 0 <= inside <= self.span.nbytes - packed.nbytes:
            raise self._broken(
                f"packed {packed.nbytes} bytes of chunk {packed.chunk} outside its arena or cut otherwise"
            )
        self._packed[packed.chunk].set_result(packed)

    def _broken(self, why: str) -> KvferryError:
        return KvferryError("protocol", f"peer {self._source.address} {why}", field="pack")
