"""The source's end of one reader's stream: the leases that this rank of an engine reads here, and what it has packed.

A packing stands in the queue of what there is to say once, however much it has to say by the time of its turn. So
nothing of it grows for a reader that is slow to listen.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_to_proto, tables_to_proto
from kvferryd.check import check_request_id
from kvferryd.leases.lease import Lease, Opened, ReaderId
from kvferryd.leases.leases import Leases
from kvferryd.leases.pack import Packer, Packing

ENDED_S = 1.0
"""How long readers are given to hear that their leases have ended, when all of them do."""


@dataclass(slots=True, eq=False)
class _Reading:
    request_id: str
    task: asyncio.Task[None] | None = None
    opened: Opened | None = None
    lease: Lease | None = None
    """From when the reader is told of it."""
    packing: Packing | None = None
    begin: Callable[[Lease], None] | None = None
    """The packing, which waits for the lease."""


class Readings:
    """`run` it beside sending what is `said`; `close` it when the stream ends: from then on nothing is read."""

    def __init__(
        self, leases: Leases, who: ReaderId, packer: Packer, retired: asyncio.Event, *, announcing: bool
    ) -> None:
        """retired: set when the engine is. announcing: the reader may hear of leases that it did not ask for."""
        self._leases, self._who, self._packer = leases, who, packer
        self._retired, self._announcing = retired, announcing
        self._open: dict[int, _Reading] = {}
        self.said: asyncio.Queue[peer_pb2.ReadReply | Packing | None] = asyncio.Queue()
        """Of a packing, what is to `take` from it."""

    async def run(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> None:
        """Listen to the reader until it ends the stream, or the engine is retired and readers have been told of it.

        Raises KvferryError for what no reader of ours says.
        """
        listening = asyncio.create_task(self._listen(requests))
        retiring = asyncio.create_task(self._retired.wait())
        if self._announcing:
            self._leases.audience.add(self.announce)
        try:
            await asyncio.wait([listening, retiring], return_when=asyncio.FIRST_COMPLETED)
            if self._retired.is_set():
                await self._all_ended()
            else:
                listening.result()
        finally:
            self._leases.audience.discard(self.announce)
            listening.cancel()
            retiring.cancel()

    def announce(self, lease: Lease) -> None:
        """Tell of a lease that the reader may want next."""
        told = peer_pb2.Announcement(request_id=lease.request_id, update=_update(lease))
        self.said.put_nowait(peer_pb2.ReadReply(announced=told))

    async def _listen(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> None:
        async for request in requests:
            if self._retired.is_set():
                return  # not "the lease has ended": the end of the stream says that the engine may have started anew
            match request.WhichOneof("kind"):
                case "pack":
                    self._pack(request.pack)
                case "open":
                    self._begin(request.open.reading, request.open.request_id)
                case "close":
                    self._end(request.close)
                case kind:
                    raise KvferryError(
                        "malformed_read", "neither open, pack nor close was said", field="kind", value=kind
                    )

    async def _all_ended(self) -> None:
        running = [reading.task for reading in self._open.values() if reading.task is not None]
        if running:
            await asyncio.wait(running, timeout=ENDED_S)

    def close(self) -> None:
        for reading in self._open.values():
            if reading.task is not None:
                reading.task.cancel()
            if reading.packing is not None:
                reading.packing.end()
        self._open.clear()

    def _begin(self, number: int, request_id: str) -> None:
        if number in self._open or len(self._open) >= self._leases.limit:
            raise KvferryError(
                "malformed_read",
                f"reading {number} is open already, or {len(self._open)} readings are too many",
                field="open.reading",
                value=number,
                remedy="number readings from 1, and close those that are over",
            )
        reading = self._open[number] = _Reading(request_id)
        reading.task = asyncio.create_task(self._follow(number, reading))

    def _pack(self, said: peer_pb2.Pack) -> None:
        """Nobody waits for a packing whose reading is closed."""
        if said.open.request_id:
            self._begin(said.reading, said.open.request_id)
        reading = self._open.get(said.reading)
        if reading is None:
            return
        if said.HasField("open"):
            self._begin_packing(reading, said)
        if reading.packing is not None and reading.packing.number == said.packing:
            reading.packing.hear(said)

    def _begin_packing(self, reading: _Reading, said: peer_pb2.Pack) -> None:
        """At once where the reader knows the lease as it is, otherwise when it is told of it."""
        if reading.packing is not None:
            reading.packing.end()

        def tell() -> None:
            self.said.put_nowait(packing)

        packing = reading.packing = Packing(self._packer, said.reading, said.packing, said.open, tell)
        last = said.open.last

        def begin(lease: Lease) -> None:
            packing.begin(lease, functools.partial(self._leases.packed, lease, self._who) if last else lambda: None)

        lease = self._leases.get(reading.request_id)
        if reading.lease is not None:
            begin(reading.lease)
        elif lease is not None and packing.means(lease):
            begin(lease)  # it is opened at the loop's next turn, long before anything is packed
        else:
            reading.begin = begin

    def _end(self, asked: peer_pb2.LeaseClose) -> None:
        reading = self._open.pop(asked.reading, None)
        request_id, opened = asked.request_id, None
        if reading is not None:
            request_id, opened = reading.request_id, reading.opened
            assert reading.task is not None
            reading.task.cancel()
            if reading.packing is not None:
                reading.packing.end()
        try:
            check_request_id(request_id)
            if reading is None or opened is not None:
                self._leases.close(request_id, self._who, opened, asked.complete)
        except KvferryError as error:
            self._refuse(asked.reading, error)

    async def _follow(self, number: int, reading: _Reading) -> None:
        """Tell what the lease holds, now and after every publish; it is open for this reader until it is closed."""
        try:
            check_request_id(reading.request_id)
            lease = await self._leases.find(reading.request_id)
            with self._leases.reading(lease, self._who) as reading.opened:
                async for _ in lease.follow():
                    if reading.lease is not None or reading.packing is None or not reading.packing.means(lease):
                        self.said.put_nowait(peer_pb2.ReadReply(reading=number, update=_update(lease)))
                    reading.lease = lease
                    if reading.begin is not None:
                        reading.begin(lease)
                        reading.begin = None
                await lease.ended()
        except KvferryError as error:
            if reading.packing is not None:
                reading.packing.end()
            self._refuse(number, error)

    def _refuse(self, number: int, problem: KvferryError) -> None:
        """The reading is over."""
        self.said.put_nowait(peer_pb2.ReadReply(reading=number, problem=problem_to_proto(problem)))


def _update(lease: Lease) -> peer_pb2.LeaseUpdate:
    return peer_pb2.LeaseUpdate(
        tables=tables_to_proto(lease.tables),
        num_tokens=lease.num_tokens,
        more=lease.more,
        metadata=lease.metadata,
        seal_address=lease.seal.address,
        seal=lease.seal.value,
        version=lease.version,
        digest=lease.digest,
    )
