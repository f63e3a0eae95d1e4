"""The source side: one request's published blocks, who reads them, and whether they still hold."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from kvferry.errors import Conflict, Full, KvferryError
from kvferry.schemas import LeaseReader, LeaseRecord, LeaseState
from kvferry.tables import BlockTable, Tables
from kvferry.v1 import peer_pb2
from kvferryd.leases.words import Word
from kvferryd.observe.logs import UNTRACED
from kvferryd.states import LEASE, Machine

MAX_READERS = 4096
"""Ranks that one lease remembers as readers."""
MAX_FENCED = 512
"""Publishes of one request that wait for fences."""
NOTHING = BlockTable.of([])


@dataclass(frozen=True, slots=True)
class ReaderId:
    """One rank of a reading engine. Who has not its key is another reader, whatever its name."""

    engine_id: str
    epoch: str
    rank: int
    world_size: int
    key: bytes = field(default=b"", repr=False)
    host: str = field(default="", compare=False)
    """Where it calls from."""

    @property
    def engine(self) -> tuple[str, str, int, bytes]:
        """Equal for all ranks of one engine."""
        return self.engine_id, self.epoch, self.world_size, self.key


def reader_id(reader: peer_pb2.Reader) -> ReaderId:
    return ReaderId(reader.engine_id, reader.epoch, reader.rank, reader.world_size, reader.key)


OnServed = Callable[[ReaderId, int], None]
"""Called when a reader has read more: with so many bytes, by its own word or as they were packed for it."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What one publish says: tokens [0, num_tokens) are in these blocks."""

    tables: Tables
    num_tokens: int
    metadata: bytes
    more: bool
    digest: bytes = b""
    """Names what was computed; equal in every publish of one lease."""
    weights: str = ""
    """The name of the weights that computed it."""


