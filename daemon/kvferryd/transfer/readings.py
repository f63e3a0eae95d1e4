"""The source's end of one reader's stream: the leases that this rank of an engine reads here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_to_proto, tables_to_proto
from kvferryd.transfer.check import check_request_id
from kvferryd.transfer.lease import Lease, Leases, ReaderId

ENDED_S = 1.0
"""How long readers are given to hear that their leases have ended, when all of them do."""


@dataclass(slots=True, eq=False)
class _Reading:
    request_id: str
    task: asyncio.Task[None] | None = None
    secret: str = ""


class Readings:
    """`run` it beside sending what is `said`; `close` it when the stream ends: from then on nothing is read."""

    def __init__(self, leases: Leases, who: ReaderId, retired: asyncio.Event, *, announcing: bool) -> None:
        """retired: set when the engine is. announcing: the reader may hear of leases that it did not ask for."""
        self._leases, self._who, self._retired, self._announcing = leases, who, retired, announcing
        self._open: dict[int, _Reading] = {}
        self.said: asyncio.Queue[peer_pb2.ReadReply | None] = asyncio.Queue()

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
        told = peer_pb2.Announcement(request_id=lease.request_id, update=_update(lease, ""))
        self.said.put_nowait(peer_pb2.ReadReply(announced=told))

    async def _listen(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> None:
        async for request in requests:
            if self._retired.is_set():
                return  # not "the lease has ended": the end of the stream says that the engine may have started anew
            match request.WhichOneof("kind"):
                case "open":
                    self._begin(request.open)
                case "close":
                    self._end(request.close)
                case kind:
                    raise KvferryError("malformed_read", "neither open nor close was said", field="kind", value=kind)

    async def _all_ended(self) -> None:
        running = [reading.task for reading in self._open.values() if reading.task is not None]
        if running:
            await asyncio.wait(running, timeout=ENDED_S)

    def close(self) -> None:
        for reading in self._open.values():
            if reading.task is not None:
                reading.task.cancel()
        self._open.clear()

    def _begin(self, asked: peer_pb2.LeaseOpen) -> None:
        if asked.reading in self._open or len(self._open) >= self._leases.limit:
            raise KvferryError(
                "malformed_read",
                f"reading {asked.reading} is open already, or {len(self._open)} readings are too many",
                field="open.reading",
                value=asked.reading,
                remedy="number readings from 1, and close those that are over",
            )
        reading = self._open[asked.reading] = _Reading(asked.request_id)
        reading.task = asyncio.create_task(self._follow(asked.reading, reading))

    def _end(self, asked: peer_pb2.LeaseClose) -> None:
        reading = self._open.pop(asked.reading, None)
        request_id, secret = asked.request_id, ""
        if reading is not None:
            request_id, secret = reading.request_id, reading.secret
            assert reading.task is not None
            reading.task.cancel()
        try:
            check_request_id(request_id)
            if reading is None or secret:
                self._leases.close(request_id, self._who, secret, asked.complete)
        except KvferryError as error:
            self._say(asked.reading, problem=error)

    async def _follow(self, number: int, reading: _Reading) -> None:
        """Tell what the lease holds, now and after every publish; it is open for this reader until it is closed."""
        try:
            check_request_id(reading.request_id)
            lease = await self._leases.find(reading.request_id)
            with self._leases.reading(lease, self._who) as reading.secret:
                async for _ in self._leases.follow(lease):
                    self._say(number, update=_update(lease, reading.secret))
                await self._leases.ended(lease)
        except KvferryError as error:
            self._say(number, problem=error)

    def _say(
        self, reading: int, *, update: peer_pb2.LeaseUpdate | None = None, problem: KvferryError | None = None
    ) -> None:
        told = problem_to_proto(problem) if problem else None
        self.said.put_nowait(peer_pb2.ReadReply(reading=reading, update=update, problem=told))


def _update(lease: Lease, secret: str) -> peer_pb2.LeaseUpdate:
    return peer_pb2.LeaseUpdate(
        secret=secret,
        tables=tables_to_proto(lease.tables),
        num_tokens=lease.num_tokens,
        more=lease.more,
        metadata=lease.metadata,
        seal_address=lease.seal.address,
        seal=lease.seal.value,
        version=lease.version,
    )
