"""The reader's end of one source rank's `Pack` stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import grpc

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2
from kvferryd.copy import Chunk
from kvferryd.peers.channels import asking
from kvferryd.peers.peers import PeerRank
from kvferryd.transfer.together import together
from kvferryd.transport import Span

Call = grpc.aio.StreamStreamCall[peer_pb2.PackRequest, peer_pb2.Packed]


async def start(source: PeerRank, timeout_s: float) -> Call:
    """Call the source; it is on its way when this returns. Raises KvferryError."""
    async with asking(source.address):
        call: Call = source.stub.Pack(timeout=timeout_s)
        await asyncio.sleep(0)  # let gRPC send it
        return call


class ChunkStream:
    """A call that `start` makes, so that it reaches the source while the transfer is cut. `watch` must run beside
    everything else, and `end` or `close` must follow.

    What is wanted and read at one time goes out in one message, and nobody waits until it has gone. The first has the
    opening.
    """

    def __init__(self, source: PeerRank, call: Call, opening: peer_pb2.PackOpen, chunks: Sequence[Chunk]) -> None:
        assert source.staging is not None
        self.chunks = chunks
        self.agent_name = source.agent_name
        self._source, self._staging, self._call = source, source.staging, call
        self._next = peer_pb2.PackRequest(open=opening)
        self._something = asyncio.Event()
        self._unread = len(chunks)
        loop = asyncio.get_running_loop()
        self._packed: list[asyncio.Future[peer_pb2.Packed]] = [loop.create_future() for _ in chunks]
        self._wanted_at = [0.0] * len(chunks)
        self._to_read, self._in_time = len(chunks), True
        self._all_read: asyncio.Future[None] = loop.create_future()
        self._running: asyncio.Task[None] | None = None

    @property
    def span(self) -> Span:
        """The source's arena."""
        return self._staging.span

    def want(self, index: int) -> asyncio.Future[peer_pb2.Packed]:
        """Ask for a chunk: there is a slot for it, or will be when a copy has ended. Done when it is packed."""
        self._wanted_at[index] = asyncio.get_running_loop().time()
        self._next.want.append(index)
        self._something.set()
        return self._packed[index]

    def was_read(self, index: int) -> None:
        """The source may have its slot back."""
        took_s = asyncio.get_running_loop().time() - self._wanted_at[index]
        self._in_time = self._in_time and 1e3 * took_s < self._packed[index].result().kept_ms
        self._to_read -= 1
        if not self._to_read:
            self._all_read.set_result(None)
        self._next.read.append(index)
        self._something.set()

    async def watch(self) -> None:
        """Until it is certain that all chunks are what was packed while the lease held.

        That is when the last is read, if every one was read while the source keeps it in any case (kept_ms counts from
        later than the asking); otherwise when the source has ended the stream in peace. Raises KvferryError.
        """
        running = self._running = asyncio.create_task(self._run())
        await asyncio.wait([running, self._all_read], return_when=asyncio.FIRST_COMPLETED)
        if running.done() or not self._in_time:
            await running

    async def end(self) -> None:
        """Until the source knows that all is read. What goes wrong now is its own to clean up."""
        if self._running is not None:
            with contextlib.suppress(KvferryError):
                await self._running

    async def close(self) -> None:
        """Give up."""
        self._call.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        """Until the source has ended the stream. Raises KvferryError when that was early or not in peace."""
        async with asking(self._source.address):
            try:
                await together([self._speak(), self._listen()])
            finally:
                self._call.cancel()

    async def _speak(self) -> None:
        try:
            while self._unread:
                await self._something.wait()
                self._something.clear()
                request, self._next = self._next, peer_pb2.PackRequest()
                self._unread -= len(request.read)
                await self._call.write(request)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # `_listen` hears why

    async def _listen(self) -> None:
        async for packed in self._call:
            self._hear(packed)
        if self._unread:
            raise self._broken("ended the stream early")

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
