"""A reader's stream at the source, as tasks and messages; kvferry.protocol.serving decides what it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from kvferry.errors import KvferryError, Malformed
from kvferry.outbox import SEVERAL, Outbox
from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol.values import ReaderId, Reading, Trace, View
from kvferry.schemas import InboundRecord
from kvferry.v1 import peer_pb2
from kvferry.wire import announced_as, problem_to_proto
from kvferryd.aio import running
from kvferryd.check import check_request_id
from kvferryd.leases.gather import Gatherer, Packer
from kvferryd.leases.leases import Leases
from kvferryd.leases.record import update_of
from kvferryd.observe import logs

LONGEST_BY = 64
"""Characters that are kept of who counts an attempt."""


@dataclass(frozen=True)
class _Turn:
    """The outbox calls this when a reading's turn comes; equal for the same reading."""

    stream: ServedStream
    reading: int

    def __call__(self) -> peer_pb2.ReadReply | None:
        return self.stream.compose(self.reading)


class ServedStream:
    """`replies` serves one reader until its stream ends; then nothing is read any more."""

    def __init__(
        self, leases: Leases, who: ReaderId, gatherer: Gatherer, retired: asyncio.Event, *, announcing: bool,
        peer: str = "", several: bool = False,
    ) -> None:  # fmt: skip
        """retired: set when the engine is. announcing: the reader may get leases that it did not ask for. peer: where
        it comes from. several: it takes several replies in one."""
        self.leases, self.who, self.peer = leases, who, peer
        self._since = time.time()
        self._retired, self._announcing = retired, announcing
        self._stream, self._gatherer = 0, gatherer
        self._packers: dict[int, Packer] = {}
        """Each reading that packs has one."""
        self.outbox = Outbox(_several, several=several)

    def record(self) -> InboundRecord:
        serving, who = self.leases.source.streams[self._stream], self.who
        return InboundRecord(
            engine_id=who.engine_id, epoch=who.epoch, rank=who.rank, world_size=who.world_size, address=self.peer,
            since=self._since, reading=len(serving), leases=serving.read, bytes=serving.nbytes,
            source=self.leases.engine_id,
        )  # fmt: skip

    async def replies(self, requests: AsyncIterator[peer_pb2.ReadRequest]) -> AsyncGenerator[peer_pb2.ReadReply]:
        """Until the reader ends the stream, or the engine is retired and readers have been sent the end of their
        leases.

        Raises KvferryError for a message that no reader of ours sends.
        """
        self._stream = self.leases.connect(self, self.who, announcing=self._announcing)
        try:
            async with running([self._listen(requests), self._until_retired()]) as tasks:
                for each in tasks:
                    each.add_done_callback(lambda _: self.outbox.end())
                while (reply := await self.outbox.take()) is not None:
                    yield reply
                if not self._retired.is_set():
                    tasks[0].result()
        finally:
            self.leases.disconnect(self._stream)

    async def _until_retired(self) -> None:
        await self._retired.wait()

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
                    known = also.word, also.version
                    self._ask(said.reading, also, known)
                reading = Reading(self._stream, said.reading)
                if said.HasField("open"):
                    self.leases.on(e.Pack(reading, said.packing, also.chunks, also.states, also))
                self.leases.pack(p.Want(p.At(reading, said.packing), tuple(said.want), tuple(said.read), said.vouch))
            case "open":
                asked = request.open
                known = asked.known_word, asked.known_version
                self._ask(asked.reading, asked, known)
            case "close":
                self._leave(request.close)
            case kind:
                raise Malformed("malformed_read", "a message has no open, pack or close", field="kind", value=kind)

    def _ask(self, number: int, said: peer_pb2.LeaseOpen | peer_pb2.PackOpen, known: tuple[int, int]) -> None:
        reading, refused = Reading(self._stream, number), _refused(said.request_id)
        trace, by = _trace(said.trace), said.by[:LONGEST_BY]
        self.leases.on(e.Ask(reading, said.request_id, said.lease, said.attempt, known, trace, refused, by))

    def _leave(self, said: peer_pb2.LeaseClose) -> None:
        """Not answered. A reading that is over, or was refused, needs no closing."""
        if not said.reading and said.complete:
            check_request_id(said.request_id)
        self.leases.on(
            e.Leave(
                Reading(self._stream, said.reading), said.request_id, said.lease, said.complete, said.nbytes,
                said.attempt, _trace(said.trace), said.by[:LONGEST_BY],
            )
        )  # fmt: skip

    # ---- by what the machine says ----

    def speak(self, reading: int) -> None:
        self.outbox.ask(_Turn(self, reading))

    def pack(self, effect: p.PackingEffect) -> None:
        number = effect.at.reading.number
        if isinstance(effect, p.Cut):
            self._packers[number] = Packer(self._gatherer, effect.at, self.leases.pack)
        packer = self._packers.get(number)
        if packer is not None:  # else it was over before there was anything to cut, or by an effect before this one
            packer.do(effect)
        if isinstance(effect, p.Forget):
            self._packers.pop(number, None)

    def compose(self, reading: int) -> peer_pb2.ReadReply | None:
        told = self.leases.take(self._stream, reading)
        if told is None:
            return None
        if not isinstance(told, p.Packed):
            self.speak(reading)  # there may be more
        return self._reply(reading, told)

    def _reply(self, reading: int, told: e.Told) -> peer_pb2.ReadReply:
        match told:
            case e.Update(view):
                return peer_pb2.ReadReply(reading=reading, update=self._update(view))
            case e.Problem(why):
                return peer_pb2.ReadReply(reading=reading, problem=problem_to_proto(why))
            case p.Packed():
                return peer_pb2.ReadReply(reading=reading, pack=self._packed(told))
            case e.Unpublished():
                return peer_pb2.ReadReply(reading=reading, unpublished=True)
            case e.Announcement(view):
                name = announced_as(view.terms.request_id)
                announced = peer_pb2.Announcement(request_id=name, update=self._update(view))
                return peer_pb2.ReadReply(announced=announced)

    def _packed(self, told: p.Packed) -> peer_pb2.PackReply:
        reply = peer_pb2.PackReply(packing=told.at.number, vouched=told.vouched)
        if told.chunks:
            self._packers[told.at.reading.number].add_to(reply, told.chunks)
        if told.problem is not None:
            reply.problem.CopyFrom(problem_to_proto(told.problem))
        return reply

    def _update(self, view: View) -> peer_pb2.LeaseUpdate:
        return update_of(view, self.leases.words.address(view.terms.word))


def _refused(request_id: str) -> KvferryError | None:
    try:
        check_request_id(request_id)
    except KvferryError as error:
        return error.kept()
    return None


def _trace(told: peer_pb2.Trace) -> Trace:
    trace = logs.Trace.of(told)
    return trace.traceparent, trace.x_request_id


def _several(replies: list[peer_pb2.ReadReply]) -> peer_pb2.ReadReply:
    return peer_pb2.ReadReply(several=peer_pb2.ReadReplies(replies=replies))
