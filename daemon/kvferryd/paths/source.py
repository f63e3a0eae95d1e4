"""A source rank as one transfer reads it: the messages of its lease, and the word that proves it.
kvferry.protocol.reading decides the lease and the questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.errors import Conflict, KvferryError
from kvferry.protocol import reading as r
from kvferry.protocol.reading import Following, Seen
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_from_proto, tables_from_proto
from kvferryd.aio import Timer, beside
from kvferryd.ending import tried
from kvferryd.observe.logs import UNTRACED, Trace
from kvferryd.peers.contact import of_peer
from kvferryd.peers.peer import PeerRank
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.plan import Bound, Plan, bind, left
from kvferryd.transport.agent import Agent

if TYPE_CHECKING:
    from kvferryd.paths.chunks import ChunkStream

BOUND_AS_ONE = 4
"""Blocks of a copy that are bound in the time in which one is cut or expanded (see `aio.FEW`)."""


class SourceReader:
    """Turns what one source rank says of a lease into events, and does what the machine says."""

    def __init__(
        self, source: PeerRank, read: Following, attempt: tuple[int, str], tell: Callable[[r.ReadingEvent], None],
        tell_lost: Callable[[KvferryError], None] = lambda _: None, trace: Trace = UNTRACED,
    ) -> None:  # fmt: skip
        """attempt: of this engine at the request, and who counts it. tell_lost: called when the stream is over while
        the lease is open."""
        self.source, self.read, self.attempt = source, read, attempt
        self._tell, self._tell_lost = tell, tell_lost
        self._trace = peer_pb2.Trace(traceparent=trace.traceparent, x_request_id=trace.x_request_id)
        self.number = 0
        """Number of this reading on its stream."""
        self._stream: ReaderStream | None = None
        self._later = Timer(lambda: tell(r.Due()))
        self._carrier: peer_pb2.PackOpen | None = None
        """The message that opens the lease as well."""
        self._chunks: ChunkStream | None = None
        self._gathers = 0

    @property
    def lease(self) -> Seen:
        return self.read.seen

    @property
    def answered(self) -> bool:
        """The source has said something of the lease, be it that it is not published yet."""
        return bool(self.lease.version) or self.read.awaits_publish

    def take(self, effect: r.ReadingEffect) -> None:
        """Do what the machine says."""
        match effect:
            case r.OpenLater(at):
                self._later.set(at)
            case r.Open():
                self._open(effect)
            case r.Close():
                self._close(effect)

    def _open(self, said: r.Open) -> None:
        self.end_timer()
        self._stream = stream = self.source.stream
        self.number = stream.follow(self)
        if (carrier := self._carrier) is not None:
            carrier.request_id, carrier.lease = self.read.request_id, said.lease
            carrier.attempt, carrier.by = self.attempt
            carrier.trace.CopyFrom(self._trace)
            return
        word, version = said.known
        opening = peer_pb2.LeaseOpen(
            reading=self.number, request_id=self.read.request_id, lease=said.lease, known_word=word,
            known_version=version, attempt=self.attempt[0], by=self.attempt[1], trace=self._trace,
        )  # fmt: skip
        stream.send(peer_pb2.ReadRequest(open=opening))

    def _close(self, said: r.Close) -> None:
        if self._chunks is not None:
            with tried("end a gather", request_id=self.read.request_id, rank=self.source.rank):
                self._chunks.close()
        stream = self._stream or self.source.stream
        stream.close_reading(said, self.read.request_id, self.attempt, self._trace, self.number)

    def end_timer(self) -> None:
        self._later.set(None)

    def gather(self, chunks: ChunkStream, opening: peer_pb2.PackOpen) -> tuple[int, ReaderStream]:
        """Completes the opening with the lease's last update, and sends replies to `chunks` from now on; (the gather's
        number, the stream to send on). Raises KvferryError when the reading is over: nobody would answer."""
        opening.word, opening.version = self.lease.word, self.lease.version
        if self.read.due:
            self._carrier = opening
            self._tell(r.Due())
            self._carrier = None
        self.read.check_goes_on()
        assert self._stream is not None
        if self._chunks is not None and self._chunks is not chunks:  # given up, but it may still pair anew
            self._chunks.close()
        self._chunks = chunks
        self._gathers += 1
        return self._gathers, self._stream

    def on_reply(self, reply: peer_pb2.ReadReply) -> None:
        if reply.reading != self.number:
            return
        opening = self.read.opening
        if reply.HasField("update"):
            try:
                self._tell(r.Update(opening, seen_of(reply.update)))
            except KvferryError as malformed:
                self._over(malformed.kept())
        elif reply.HasField("problem"):
            self._over(of_peer(problem_from_proto(reply.problem)))
        elif reply.HasField("unpublished"):
            self._tell(r.Unpublished(opening))
        elif self._chunks is not None:
            if not reply.pack.HasField("problem"):
                self._tell(r.Gathered())
            self._chunks.on_reply(reply.pack)
        if self.read.problem is not None and self._chunks is not None:
            self._chunks.fail(self.read.problem)

    def on_lost(self, why: KvferryError) -> None:
        self._over(why)
        self._tell_lost(why)

    def _over(self, why: KvferryError) -> None:
        self._tell(r.Over(self.read.opening, why))
        if self._chunks is not None:
            self._chunks.fail(why)

    async def verify(self, agent: Agent, *, alone: bool = True) -> None:
        """The lease held while its blocks were read: its validity word is whole. alone: as of `Agent.peek`. Raises
        KvferryError (`torn`)."""
        if self._stream is not None:
            self._stream.check()
        if await agent.peek(self.source.agent_name, self.lease.word_address, alone=alone) != self.lease.word:
            request_id, remedy = self.read.request_id, "prefill the request again"
            why = f"the lease of request {request_id} did not hold while it was read"
            raise Conflict("torn", why, field="request_id", value=request_id, remedy=remedy)


def seen_of(update: peer_pb2.LeaseUpdate) -> Seen:
    """Raises KvferryError (`malformed_tables`)."""
    tables = tables_from_proto(update.tables, "source tables")
    return Seen(
        update.lease, update.version, update.word, update.word_address, update.num_tokens, update.more, update.digest,
        update.weights, update.metadata, tables, update.fenced_s,
    )  # fmt: skip


def announced(source: PeerRank, request_id: str, lease: int) -> Seen | None:
    """The lease of this number, 0 for the newest, where the source has told of all of it unasked."""
    stream = source.stream
    update = None if stream.over else stream.announced(request_id, lease)
    try:
        return None if update is None or update.more else seen_of(update)
    except KvferryError:
        return None  # its own answer says why


async def bound_to(
    plan: Plan, readers: Iterable[SourceReader], own: Tables, tokens: tuple[int, int], *, states: bool = True,
    without: Collection[int] = (), rest: int | None = None,
) -> Bound:  # fmt: skip
    """`bind` to what the leases hold now. without: source ranks of which nothing is wanted. rest: what is left of our
    blocks is to be zero, all from this token on; None: it stays as it is. Raises KvferryError."""
    tables = {reader.source.rank: reader.lease.tables for reader in readers}

    def work() -> Bound:
        bound = bind(plan, tables, own, tokens, states=states).without(without)
        if rest is not None:
            bound = replace(bound, left=left(plan, tables, own, tokens, rest))
        _ = bound.nbytes, bound.left.nbytes  # counted here too
        return bound

    rows = len(plan.copies) * sum(len(table.block_ids) for table in own.values())
    return await beside(rows // BOUND_AS_ONE, work)
