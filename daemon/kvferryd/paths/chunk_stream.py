"""The reader's end of one gather: chunks of one source rank, over the stream on which its lease is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvferry.errors import Conflict, KvferryError
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_from_proto
from kvferryd.copy import Chunk
from kvferryd.transport import Span

if TYPE_CHECKING:
    from kvferryd.transfers.source import SourceReader


class ChunkStream:
    """Everything that is wanted and read by the time a message can be sent goes out in that message; callers do not
    wait for it. The first message has the opening. After the last chunk has been read, await `vouched`.
    """

    def __init__(self, reader: SourceReader, opening: peer_pb2.PackOpen, chunks: Sequence[Chunk]) -> None:
        """Raises KvferryError when the stream to the source is over."""
        source = reader.source
        assert source.staging is not None
        self.chunks, self.agent_name = chunks, source.agent_name
        self.span: Span = source.staging.span
        """The source's arena."""
        self._reader, self._address = reader, source.address
        self._loop = asyncio.get_running_loop()
        self._packed: list[asyncio.Future[peer_pb2.Packed]] = [self._loop.create_future() for _ in chunks]
        self._wanted_at = [0.0] * len(chunks)
        self._in_time = True
        self._vouched: asyncio.Future[None] = self._loop.create_future()
        self._number = reader.gather(self, opening)
        self._pending = peer_pb2.Pack(reading=reader.number, packing=self._number, open=opening)
        self._queued = False

    def want(self, index: int) -> asyncio.Future[peer_pb2.Packed]:
        """Ask for a chunk: there is a slot for it, or will be when a copy has ended. Done when it is packed."""
        self._wanted_at[index] = self._loop.time()
        self._pending.want.append(index)
        self._queue()
        return self._packed[index]

    def was_read(self, index: int) -> None:
        """The source may have its slot back."""
        took_s = self._loop.time() - self._wanted_at[index]
        self._in_time = self._in_time and 1e3 * took_s < self._packed[index].result().kept_ms
        self._pending.read.append(index)
        self._queue()

    async def vouched(self) -> None:
        """Returns when all chunks are proven to be what was packed while the lease held.

        At once if every chunk was read while the source keeps it unasked (kept_ms counts from later than the request);
        otherwise when the source has confirmed it. Raises KvferryError.
        """
        if not self._in_time:
            self._pending.vouch = True
            self._queue()
            await self._vouched

    def take(self) -> peer_pb2.ReadRequest:
        taken, self._pending = self._pending, peer_pb2.Pack(reading=self._reader.number, packing=self._number)
        self._queued = False
        return peer_pb2.ReadRequest(pack=taken)

    def on_reply(self, reply: peer_pb2.PackReply) -> None:
        if reply.packing != self._number:
            return  # of a gather that was given up
        for packed in reply.packed:
            self._on_packed(packed)
        if reply.vouched and not self._vouched.done():
            self._vouched.set_result(None)
        if reply.HasField("problem"):
            self.fail(problem_from_proto(reply.problem))

    def fail(self, why: KvferryError) -> None:
        futures: list[asyncio.Future[Any]] = [*self._packed, self._vouched]
        for future in futures:
            if not future.done():
                future.set_exception(why)
                future.exception()  # retrieved: nobody may be waiting

    def _on_packed(self, packed: peer_pb2.Packed) -> None:
        index, inside = packed.chunk, packed.address - self.span.address
        if index >= len(self.chunks) or not self._wanted_at[index] or self._packed[index].done():
            self.fail(self._broken(f"packed chunk {index}, which is not awaited"))
        elif packed.nbytes != self.chunks[index].nbytes or not 0 <= inside <= self.span.nbytes - packed.nbytes:
            self.fail(self._broken(f"packed {packed.nbytes} bytes of chunk {index} outside its arena or cut otherwise"))
        else:
            self._packed[index].set_result(packed)

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            self._reader.send(self)

    def _broken(self, why: str) -> KvferryError:
        return Conflict("protocol", f"peer {self._address} {why}", field="pack")
