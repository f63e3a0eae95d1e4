"""One source rank as one transfer reads it: the lease as the source told it, the proof that it held, and the chunks
that the source gathers of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_from_proto, tables_from_proto
from kvferryd.aio import beside
from kvferryd.copy import Chunk
from kvferryd.ending import tried
from kvferryd.observe.logs import UNTRACED, Trace
from kvferryd.peers.contact import of_peer
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.peers.reader_stream import ReaderStream
from kvferryd.plan import Bound, Plan, bind, left
from kvferryd.transport.agent import Agent

BOUND_AS_ONE = 4
"""Blocks of a copy that are bound in the time in which one is cut or expanded (see `aio.FEW`)."""
OPEN_AFTER_S = 0.02
"""How long a reader goes by an announcement before it opens the lease, so that the lease does not expire under a long
read. A short read is over by then, and costs its source one message."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt and the weights that a lease must have been computed of and by.

    digest: of the prompt; empty is not checked. weights: their name, always compared: an empty one is a name, too.
    """

    digest: bytes = b""
    weights: str = ""

    def fits(self, update: peer_pb2.LeaseUpdate) -> bool:
        return update.weights == self.weights and (not self.digest or update.digest == self.digest)


class SourceReader:
    """The lease of one request on one source rank. `advance` opens it; `close` it at the end.

    The source may have announced the lease. Then the first `advance` goes by the announcement at once. The lease is
    opened beside reading, with the first message that there is or after OPEN_AFTER_S; the source answers only if it
    holds something else by now.
    """

    def __init__(
        self, source: PeerRank, request_id: str, named: int, attempt: tuple[int, str], wanted: Computed,
        trace: Trace = UNTRACED,
        on_unpublished: Callable[[], None] = lambda: None, tell_lost: Callable[[KvferryError], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """named: the lease's number; 0 for whichever the source has. attempt: of this engine at the request, and who
        counts it. on_unpublished: called when the source answers that the lease is still to come. tell_lost:
        called when the stream is over while the lease is open."""
        self.source, self.request_id, self.named, self.attempt = source, request_id, named, attempt
        self._wanted = wanted
        self._trace = peer_pb2.Trace(traceparent=trace.traceparent, x_request_id=trace.x_request_id)
        self._on_unpublished, self._tell_lost = on_unpublished, tell_lost
        self.nbytes = 0
        """Read of it so far."""
        self.lease = peer_pb2.LeaseUpdate(more=True)
        """The source's last update."""
        self.tables: Tables = {}
        self.announced = False
        """It goes by an announcement, which the source has not confirmed."""
        self.number = 0
        """Of this reading on its stream."""
        self._told_of = 0
        """The lease of this reading, as its first update said."""
        self._update: peer_pb2.LeaseUpdate | None = None
        """The newest one that `_next` has not returned. An update includes all earlier ones."""
        self._problem: KvferryError | None = None
        """Why the reading is over; None while the source may still send updates."""
        self._told = asyncio.Event()
        """One of the two has been set."""
        self._stream: ReaderStream | None = None
        self._opening: asyncio.TimerHandle | None = None
        """The lease goes by an announcement and is not open yet."""
        self._chunks: ChunkStream | None = None
        self._gathers = 0

    async def advance(self) -> None:
        """Take the source's next update: the first time its lease, later more tokens. The caller bounds the wait.

        Raises KvferryError: the source's reason, `other_prompt`, `other_weights`, `peer_lost`.
        """
        if self._stream is None and self._opening is None:
            stream = self.source.stream
            stream.check()
            update = stream.announced(self.request_id, self.named)
            # One of another prompt, or by other weights, may be out of date: the source is asked what it has now.
            if update is not None and self._wanted.fits(update):
                self.announced = True
                self._opening = asyncio.get_running_loop().call_later(OPEN_AFTER_S, self._open)
                self._apply(update)
                return
            self._open()
        self._apply(await self._next())

    def check(self) -> None:
        """Raises KvferryError when the reading is over: the source has ended it, or the stream is lost."""
        if self._problem is not None:
            raise self._problem.kept()

    async def over(self) -> None:
        """Waits until the reading is over, and raises why. The caller ends the wait."""
        while True:
            self.check()
            self._told.clear()
            await self._told.wait()

    async def ask_again(self) -> None:
        """Go by the source's own answer instead of an announcement: what it has told already, where that is of the
        prompt that is wanted, or what it has now. The caller bounds the wait."""
        self.announced = False
        ended = self._problem is not None and self._problem.code == "lease_ended"  # there may be another one since
        told = self._update is not None and self._wanted.fits(self._update)
        if ended or (not told and self._problem is None):
            self._open_anew()
        self._apply(await self._next())

    async def ask_for(self, lease: int) -> None:
        """Read the lease of this number, which another rank of the source has told of. The caller bounds the wait."""
        self.named, self.announced = lease, False
        self._open_anew()
        self._apply(await self._next())

    def _open_anew(self) -> None:
        self._update = self._problem = None
        self.close(complete=False)
        self.nbytes = 0  # the source has been told
        self.lease = peer_pb2.LeaseUpdate(more=True)
        self._open()

    def _open(self) -> None:
        """The source answers unless it holds the very lease that was announced."""
        stream, word, version = self._follow(), self.lease.word, self.lease.version
        opening = peer_pb2.LeaseOpen(
            reading=self.number, request_id=self.request_id, lease=self.named, known_word=word, known_version=version,
            attempt=self.attempt[0], by=self.attempt[1], trace=self._trace,
        )  # fmt: skip
        stream.send(peer_pb2.ReadRequest(open=opening))

    def _follow(self) -> ReaderStream:
        """Take a number on the stream: replies come here from now on."""
        self._open_no_more()
        self._stream, self._told_of = self.source.stream, 0
        self.number = self._stream.follow(self)
        return self._stream

    def _open_no_more(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    async def _next(self) -> peer_pb2.LeaseUpdate:
        while self._update is None:
            self.check()
            self._told.clear()
            await self._told.wait()
        update, self._update = self._update, None
        return update

    def _apply(self, update: peer_pb2.LeaseUpdate) -> None:
        if self._wanted.digest and update.digest != self._wanted.digest:
            how = "for another prompt than this one" if update.digest else "without a digest of its prompt"
            why = f"request {self.request_id} was published {how}"
            remedy = "hand kv_transfer_params on with the prompt that they were made for"
            raise Conflict("other_prompt", why, field="digest", value=update.digest.hex(), remedy=remedy)
        if update.weights != self._wanted.weights:
            why = (
                f"rank {self.source.rank} of the source computed request {self.request_id} by weights "
                f"{update.weights!r}, and this engine has {self._wanted.weights!r} ('': those that it registered with)"
            )
            remedy = "replace the weights on both sides, under one name, and prefill the request again"
            raise Conflict("other_weights", why, field="weights", value=update.weights, remedy=remedy)
        self.lease, self.tables = update, tables_from_proto(update.tables, "source tables")

    def gather(self, chunks: ChunkStream, opening: peer_pb2.PackOpen) -> tuple[int, ReaderStream]:
        """Completes the opening with the lease's last update, and sends replies to `chunks` from now on; (the gather's
        number, the stream to send on). Raises KvferryError when the reading is over: nobody would answer."""
        opening.word, opening.version = self.lease.word, self.lease.version
        if self._opening is not None:
            self._follow()
            opening.request_id, opening.lease = self.request_id, self.named
            opening.attempt, opening.by = self.attempt
            opening.trace.CopyFrom(self._trace)
        self.check()
        assert self._stream is not None
        if self._chunks is not None and self._chunks is not chunks:  # given up, but it may still pair anew
            self._chunks.close()
        self._chunks = chunks
        self._gathers += 1
        return self._gathers, self._stream

    def on_reply(self, reply: peer_pb2.ReadReply) -> None:
        if reply.HasField("update"):
            if not reply.update.lease or self._told_of not in (0, reply.update.lease):
                self._fail(self._malformed(reply.update))
                return
            self._update, self._told_of = reply.update, reply.update.lease
            self._told.set()
        elif reply.HasField("problem"):
            self._fail(of_peer(problem_from_proto(reply.problem)))
        elif reply.HasField("unpublished"):
            self._on_unpublished()
        elif self._chunks is not None:
            if not reply.pack.HasField("problem"):
                self.announced = False  # the source gathers, so it still has the announced version
            self._chunks.on_reply(reply.pack)

    def _malformed(self, update: peer_pb2.LeaseUpdate) -> KvferryError:
        after = f"after lease {self._told_of}" if self._told_of else "which is no number"
        why = f"peer {self.source.address} told of lease {update.lease} of request {self.request_id}, {after}"
        remedy = "see what listens there: a reading is of one lease, which its source's engine has numbered from 1"
        return PeerFailed("malformed_update", why, field="lease", value=update.lease, remedy=remedy)

    def on_lost(self, why: KvferryError) -> None:
        self._fail(why)
        self._tell_lost(why)

    def _fail(self, why: KvferryError) -> None:
        self._problem = why
        self._told.set()
        if self._chunks is not None:
            self._chunks.fail(why)

    async def verify(self, agent: Agent, *, alone: bool = True) -> None:
        """The lease held while its blocks were read: its validity word is whole. alone: as of `Agent.peek`. Raises
        KvferryError (`torn`)."""
        if self._stream is not None:
            self._stream.check()
        if await agent.peek(self.source.agent_name, self.lease.word_address, alone=alone) != self.lease.word:
            why = f"the lease of request {self.request_id} did not hold while it was read"
            remedy = "prefill the request again"
            raise Conflict("torn", why, field="request_id", value=self.request_id, remedy=remedy)

    def close(self, *, complete: bool) -> None:
        """The reading is over. complete: all that was wanted has been read, or there was nothing to read."""
        self._open_no_more()
        if self._chunks is not None:
            with tried("end a gather", request_id=self.request_id, rank=self.source.rank):
                self._chunks.close()
        if self._stream is not None:
            self._stream.close_reading(
                self.request_id, self.lease.lease, self.attempt, complete=complete, nbytes=self.nbytes,
                number=self.number,
            )  # fmt: skip
        elif complete:
            self.source.stream.close_reading(
                self.request_id, self.lease.lease or self.named, self.attempt, complete=True, nbytes=self.nbytes,
                trace=self._trace,
            )  # fmt: skip


def readers_of(
    peer: PeerEngine, request_id: str, lease: int, attempt: tuple[int, str], wanted: Computed, trace: Trace,
    on_unpublished: Callable[[], None], tell_lost: Callable[[KvferryError], None],
) -> tuple[list[SourceReader], list[SourceReader]]:  # fmt: skip
    """(the ranks that are read, the others). At least one is read: it has the metadata and the verdict."""
    read = peer.plan.reads_from or (min(peer.ranks),)
    every = {
        rank: SourceReader(peer.ranks[rank], request_id, lease, attempt, wanted, trace, on_unpublished, tell_lost)
        for rank in sorted(peer.ranks)
    }
    return [every[rank] for rank in read], [reader for rank, reader in every.items() if rank not in read]


def close_all(readers: Iterable[SourceReader], *, complete: bool) -> None:
    """Each of them, whatever becomes of the others."""
    for reader in readers:
        with tried("close a reading", request_id=reader.request_id, rank=reader.source.rank):
            reader.close(complete=complete)


async def bound_to(
    plan: Plan, readers: Iterable[SourceReader], own: Tables, tokens: tuple[int, int], *, states: bool = True,
    without: Collection[int] = (), rest: int | None = None,
) -> Bound:  # fmt: skip
    """`bind` to what the leases hold now. without: source ranks of which nothing is wanted. rest: what is left of our
    blocks is to be zero, all from this token on; None: it stays as it is. Raises KvferryError."""
    tables = {reader.source.rank: reader.tables for reader in readers}

    def work() -> Bound:
        bound = bind(plan, tables, own, tokens, states=states).without(without)
        if rest is not None:
            bound = replace(bound, left=left(plan, tables, own, tokens, rest))
        _ = bound.nbytes, bound.left.nbytes  # counted here too
        return bound

    rows = len(plan.copies) * sum(len(table.block_ids) for table in own.values())
    return await beside(rows // BOUND_AS_ONE, work)


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
        source = reader.source
        assert source.staging is not None
        self.rank, self.chunks, self.agent_name = source.rank, chunks, source.agent_name
        self.problem: KvferryError | None = None
        """Why not all of them have come, or are not proven."""
        self.span = source.staging.span
        """The source's arena."""
        self._address = source.address
        self._loop = asyncio.get_running_loop()
        self._packed: list[asyncio.Future[peer_pb2.Packed]] = [self._loop.create_future() for _ in chunks]
        self._wanted_at = [0.0] * len(chunks)
        self._in_time = True
        self._vouched: asyncio.Future[None] = self._loop.create_future()
        self._reader, self._opening, self._pair = reader, opening, pair
        self._pairing: asyncio.Task[None] | None = None
        """Pairs anew, or has; a gather that has begun since may find that forgotten as well."""
        self._begin()

    def _begin(self) -> None:
        """A gather of all chunks, of which those that are wanted already are asked for."""
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
            return  # of a gather that was given up
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
                self._pairing = asyncio.create_task(self._pair_anew())
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

    def close(self) -> None:
        """Nobody waits for it any more."""
        if self._pairing is not None:
            self._pairing.cancel()

    def _fail_broken(self, why: str) -> None:
        self.fail(Conflict("protocol", f"peer {self._address} {why}", field="pack"))

    @property
    def may_begin_again(self) -> bool:
        """It went by an announcement, and nothing of it has been packed: its source rank will be asked."""
        return self._reader.announced

    def fail(self, why: KvferryError) -> None:
        """No more of them come. Chunks that have are read to their end."""
        if not all(packed.done() for packed in self._packed):
            self.problem = self.problem or why
        futures: list[asyncio.Future[Any]] = [*self._packed, self._vouched]
        for future in futures:
            if not future.done():
                future.set_exception(why)
                future.exception()  # retrieved: nobody may be waiting