@dataclass(slots=True, eq=False)
class Opened:
    """One rank that reads a lease. Only the holder of this very object can close it."""

    lease: Lease
    who: ReaderId
    attempt: int = 0
    """The reading engine's, 0 where its daemons count. An engine has read when all ranks of one attempt have."""
    live: bool = True
    read: bool = False
    nbytes: int = 0
    """Read of the lease, as far as is known."""

    def packed(self, nbytes: int = 0) -> None:
        """All that this reader wants has been gathered while the lease held: it counts as one that has read. nbytes: of
        the last gather."""
        self._count(self.nbytes + nbytes)
        self.lease.note(self, live=self.live, read=self.live)

    def close(self, *, complete: bool, nbytes: int = 0, attempt: int = 0) -> None:
        """The reader has gone; complete: with all that it wanted. nbytes: that it has read in all. attempt: the number
        that its own has by now; 0: that of the opening. Idempotent."""
        self._count(nbytes)
        self.lease.note(self, live=False, read=complete, attempt=attempt)

    def _count(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            self.lease.on_served(self.who, nbytes - self.nbytes)
            self.nbytes = nbytes


class Lease:
    """One request's published blocks on this rank."""

    def __init__(
        self,
        owner: tuple[str, str],
        request_id: str,
        number: int,
        ttl_s: float,
        readers: int,
        word: Word,
        settle: Callable[[Lease], None],
        on_served: OnServed,
    ) -> None:
        """owner: engine and epoch. number: of the owner's counter, the same on all its ranks. settle: ends it if it is
        time to; called when a reader or its time to live ends."""
        self.on_served = on_served
        self.created_at = time.time()
        self.ended_at: float | None = None
        self.engine_id, self.epoch = owner
        self.request_id, self.number, self.ttl_s, self.word = request_id, number, ttl_s, word
        self.published: Publication | None = None
        """The last that was published. Readers see it when its fence, and those before it, are reached."""
        self.tables: Tables = {}
        self.num_tokens = 0
        self.metadata = b""
        self.digest = b""
        self.weights = ""
        self.expected = readers
        self.awaited = False
        """Whether readers waited for the first publish."""
        self.machine: Machine[LeaseState] = Machine(LEASE, LeaseState.PUBLISHING)
        self.version = 0
        """How many publishes readers have seen."""
        self.reason = ""
        self.trace = UNTRACED
        """Of the reader that came last."""
        self.problem: KvferryError | None = None
        """Why it was revoked, where nobody asked for that."""
        self.fenced: deque[tuple[Publication, asyncio.Future[None] | None]] = deque()
        """Published and not yet seen by readers, in order, each with its fence."""
        self.changing = asyncio.Event()
        """Set at the next publish or at the end; another event takes its place."""
        self.settle = functools.partial(settle, self)
        self._expiry = asyncio.get_running_loop().call_later(ttl_s, self.settle)
        self._readers: dict[ReaderId, Opened] = {}
        # Counted, not looked up: thousands may read one lease, and each looks whether all have.
        self.live_readers = self._reading = self._whole = 0
        """Readers that are there, those of them that have not read, and engines of which all ranks have."""
        self._ranks_read: Counter[tuple[str, str, int, bytes]] = Counter()
        """Ranks of each engine that have read, in its newest attempt."""
        self._attempts: LRUCache[tuple[str, str, int, bytes], int] = LRUCache(MAX_READERS)
        """The newest attempt of each engine that has read or reads, or has left."""

    @property
    def state(self) -> LeaseState:
        return self.machine.state

    @property
    def more(self) -> bool:
        """Whether readers will see more of it."""
        return self.state is LeaseState.PUBLISHING

    def over(self) -> KvferryError:
        """Why a reader cannot read it any more."""
        if self.problem is not None:
            return self.problem.kept()
        why = f"{self.state.value}{f': {self.reason}' if self.reason else ''}"
        return lease_ended(self.request_id, why, self.number)

    async def follow(self) -> AsyncIterator[int]:
        """Its version now and after every publish. Ends after the last; raises when the lease ends before."""
        seen = 0
        while True:
            while self.version == seen and not self.state.ended:
                await self.changing.wait()
            seen = self.version
            if self.state in (LeaseState.EXPIRED, LeaseState.REVOKED):
                raise self.over()
            last = not self.more  # of this version: more may be published before the caller comes back
            yield seen
            if last:
                return

    async def ended(self) -> None:
        while not self.state.ended:
            await self.changing.wait()

    def _wake(self) -> None:
        self.changing.set()
        self.changing = asyncio.Event()

    def restart_ttl(self) -> None:
        self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(self.ttl_s, self.settle)

    @property
    def expires_in_s(self) -> float:
        """Until it expires if nobody reads it."""
        return self._expiry.when() - asyncio.get_running_loop().time()

    def publish(self, said: Publication, after: asyncio.Future[None] | None) -> bool:
        """Queue it, to be shown after the publishes before it. False for an equal publish, which changes nothing.

        Raises KvferryError: `already_published`, `published_less`, `published_blocks_moved`,
        `published_other_prompt`, `full`.
        """
        before = self.published
        if before is not None:
            if before == said and not before.more:
                return False
            self._check_follows(before, said)
        self.published = said
        self.fenced.append((said, after))
        return True

    def _check_follows(self, before: Publication, said: Publication) -> None:
        request = f"request {self.request_id}"
        if not before.more:
            why = f"{request} was published whole already"
            remedy = "use more=True for every publish but the last, or another request id"
            raise Conflict("already_published", why, field="request_id", value=self.request_id, remedy=remedy)
        if said.num_tokens < before.num_tokens:
            why = f"{request} had {before.num_tokens} tokens published already"
            remedy = "published tokens cannot be taken back: abort the request"
            raise Conflict("published_less", why, field="num_tokens", value=said.num_tokens, remedy=remedy)
        if said.digest != before.digest:
            why, remedy = f"{request} had another digest before", "publish one prompt under one request id"
            raise Conflict("published_other_prompt", why, field="digest", value=said.digest.hex(), remedy=remedy)
        if len(self.fenced) >= MAX_FENCED:
            why = f"{MAX_FENCED} publishes of {request} wait for fences"
            remedy = "publish less often, or when the stream has been synchronised"
            raise Full("full", why, field="after", value=MAX_FENCED, remedy=remedy)
        for name, table in before.tables.items():  # readers may be reading what was published before
            now, count = said.tables.get(name, NOTHING), len(table.block_ids)
            if count and BlockTable(now.block_ids[:count], now.first_token) != table:
                why, field = f"{request} had other blocks of group {name} published already", f"tables.{name}.block_ids"
                value = f"{now.block_ids[:count].tolist()} from token {now.first_token}"
                remedy = "append blocks only; what was published stays in its blocks until the lease ends"
                raise Conflict("published_blocks_moved", why, field=field, value=value, remedy=remedy)

    def show_next(self) -> None:
        """Let readers see what was published next: its fence is reached."""
        said, _ = self.fenced.popleft()
        self.tables, self.num_tokens, self.metadata = said.tables, said.num_tokens, said.metadata
        self.digest, self.weights = said.digest, said.weights
        self.version += 1
        if not said.more:
            self.machine.move(LeaseState.PUBLISHED)
        self._wake()

    def end(self, state: LeaseState, reason: str) -> None:
        """Keep only what a tombstone needs, and wake everybody who waits. The validity word is cleared already."""
        self.machine.move(state)
        self.reason = reason
        self.ended_at = time.time()
        self._expiry.cancel()
        self.tables, self.metadata, self.published = {}, b"", None
        for _, after in self.fenced:
            if after is not None:
                after.cancel()
        self.fenced.clear()
        self._wake()

    @contextmanager
    def reading(self, who: ReaderId, attempt: int = 0) -> Iterator[Opened]:
        """`who` is a live reader inside this block. Reading of its engine in lower attempts does not count any more.

        Raises KvferryError: `already_reading`, `full`, why it is over.
        """
        if self.state.ended:  # since `who` found it
            raise self.over()
        known = self._readers.get(who)
        if known is not None and known.live:
            why = f"{who.engine_id} rank {who.rank} reads request {self.request_id} already"
            remedy = "wait for that read to end"
            raise Conflict("already_reading", why, field="request_id", value=self.request_id, remedy=remedy)
        reader = self._add_reader(who, Opened(self, who, attempt))
        try:
            yield reader
        finally:
            reader.close(complete=False)
            if not reader.read and self._readers.get(who) is reader:
                del self._readers[who]

    def finished(self, who: ReaderId, nbytes: int = 0, attempt: int = 0) -> None:
        """A rank has finished without opening the lease: it had nothing to read, or was quick with an announcement.

        Raises KvferryError: `not_opened`, `full`.
        """
        reader = self._readers.get(who) or self._add_reader(who, Opened(self, who, attempt, live=False))
        if reader.live:
            why = f"request {self.request_id} is being read by this rank, in another reading"
            remedy = "close it by the number with which it was opened, on the same stream"
            raise Conflict("not_opened", why, field="reading", remedy=remedy)
        reader.close(complete=True, nbytes=nbytes, attempt=attempt)

    def _add_reader(self, who: ReaderId, reader: Opened) -> Opened:
        if who not in self._readers and len(self._readers) >= MAX_READERS:
            raise Full("full", f"request {self.request_id} has {MAX_READERS} readers already", value=MAX_READERS)
        if (before := self._readers.get(who)) is not None:
            self._count(before, -1)
        self._readers[who] = reader
        self._count(reader, 1)
        self._take_back(reader)
        return reader

    def _take_back(self, reader: Opened) -> None:
        """The reader's engine is in this attempt by now: what its ranks have read in lower ones is read anew."""
        engine = reader.who.engine
        newest = self._attempts.setdefault(engine, reader.attempt)
        if reader.attempt <= newest:
            return
        self._attempts[engine] = reader.attempt
        for rank in range(reader.who.world_size):
            other = self._readers.get(replace(reader.who, rank=rank))
            if other is not None and other.read and other.attempt < reader.attempt:
                self._count(other, -1)
                other.read = False
                self._count(other, 1)

    def note(self, reader: Opened, *, live: bool, read: bool, attempt: int = 0) -> None:
        """A reader has read, or gone, after which the lease may be over. Ignored if another reader has replaced it.
        Reading in an attempt that the engine has passed does not count."""
        counts = self._readers.get(reader.who) is reader
        if counts:
            self._count(reader, -1)
        reader.attempt = max(attempt, reader.attempt)
        reads = read and not self.state.ended and reader.attempt >= self._attempts.get(reader.who.engine, 0)
        reader.live, reader.read = live, reader.read or reads
        if counts:
            self._count(reader, 1)
            self._take_back(reader)
        self.settle()

    def _count(self, reader: Opened, by: int) -> None:
        """by: 1 as it is now, -1 as it was."""
        self.live_readers += by * reader.live
        self._reading += by * (reader.live and not reader.read)
        if reader.read:
            engine, ranks = reader.who.engine, self._ranks_read
            was_whole = ranks[engine] >= reader.who.world_size
            ranks[engine] += by
            self._whole += (ranks[engine] >= reader.who.world_size) - was_whole
            if not ranks[engine]:
                del ranks[engine]

    @property
    def all_read(self) -> bool:
        """Whether as many engines as expected have read with all their ranks, and nobody else is reading."""
        return not (self.more or self._reading) and self._whole >= self.expected

    def read_by_others(self, who: ReaderId) -> bool:
        """Whether an engine other than that of `who` is reading it."""
        return any(it.live and each.engine != who.engine for each, it in self._readers.items())

    @property
    def age_s(self) -> float:
        """Until now, or its end."""
        return (self.ended_at or time.time()) - self.created_at

    def readers(self) -> list[LeaseReader]:
        """Who reads it, or has."""
        return [
            LeaseReader(
                engine_id=who.engine_id, epoch=who.epoch, rank=who.rank, world_size=who.world_size,
                state="read" if it.read else "reading" if it.live else "left", bytes=it.nbytes, attempt=it.attempt,
            )
            for who, it in self._readers.items()
        ]  # fmt: skip

    def record(self) -> LeaseRecord:
        readers = self.readers()
        return LeaseRecord(
            request_id=self.request_id,
            lease=self.number,
            engine_id=self.engine_id,
            epoch=self.epoch,
            state=self.state,
            num_tokens=self.num_tokens,
            weights=self.weights,
            readers_expected=self.expected,
            readers_open=self.live_readers,
            readers_closed=sum(reader.read for reader in self._readers.values()),
            expires_in_ms=None if self.live_readers or self.state.ended else max(0.0, self.expires_in_s * 1e3),
            created_at=self.created_at,
            ended_at=self.ended_at,
            age_ms=round(1e3 * self.age_s, 3),
            reason=self.reason,
            bytes=sum(reader.bytes for reader in readers),
            readers=readers,
        )


def announced_as(request_id: str) -> str:
    """What readers that may not know the request id are told instead: with the id they could close its lease."""
    return hashlib.sha256(request_id.encode()).hexdigest()


def lease_ended(request_id: str, why: str, number: int = 0) -> KvferryError:
    """The error for a lease that cannot be read any more, or never could. number: its own; 0 where none is known."""
    which = f"lease {number}" if number else "the lease"
    why, remedy = f"{which} of request {request_id} is {why}", "prefill the request again"
    return Conflict("lease_ended", why, field="request_id", value=request_id, remedy=remedy)
