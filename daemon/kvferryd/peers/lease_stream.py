"""The reader's end of the stream to one source rank: opened with the first reading, and kept open for the next ones.

A packing stands in the queue of what there is to say once, however much it has to say by the time of its turn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

import grpc

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferry.wire import problem_from_proto
from kvferryd.peers.channels import asking

CLOSE_S = 1.0
ANNOUNCED = 1024
"""Leases kept that were announced and not opened: the last ones."""
_Call: TypeAlias = "grpc.aio.StreamStreamCall[peer_pb2.ReadRequest, peer_pb2.ReadReply]"


class Packing(Protocol):
    """The reader's end of what one reading has packed."""

    def take(self) -> peer_pb2.Pack:
        """All that there is to say by now."""

    def hear(self, reply: peer_pb2.PackReply) -> None: ...

    def fail(self, why: KvferryError) -> None:
        """Nothing more will be heard."""


class Reading:
    """One lease as its source tells of it. `close` it, whatever came of it."""

    def __init__(self, stream: _Stream, number: int, request_id: str) -> None:
        self._stream, self.number, self._request_id = stream, number, request_id
        self._said: asyncio.Queue[peer_pb2.LeaseUpdate | KvferryError] = asyncio.Queue()
        self._packing: Packing | None = None
        self._packings = itertools.count(1)

    async def update(self) -> peer_pb2.LeaseUpdate:
        """What the source says next. The caller bounds the wait. Raises KvferryError when the reading is over."""
        said = await self._said.get()
        if isinstance(said, KvferryError):
            raise said
        return said

    @property
    def updated(self) -> bool:
        """Whether the source has said something that was not taken yet."""
        return not self._said.empty()

    def pack(self, packing: Packing) -> int:
        """This one is heard from now on, under the number that is returned. Raises KvferryError (`peer_lost`, ...)."""
        self._stream.check()
        self._packing = packing
        return next(self._packings)

    def tell(self, packing: Packing) -> None:
        """It has something to say."""
        self._stream.say(packing)

    def hear(self, reply: peer_pb2.ReadReply) -> None:
        if reply.HasField("update"):
            self._said.put_nowait(reply.update)
        elif reply.HasField("problem"):
            self.fail(problem_from_proto(reply.problem))
        elif self._packing is not None:
            self._packing.hear(reply.pack)

    def fail(self, why: KvferryError) -> None:
        """It is over."""
        self._said.put_nowait(why)
        if self._packing is not None:
            self._packing.fail(why)

    def close(self, *, complete: bool) -> None:
        """Tell the source; one that does not hear it has its time to live."""
        self._stream.close_reading(self.number, self._request_id, complete)


class LeaseStream:
    """One of our ranks as the reader of one source rank. A stream that has ended is followed by another."""

    def __init__(self, stub: peer_pb2_grpc.PeerAsyncStub, address: str, opening: peer_pb2.ReadOpening) -> None:
        self._stub, self._address, self._opening = stub, address, opening
        self._stream: _Stream | None = None

    @property
    def lost(self) -> bool:
        """Whether the source has ended it. Whoever answers there now may be another daemon, with other memory."""
        return self._stream is not None and self._stream.over

    def open(self, request_id: str) -> Reading:
        """Ask for a lease."""
        return self._current().open(request_id)

    def open_packed(self, request_id: str) -> Reading:
        """A reading whose first packing asks for the lease."""
        return self._current().numbered(request_id)

    def announced(self, request_id: str) -> peer_pb2.LeaseUpdate | None:
        """What the source said of the lease before it was asked. It is told once."""
        return self._current().announced.pop(request_id, None)

    def through(self, request_id: str) -> None:
        """We count as a reader that is through without having opened the lease: with what was announced, or because
        this rank had nothing for us."""
        self._current().close_reading(0, request_id, True)

    def _current(self) -> _Stream:
        if self._stream is None or self._stream.over:
            self._stream = _Stream(self._stub, self._address, self._opening)
        return self._stream

    async def close(self) -> None:
        """Say what is still to be said, and end the stream. At most CLOSE_S."""
        if self._stream is not None:
            await self._stream.close()


class _Stream:
    def __init__(self, stub: peer_pb2_grpc.PeerAsyncStub, address: str, opening: peer_pb2.ReadOpening) -> None:
        self._address = address
        self._to_say: asyncio.Queue[peer_pb2.ReadRequest | Packing | None] = asyncio.Queue()
        self._to_say.put_nowait(peer_pb2.ReadRequest(opening=opening))
        self._numbers = itertools.count(1)
        self._readings: dict[int, Reading] = {}
        self.announced: OrderedDict[str, peer_pb2.LeaseUpdate] = OrderedDict()
        self._why: KvferryError | None = None
        self._call: _Call = stub.Read(self._requests())
        self._listening = asyncio.create_task(self._listen(), name=f"leases-of-{address}")

    @property
    def over(self) -> bool:
        return self._why is not None

    def check(self) -> None:
        """Raises KvferryError when it is over."""
        if self._why is not None:
            raise self._why

    def numbered(self, request_id: str) -> Reading:
        number = next(self._numbers)
        reading = self._readings[number] = Reading(self, number, request_id)
        return reading

    def open(self, request_id: str) -> Reading:
        reading = self.numbered(request_id)
        self.say(peer_pb2.ReadRequest(open=peer_pb2.LeaseOpen(reading=reading.number, request_id=request_id)))
        return reading

    def say(self, said: peer_pb2.ReadRequest | Packing) -> None:
        self._to_say.put_nowait(said)

    def close_reading(self, number: int, request_id: str, complete: bool) -> None:
        self._readings.pop(number, None)
        closing = peer_pb2.LeaseClose(reading=number, request_id=request_id, complete=complete)
        self.say(peer_pb2.ReadRequest(close=closing))

    async def close(self) -> None:
        self._to_say.put_nowait(None)
        await asyncio.wait([self._listening], timeout=CLOSE_S)
        self._call.cancel()
        self._listening.cancel()

    async def _requests(self) -> AsyncIterator[peer_pb2.ReadRequest]:
        while (said := await self._to_say.get()) is not None:
            yield said if isinstance(said, peer_pb2.ReadRequest) else peer_pb2.ReadRequest(pack=said.take())

    async def _listen(self) -> None:
        why = KvferryError("peer_lost", f"peer {self._address} ended the stream of leases", field="address")
        try:
            async with asking(self._address, ended=why):
                async for reply in self._call:
                    self._hear(reply)
        except KvferryError as error:
            why = error
        finally:
            self._why = why
            for reading in self._readings.values():
                reading.fail(why)
            self._readings.clear()

    def _hear(self, reply: peer_pb2.ReadReply) -> None:
        if reply.HasField("announced"):
            self.announced[reply.announced.request_id] = reply.announced.update
            if len(self.announced) > ANNOUNCED:
                self.announced.popitem(last=False)
            return
        reading = self._readings.get(reply.reading)
        if reading is not None:
            reading.hear(reply)
