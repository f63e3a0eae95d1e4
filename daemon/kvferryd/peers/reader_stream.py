"""The reader's end of the stream to one source rank."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Protocol, TypeAlias

import grpc
from cachetools import FIFOCache

from kvferry.errors import Internal, KvferryError, PeerFailed
from kvferry.outbox import Outbox
from kvferry.protocol.reading import Close
from kvferry.v1 import peer_pb2, peer_pb2_grpc
from kvferry.wire import announced_as, problem_from_proto
from kvferryd.aio import Tasks, all_over
from kvferryd.ending import tried
from kvferryd.observe import logs
from kvferryd.peers.contact import Contact, asking, of_peer

log = logs.get(__name__)
CLOSE_S = 1.0
ANNOUNCED_NBYTES, LEAST_NBYTES = 4 << 20, 4096
"""Bounds on announced leases that wait for a transfer: bytes of all of a source (the oldest go first), and the least
that each counts for, so that there are 1,024 at most."""
_Call: TypeAlias = "grpc.aio.StreamStreamCall[peer_pb2.ReadRequest, peer_pb2.ReadReply]"


class Listener(Protocol):
    """A lease on the stream, as its reader follows it."""

    def on_reply(self, reply: peer_pb2.ReadReply) -> None: ...

    def on_lost(self, why: KvferryError) -> None:
        """The reading is over, or the whole stream: no reply will come."""


class ReaderStream:
    """A rank of ours as the reader of one source rank: a gRPC stream and its two tasks. Both end when it is over, in
    this object and nowhere else."""

    def __init__(
        self, stub: peer_pb2_grpc.PeerAsyncStub, contact: Contact, opening: peer_pb2.ReadOpening, *, several: bool
    ) -> None:
        """several: the source takes several requests in one."""
        self._contact, self._opening = contact, opening
        self._outbox = Outbox(_several, several=several)
        self._numbers = itertools.count(1)
        self._listeners: dict[int, Listener] = {}
        self._announced: FIFOCache[str, peer_pb2.LeaseUpdate] = FIFOCache(ANNOUNCED_NBYTES, _kept_nbytes)
        """The newest lease of each request that nobody has read or asked for since."""
        self._why: KvferryError | None = None
        call, tasks = stub.Read(), Tasks()  # the tasks alone have it: a call that is kept goes on dialling
        self._writing, self._reading = tasks.spawn(self._write(call)), tasks.spawn(self._read(call))

    @property
    def over(self) -> bool:
        return self._why is not None

    def when_over(self, tell: Callable[[], None]) -> None:
        """Called when it is over, in a turn of the loop's own."""
        self._reading.add_done_callback(lambda _: tell())

    def check(self) -> None:
        """Raises KvferryError when it is over."""
        if self._why is not None:
            raise self._why.kept()

    def announced(self, request_id: str, lease: int) -> peer_pb2.LeaseUpdate | None:
        """The lease of this number, 0 for the newest, as the source announced it before it was asked. Each announcement
        is given out once, and none of a lease that is older than the one asked for is kept."""
        name = announced_as(request_id)
        update = self._announced.get(name)
        if update is None or 0 < lease < update.lease:
            return None
        del self._announced[name]
        return update if lease in (0, update.lease) else None

    def follow(self, listener: Listener) -> int:
        """The number of a new reading: replies of that number go to `listener`. It is told at once of a stream that is
        over."""
        number = next(self._numbers)
        if self._why is None:
            self._listeners[number] = listener
        else:
            listener.on_lost(self._why.kept())
        return number

    def send(self, message: peer_pb2.ReadRequest) -> None:
        """Ignored when it is over."""
        self._outbox.put(message)

    def ask(self, compose: Callable[[], peer_pb2.ReadRequest]) -> None:
        """Send what `compose` returns when it is its turn."""
        self._outbox.ask(compose)

    def settle(self, compose: Callable[[], peer_pb2.ReadRequest]) -> None:
        """Compose now what was asked for and waits: `compose` is not kept."""
        self._outbox.settle(compose)

    def close_reading(
        self, said: Close, request_id: str, attempt: tuple[int, str], trace: peer_pb2.Trace | None, number: int = 0
    ) -> None:
        """attempt: as of SourceReader. number: of the reading; 0 for a lease that was never opened. A source that does
        not get this has its time to live."""
        self._listeners.pop(number, None)
        if said.lease:  # it may have come since the source was asked: nobody goes by it any more
            self.announced(request_id, said.lease)
        closing = peer_pb2.LeaseClose(
            reading=number, request_id=request_id, lease=said.lease, attempt=attempt[0], by=attempt[1],
            complete=said.complete, nbytes=said.nbytes, trace=None if number else trace,
        )  # fmt: skip
        self.send(peer_pb2.ReadRequest(close=closing))

    async def close(self) -> None:
        """Send what is pending, then end the stream. Takes at most CLOSE_S."""
        self._outbox.end()
        try:
            await asyncio.wait([self._reading], timeout=CLOSE_S)
        finally:
            self._reading.cancel()
        await all_over([self._reading])

    def _hear(self, reply: peer_pb2.ReadReply) -> None:
        if reply.HasField("announced"):
            name, update = reply.announced.request_id, reply.announced.update
            if not update.lease:
                why = f"peer {self._contact.address} announced a lease without a number"
                raise PeerFailed("malformed_update", why, field="lease", value=0, remedy="see what listens there")
            before = self._announced.get(name)
            if before is not None and before.lease > update.lease:
                return
            self._announced.pop(name, None)
            with contextlib.suppress(ValueError):  # it was too large alone: the source is asked
                self._announced[name] = update
        elif (listener := self._listeners.get(reply.reading)) is not None:
            self._reply(reply, listener)
        elif not reply.reading and reply.HasField("problem"):
            raise of_peer(problem_from_proto(reply.problem))

    def _reply(self, reply: peer_pb2.ReadReply, listener: Listener) -> None:
        """A listener that fails is told that its own reading is over; the others go on."""
        address = self._contact.address
        try:
            listener.on_reply(reply)
            return
        except KvferryError as error:
            why = error.kept()
        except Exception as error:
            log.exception("a reader broke over a reply", address=address, reading=reply.reading)
            why = Internal("internal", f"the daemon failed: {type(error).__name__}")
        self._listeners.pop(reply.reading, None)
        with tried("tell that a reading is over", address=address):
            listener.on_lost(why)

    async def _write(self, call: _Call) -> None:
        """Why a write fails is known to `_read`, which ends this task."""
        try:
            message: peer_pb2.ReadRequest | None = peer_pb2.ReadRequest(opening=self._opening)
            while message is not None:
                await call.write(message)
                message = await self._outbox.take()
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            pass
        finally:
            del call  # a task that is cancelled keeps its frame

    async def _read(self, call: _Call) -> None:
        address = self._contact.address
        why: KvferryError = PeerFailed("peer_lost", f"peer {address} ended the stream of leases", field="address")
        try:
            async with asking(self._contact, ended=why):
                async for told in call:
                    for reply in told.several.replies if told.HasField("several") else (told,):
                        self._hear(reply)
        except KvferryError as error:
            why = error.kept()
        finally:
            self._why = why
            self._outbox.give_up()
            self._writing.cancel()
            call.cancel()
            del call
            listeners, self._listeners = list(self._listeners.values()), {}
            for listener in listeners:  # a listener may close others
                with tried("tell that a stream is over", address=address):
                    listener.on_lost(why)


def _kept_nbytes(update: peer_pb2.LeaseUpdate) -> int:
    return max(LEAST_NBYTES, update.ByteSize())


def _several(requests: list[peer_pb2.ReadRequest]) -> peer_pb2.ReadRequest:
    return peer_pb2.ReadRequest(several=peer_pb2.ReadRequests(requests=requests))
