"""The source's end of one reader's stream: the leases that one rank of an engine reads here, and what is packed for it.

Nothing grows for a reader that does not read its replies. A reading waits for its turn at most once, and composes its
message then; announcements that find too many others waiting are dropped, since a reader can always ask.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

from kvferry.errors import Conflict, Full, Internal, KvferryError, Malformed
from kvferry.outbox import SEVERAL, Outbox
from kvferry.schemas import InboundRecord, LeaseState
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_to_proto, tables_to_proto
from kvferryd.check import check_request_id
from kvferryd.leases.gather import Gather, Gatherer
from kvferryd.leases.lease import Lease, Opened, ReaderId, announced_as
from kvferryd.leases.leases import Leases
from kvferryd.observe import logs
from kvferryd.observe.logs import Trace

log = logs.get(__name__)
ENDED_S = 1.0
"""How long readers may take to receive the end of their leases, when all of them end."""
ANNOUNCEMENTS = 64
"""Announcements that may wait for one reader."""
READINGS = 4096
"""Open on one stream at once, or twice the leases that may be held where that is more. A reader of ours never has more,
so the stream of one that does ends."""


class _Reading:
    """One lease as this reader follows it, until it is closed."""

    def __init__(
        self, stream: ServedStream, number: int, request_id: str, known: tuple[int, int], which: tuple[int, int],
        trace: Trace,
    ) -> None:  # fmt: skip
        """known: word and version of an announcement that the reader goes by. which: the lease's number (0: whichever
        there is), and the attempt of the reader's engine."""
        self._stream, self._number, self.request_id, self.known = stream, number, request_id, known
        self._lease_number, self._attempt = which
        self.trace = trace
        self.opened: Opened | None = None
        self._lease: Lease | None = None
        """Set once the reader has its present version, from an update or an announcement."""
        self._gather: Gather | None = None
        self._unpublished = False
        """It is to be told that the lease is still to come."""
        self._update: Lease | None = None
        self._problem: KvferryError | None = None
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Send what the lease holds, now and after every publish. It is open for this reader until the task ends."""
        try:
            check_request_id(self.request_id)
            lease = self._stream.leases.held(self.request_id, self._lease_number)
            if lease is None:
                self._unpublished = True
                self._queue()
                lease = await self._stream.leases.find(self.request_id, self._stream.who, self._lease_number)
                self._unpublished = False
            with lease.reading(self._stream.who, self._attempt) as self.opened:
                lease.trace = self.trace
                async for _ in lease.follow():
                    if not self._knows(lease):
                        self._update = lease
                        self._queue()
                    self._lease = lease
                    if self._gather is not None and not self._gather.begun:
                        self._begin(self._gather, lease)
                await lease.ended()
                if self._gather is None and lease.state in (LeaseState.EXPIRED, LeaseState.REVOKED):
                    raise lease.over()  # what was gathered stays as good as it was
        except KvferryError as error:
            self._fail(error)
            self._queue()
        except Exception as error:
            log.exception("a reading broke", request_id=self.request_id)
            self._fail(Internal("internal", f"the source failed: {type(error).__name__}"))
            self._queue()

    def _fail(self, why: KvferryError) -> None:
        if self._gather is not None:
            self._gather.end()
        self._problem = why

    def _knows(self, lease: Lease) -> bool:
        """Whether the reader has the present version of the lease from an announcement."""
        return self._lease is None and self.known == (lease.word.value, lease.version)

    def pack(self, said: peer_pb2.Pack) -> None:
        if said.HasField("open"):
            if self._gather is not None:
                self._gather.end()
            self._gather = Gather(self._stream.gatherer, said.packing, said.open, self._queue)
            # A lease known from an announcement is opened at the loop's next turn, long before anything is packed.
            lease = self._lease or self._stream.leases.get(self.request_id)
            if lease is not None and (self._lease is not None or self._knows(lease)):
                self._begin(self._gather, lease)
        if self._gather is not None and self._gather.number == said.packing:
            self._gather.on_message(said)

    def _begin(self, gather: Gather, lease: Lease) -> None:
        gather.begin(lease, lambda: self.opened.packed(gather.nbytes) if self.opened is not None else None)

    def close(self) -> None:
        self.task.cancel()
        if self._gather is not None:
            self._gather.end()
        self._stream.outbox.leave(self._take)

    def _queue(self) -> None:
        self._stream.outbox.ask(self._take)

    def _take(self) -> peer_pb2.ReadReply | None:
        update, self._update = self._update, None
        if update is not None and update.state.ended:  # before it could be sent
            self._fail(update.over())
        elif update is not None:
            self._queue()  # for what else is pending
            return peer_pb2.ReadReply(reading=self._number, update=_update_of(update))
        packed = self._gather.take() if self._gather is not None else None
        if packed is not None:
            self._queue()
            return peer_pb2.ReadReply(reading=self._number, pack=packed)
        if self._problem is None:
            if not self._unpublished:
                return None
            self._unpublished = False
            return peer_pb2.ReadReply(reading=self._number, unpublished=True)
        self._stream.readings.pop(self._number, None)
        return peer_pb2.ReadReply(reading=self._number, problem=problem_to_proto(self._problem))


class ServedStream:
    """`replies` serves one reader until its stream ends; then nothing is read any more."""

    def __init__(
        self, leases: Leases, who: ReaderId, gatherer: Gatherer, retired: asyncio.Event, *, announcing: bool,
        peer: str = "", several: bool = False,
    ) -> None:  # fmt: skip
        """retired: set when the engine is. announcing: the reader may get leases that it did not ask for. peer: where
        it comes from. several: it takes several replies in one."""
        self.leases, self.who, self.gatherer, self.peer = leases, who, gatherer, peer
        self._since = time.time()
        self._leases_read = self._nbytes = 0
        """So far, as the reader says."""
        self._retired, self._announcing = retired, announcing
        self.readings: dict[int, _Reading] = {}
        self.outbox = Outbox(_several, several=several)
        self._announced: deque[Lease] = deque()
        """Leases that the reader may want next."""

    def record(self) -> InboundRecord:
        return InboundRecord(
            engine_id=self.who.engine_id, epoch=self.who.epoch, rank=self.who.rank, world_size=self.who.world_size,
            address=self.peer, since=self._since, reading=len(self.readings), leases=self._leases_read,
            bytes=self._nbytes, source=self.leases.engine_id,
        )  # fmt: skip

    async def replies(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> AsyncGenerator[peer_pb2.ReadReply]:
        """Until the reader ends the stream, or the engine is retired and readers have been sent the end of their
        leases.

        Raises KvferryError for a message that no reader of ours sends.
        """
        running = asyncio.create_task(self._run(requests))
        running.add_done_callback(lambda _: self.outbox.end())
        self.leases.inbound.add(self.record)
        if self._announcing:
            self.leases.audience.add(self._announce)
        try:
            while (reply := await self.outbox.take()) is not None:
                yield reply
            running.result()
        finally:
            self.leases.audience.discard(self._announce)
            self.leases.inbound.discard(self.record)
            running.cancel()
            for reading in self.readings.values():
                reading.close()
            self.readings.clear()
            await asyncio.wait([running])

    async def _run(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> None:
        listening = asyncio.create_task(self._listen(requests))
        retiring = asyncio.create_task(self._retired.wait())
        try:
            await asyncio.wait([listening, retiring], return_when=asyncio.FIRST_COMPLETED)
            if not self._retired.is_set():
                listening.result()
            elif readings := [reading.task for reading in self.readings.values()]:
                await asyncio.wait(readings, timeout=ENDED_S)
        finally:
            listening.cancel()
            retiring.cancel()

    async def _listen(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> None:
        async for request in requests:
            if self._retired.is_set():
                return  # not "the lease has ended": the end of the stream says that the engine may have started anew
            if not request.HasField("several"):
                self._hear(request)
            elif (count := len(request.several.requests)) <= SEVERAL:
                for each in request.several.requests:
                    self._hear(each)
            else:
                remedy = f"at most {SEVERAL} in one"
                raise Malformed("malformed_read", "too many messages", field="several", value=count, remedy=remedy)

    def _hear(self, request: peer_pb2.ReadRequest) -> None:
        match request.WhichOneof("kind"):
            case "pack":
                said, also = request.pack, request.pack.open
                if also.request_id:
                    known, which = (also.word, also.version), (also.lease, also.attempt)
                    self._open(said.reading, also.request_id, known, which, also.trace)
                if (reading := self.readings.get(said.reading)) is not None:
                    reading.pack(said)
            case "open":
                asked = request.open
                known, which = (asked.known_word, asked.known_version), (asked.lease, asked.attempt)
                self._open(asked.reading, asked.request_id, known, which, asked.trace)
            case "close":
                self._close(request.close)
            case kind:
                raise Malformed("malformed_read", "a message has no open, pack or close", field="kind", value=kind)

    def _open(
        self, number: int, request_id: str, known: tuple[int, int], which: tuple[int, int], trace: peer_pb2.Trace
    ) -> None:
        if number in self.readings or len(self.readings) >= max(READINGS, 2 * self.leases.limit):
            why = f"it is open already, or {len(self.readings)} readings are too many"
            remedy = "number readings from 1, and close those that are over"
            raise Malformed("malformed_read", why, field="open.reading", value=number, remedy=remedy)
        self.readings[number] = _Reading(self, number, request_id, known, which, Trace.of(trace))

    def _close(self, asked: peer_pb2.LeaseClose) -> None:
        """Not answered. A reading that is over, or was refused, needs no closing."""
        self._leases_read += asked.complete and asked.nbytes > 0
        self._nbytes += asked.nbytes
        reading = self.readings.pop(asked.reading, None)
        if reading is None:
            if asked.complete and not asked.reading:
                self._finished(asked, asked.request_id, Trace.of(asked.trace))
            return
        if reading.opened is not None:
            reading.opened.close(complete=asked.complete, nbytes=asked.nbytes, attempt=asked.attempt)
        elif asked.complete:  # the message came with the one that opens it: its task has had no turn
            self._finished(asked, reading.request_id, reading.trace)
        reading.close()

    def _finished(self, asked: peer_pb2.LeaseClose, request_id: str, trace: Trace) -> None:
        """This rank has all that it wants of a lease that it has not opened."""
        check_request_id(request_id)
        lease = self.leases.get(request_id)
        if lease is not None and lease.number == asked.lease:
            lease.trace = trace
        with suppress(Conflict, Full):  # another reading of this rank has it open, and closes it
            self.leases.finished(request_id, asked.lease, self.who, asked.nbytes, asked.attempt)

    def _announce(self, lease: Lease) -> None:
        if len(self._announced) < ANNOUNCEMENTS:
            self._announced.append(lease)
            self.outbox.ask(self._take_announcement)

    def _take_announcement(self) -> peer_pb2.ReadReply | None:
        lease = self._announced.popleft()
        if self._announced:
            self.outbox.ask(self._take_announcement)
        if lease.state.ended:
            return None
        announced = peer_pb2.Announcement(request_id=announced_as(lease.request_id), update=_update_of(lease))
        return peer_pb2.ReadReply(announced=announced)


def _several(replies: list[peer_pb2.ReadReply]) -> peer_pb2.ReadReply:
    return peer_pb2.ReadReply(several=peer_pb2.ReadReplies(replies=replies))


def _update_of(lease: Lease) -> peer_pb2.LeaseUpdate:
    return peer_pb2.LeaseUpdate(
        tables=tables_to_proto(lease.tables),
        num_tokens=lease.num_tokens,
        more=lease.more,
        metadata=lease.metadata,
        word_address=lease.word.address,
        word=lease.word.value,
        version=lease.version,
        lease=lease.number,
        digest=lease.digest,
        weights=lease.weights,
    )
