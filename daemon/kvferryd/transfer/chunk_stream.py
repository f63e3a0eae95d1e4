"""The reader's end of one packing: chunks of one source rank, over the stream on which its lease is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_from_proto
from kvferryd.copy import Chunk
from kvferryd.peers.peer import PeerRank
from kvferryd.transfer.view import LeaseView
from kvferryd.transport import Span


class ChunkStream:
    """What is wanted and read by the time a message can be sent goes out in it; nobody waits until it has gone. The
    first has the opening. When the last chunk has been read, `vouched` must follow.
    """

    def __init__(self, view: LeaseView, opening: peer_pb2.PackOpen, chunks: Sequence[Chunk]) -> None:
        """Raises KvferryError when the stream to the source is over."""
        source: PeerRank = view.source
        assert source.staging is not None
        self.chunks, self.agent_name = chunks, source.agent_name
        self.span: Span = source.staging.span
        """The source's arena."""
        self._address, self._view = source.address, view
        self._loop = asyncio.get_running_loop()
        self._packed: list[asyncio.Future[peer_pb2.Packed]] = [self._loop.create_future() for _ in chunks]
        self._wanted_at = [0.0] * len(chunks)
        self._in_time = True
        self._vouched: asyncio.Future[None] = self._loop.create_future()
        self._reading = view.packing(opening)
        self._number = self._reading.pack(self)
        self._next = peer_pb2.Pack(reading=self._reading.number, packing=self._number, open=opening)
        self._told = False

    def want(self, index: int) -> asyncio.Future[peer_pb2.Packed]:
        """Ask for a chunk: there is a slot for it, or will be when a copy has ended. Done when it is packed."""
        self._wanted_at[index] = self._loop.time()
        self._next.want.append(index)
        self._tell()
        return self._packed[index]

    def was_read(self, index: int) -> None:
        """The source may have its slot back."""
        took_s = self._loop.time() - self._wanted_at[index]
        self._in_time = self._in_time and 1e3 * took_s < self._packed[index].result().kept_ms
        self._next.read.append(index)
        self._tell()

    async def vouched(self) -> None:
        """Until it is certain that all chunks are what was packed while the lease held.

        That is when the last is read, if every one was read while the source keeps it in any case (kept_ms counts from
        later than the asking); otherwise when the source has vouched for it. Raises KvferryError.
        """
        if not self._in_time:
            self._next.vouch = True
            self._tell()
            await self._vouched

    def take(self) -> peer_pb2.Pack:
        said, self._next = self._next, peer_pb2.Pack(reading=self._reading.number, packing=self._number)
        self._told = False
        return said

    def hear(self, reply: peer_pb2.PackReply) -> None:
        if reply.packing != self._number:
            return  # of one that was given up
        self._view.agreed()
        for packed in reply.packed:
            self._hear(packed)
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

    def _hear(self, packed: peer_pb2.Packed) -> None:
        index, inside = packed.chunk, packed.address - self.span.address
        if index >= len(self.chunks) or not self._wanted_at[index] or self._packed[index].done():
            self.fail(self._broken(f"packed chunk {index}, which is not awaited"))
        elif packed.nbytes != self.chunks[index].nbytes or not 0 <= inside <= self.span.nbytes - packed.nbytes:
            self.fail(self._broken(f"packed {packed.nbytes} bytes of chunk {index} outside its arena or cut otherwise"))
        else:
            self._packed[index].set_result(packed)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._reading.tell(self)

    def _broken(self, why: str) -> KvferryError:
        return KvferryError("protocol", f"peer {self._address} {why}", field="pack")
