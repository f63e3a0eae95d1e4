"""The chunks that a source gathers of one lease, as they are read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvferry.errors import Conflict, Internal, KvferryError
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_from_proto
from kvferryd.aio import Tasks
from kvferryd.copy import Chunk
from kvferryd.observe import logs
from kvferryd.paths.source import SourceReader
from kvferryd.peers.contact import of_peer

log = logs.get(__name__)


class ChunkStream:
    """The chunks of one gather, over the stream on which the lease is read.

    Everything that is wanted and read by the time a message can be sent goes out in that message; callers do not wait
    for it. The first message has the opening. After the last chunk has been read, await `vouched`. A source that has
    forgotten the pairing has packed nothing: the stream pairs anew by itself and wants the same again, each time.
    """

    def __init__(
        self, reader: SourceReader, opening: peer_pb2.PackOpen, chunks: Sequence[Chunk],
        pair: Callable[[str], Coroutine[None, None, str]],
    ) -> None:  # fmt: skip
        """pair: gives another pairing for one that was forgotten. Raises KvferryError when the reading is over."""
        assert reader.source.staging is not None
        self.source, self.chunks = reader.source, chunks
        self.problem: KvferryError | None = None
        """Why not all of them have come, or are not proven."""
        self.span = reader.source.staging.span
        """The source's arena."""
        create_future = asyncio.get_running_loop().create_future
        self._packed: list[asyncio.Future[peer_pb2.Packed]] = [create_future() for _ in chunks]
        self._wanted_at = [0.0] * len(chunks)
        self._in_time = True
        self._vouched: asyncio.Future[None] = create_future()
        self._reader, self._opening, self._pair = reader, opening, pair
        self._pairing = Tasks()
        """Pairs anew, or has; a gather that has begun since may find that forgotten as well."""
        self._begin()

    def _begin(self) -> None:
        """A gather of all chunks; the first ones are asked for."""
        self._number, self._stream = self._reader.gather(self, self._opening)
        self._pending = self._message(
            open=self._opening, want=[at for at, since in enumerate(self._wanted_at) if since]
        )

    def _message(self, **more: Any) -> peer_pb2.Pack:
        return peer_pb2.Pack(reading=self._reader.number, packing=self._number, **more)

    def want(self, index: int) -> asyncio.Future[peer_pb2.Packed]:
        """Ask for a chunk. The caller has a slot for it, or will have one when a copy has ended. Done when packed."""
        self._wanted_at[index] = time.clock_gettime(time.CLOCK_BOOTTIME)  # the loop's stands still with the machine
        self._pending.want.append(index)
        self._queue()
        return self._packed[index]

    def was_read(self, index: int) -> None:
        """The source may have its slot back."""
        took_s = time.clock_gettime(time.CLOCK_BOOTTIME) - self._wanted_at[index]
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
            try:
                await self._vouched
            except KvferryError as why:
                self.problem = why
                raise

    def _queue(self) -> None:
        self._stream.ask(self._take)

    def _take(self) -> peer_pb2.ReadRequest:
        taken, self._pending = self._pending, self._message()
        return peer_pb2.ReadRequest(pack=taken)

    def on_reply(self, reply: peer_pb2.PackReply) -> None:
        if reply.packing != self._number:
            return  # a gather that was given up
        for packed in reply.packed:
            index, inside = packed.chunk, packed.address - self.span.address
            if index >= len(self.chunks) or not self._wanted_at[index] or self._packed[index].done():
                self._fail_broken(f"packed chunk {index}, which is not awaited")
            elif packed.nbytes != self.chunks[index].nbytes or not 0 <= inside <= self.span.nbytes - packed.nbytes:
                self._fail_broken(f"packed {packed.nbytes} bytes of chunk {index} outside its arena or cut otherwise")
            else:
                self._packed[index].set_result(packed)
        if reply.vouched and not self._vouched.done():
            self._vouched.set_result(None)
        if reply.HasField("problem"):
            why = of_peer(problem_from_proto(reply.problem))
            if why.code == "unknown_pairing":
                self._pairing.spawn(self._pair_anew())
            else:
                self.fail(why)

    async def _pair_anew(self) -> None:
        try:
            self._opening.pairing = await self._pair(self._opening.pairing)
            self._opening.ClearField("request_id")  # the lease is open by now
            self._begin()
            self._queue()
        except KvferryError as why:
            self.fail(why)
        except Exception as error:
            log.exception("pairing anew broke", request_id=self._reader.read.request_id)
            self.fail(Internal("internal", f"the daemon failed: {type(error).__name__}"))

    def close(self) -> None:
        """The gather is over for its waiters. Words that are still to be said are said."""
        for task in self._pairing:
            task.cancel()
        self._stream.settle(self._take)

    def _fail_broken(self, why: str) -> None:
        self.fail(Conflict("protocol", f"peer {self.source.address} {why}", field="pack"))

    @property
    def may_begin_again(self) -> bool:
        """It went by an announcement, and nothing of it has been packed: its source rank will be asked."""
        return self._reader.read.announced

    def fail(self, why: KvferryError) -> None:
        """No more of them come. Chunks that have are read to their end."""
        if not all(packed.done() for packed in self._packed):
            self.problem = self.problem or why
        futures: list[asyncio.Future[Any]] = [*self._packed, self._vouched]
        for future in futures:
            if not future.done():
                future.set_exception(why)
                future.exception()  # retrieved: nobody may be waiting
