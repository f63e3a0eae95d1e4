"""The source side: what an engine published, who reads it, and when its blocks are free again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import KvferryError
from kvferry.schemas import LeaseRecord, LeaseState
from kvferry.tables import Tables
from kvferryd.transfer.seal import Seal, Seals
from kvferryd.transfer.states import LEASE, Machine
from kvferryd.transfer.versions import Versions

ANNOUNCED_TO = 4
"""A source with more readers than that announces nothing: most would hear of leases that are for others."""
TOMBSTONES = 4096
"""Ended leases remembered, so that a late reader is told at once instead of waiting for a publish."""

MAX_FENCED = 512
"""Publishes of one request that wait for fences."""


@dataclass(frozen=True, slots=True)
class ReaderId:
    """One rank of a reading engine."""

    engine_id: str
    epoch: str
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Publication:
    """What one publish says: tokens [0, num_tokens) are in these blocks."""

    tables: Tables
    num_tokens: int
    metadata: bytes
    more: bool


@dataclass(slots=True, eq=False)
class Opened:
    """What one rank is to a lease. Who opened it holds this very object: nobody else closes it."""

    live: bool = True
    read: bool = False


class Lease:
    """One request's published blocks on this rank."""

    def __init__(self, engine_id: str, epoch: str, request_id: str, ttl_s: float, readers: int, seal: Seal) -> None:
        self.engine_id, self.epoch, self.request_id = engine_id, epoch, request_id
        self.ttl_s = ttl_s
        self.seal = seal
        self.published: Publication | None = None
        """The last that was published. Readers see it when its fence, and those before it, are reached."""
        self.tables: Tables = {}
        self.num_tokens = 0
        self.metadata = b""
        self.expected = readers
        self.awaited = False
        """Whether readers waited for the first publish."""
        self.machine: Machine[LeaseState] = Machine(LEASE, LeaseState.PUBLISHING)
        self.version = 0
        self.reason = ""
        self.problem: KvferryError | None = None
        """Why it was revoked, where nobody asked for that."""
        self._fenced: deque[tuple[Publication, asyncio.Future[None] | None]] = deque()
        """Published and not yet seen by readers, in order."""
        self._changed = asyncio.Event()
        self.versions = Versions()
        self._readers: dict[ReaderId, Opened] = {}
        self._deadline = asyncio.get_running_loop().time() + ttl_s

    @property
    def state(self) -> LeaseState:
        return self.machine.state

    @property
    def more(self) -> bool:
        """Whether readers will see more of it."""
        return self.state is LeaseState.PUBLISHING

    def over(self) -> KvferryError:
        """What a reader is told of a lease that has ended."""
        if self.problem is not None:
            return self.problem
        return _lease_ended(self.request_id, f"{self.state.value}{f': {self.reason}' if self.reason else ''}")

    @property
    def changing(self) -> asyncio.Event:
        """Set at the next publish or at the end."""
        return self._changed

    async def changed(self) -> None:
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def live_readers(self) -> int:
        return sum(reader.live for reader in self._readers.values())

    def record(self) -> LeaseRecord:
        left = self._deadline - asyncio.get_running_loop().time()
        return LeaseRecord(
            request_id=self.request_id,
            engine_id=self.engine_id,
            epoch=self.epoch,
            state=self.state,
            num_tokens=self.num_tokens,
            readers_expected=self.expected,
            readers_open=self.live_readers,
            readers_closed=sum(reader.read for reader in self._readers.values()),
            expires_in_ms=None if self.live_readers or self.state.ended else max(0.0, left * 1e3),
        )

    def _all_read(self) -> bool:
        """Whether as many engines as expected have read with all their ranks."""
        if self.more:
            return False
        by_engine: dict[tuple[str, str], list[ReaderId]] = {}
        for who, reader in self._readers.items():
            if reader.read:
                by_engine.setdefault((who.engine_id, who.epoch), []).append(who)
        return sum(len(ranks) >= ranks[0].world_size for ranks in by_engine.values()) >= self.expected


@dataclass(slots=True)
class _Awaited:
    """A publish that readers wait for."""

    lease: asyncio.Future[Lease]
    readers: int = 0


@dataclass(slots=True)
class Leases:
    """The leases of one engine rank. `on_end` is called once for each that ends."""

    engine_id: str
    epoch: str
    on_end: Callable[[Lease], None]
    limit: int
    seals: Seals = field(init=False)
    audience: set[Callable[[Lease], None]] = field(default_factory=set)
    """Readers to whom a lease is announced when it is published whole at once."""
    _live: dict[str, Lease] = field(default_factory=dict)
    _ended: OrderedDict[str, Lease] = field(default_factory=OrderedDict)
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _awaited: dict[str, _Awaited] = field(default_factory=dict)
    _early: OrderedDict[str, set[ReaderId]] = field(default_factory=OrderedDict)
    _early_count: int = 0
    _closed: str = ""

    def __post_init__(self) -> None:
        self.seals = Seals(self.limit)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def publish(
        self,
        request_id: str,
        tables: Tables,
        num_tokens: int,
        *,
        more: bool,
        metadata: bytes,
        ttl_s: float,
        readers: int,
        after: asyncio.Future[None] | None = None,
    ) -> Lease:
        """A new lease, or more tokens of one that is being published. Idempotent for an equal publish.

        after: readers see it when this is done; when it fails the lease ends with its error. Cancelled with the lease.
        """
        said = Publication(tables, num_tokens, metadata, more)
        lease = self._live.get(request_id)
        if self._closed:
            raise KvferryError("session_closed", self._closed, remedy="attach again with a new epoch")
        if lease is None:
            if len(self._live) >= self.limit:
                raise KvferryError(
                    "full",
                    f"{self.limit} leases are held already",
                    field="max_leases",
                    value=self.limit,
                    remedy="wait for readers, shorten lease_ttl_s, or raise max_leases",
                )
            lease = self._live[request_id] = Lease(
                self.engine_id, self.epoch, request_id, ttl_s, readers, self.seals.set()
            )
            early = self._early.pop(request_id, set())
            self._early_count -= len(early)
            lease._readers = {who: Opened(live=False, read=True) for who in early}
            self._ended.pop(request_id, None)
        before = lease.published
        if before is None:
            pass
        elif not before.more:
            if before == said:
                return lease
            raise KvferryError(
                "already_published",
                f"request {request_id} was published whole already",
                field="request_id",
                value=request_id,
                remedy="use more=True for every publish but the last, or another request id",
            )
        elif num_tokens < before.num_tokens:
            raise KvferryError(
                "published_less",
                f"request {request_id} had {before.num_tokens} tokens published already",
                field="num_tokens",
                value=num_tokens,
                remedy="published tokens cannot be taken back: abort the request",
            )
        elif len(lease._fenced) >= MAX_FENCED:
            raise KvferryError(
                "full",
                f"{MAX_FENCED} publishes of request {request_id} wait for fences",
                field="after",
                value=MAX_FENCED,
                remedy="publish less often, or when the stream has been synchronised",
            )
        else:
            _check_kept(request_id, before.tables, tables)
        lease.published = said
        lease._fenced.append((said, after))
        self._restart_ttl(lease)
        awaited = self._awaited.pop(request_id, None)
        if awaited is not None:
            lease.awaited = True
            awaited.lease.set_result(lease)
        if after is not None:
            after.add_done_callback(lambda _: self._show(lease))
        self._show(lease)
        return lease

    def _show(self, lease: Lease) -> None:
        """Let readers see what is published, as far as fences are reached."""
        while lease._fenced and not lease.state.ended:
            said, after = lease._fenced[0]
            if after is not None:
                if not after.done():
                    return
                problem = after.exception()
                if problem is not None:
                    assert isinstance(problem, KvferryError)
                    lease.problem = problem
                    self._end(lease, LeaseState.REVOKED, problem.message)
                    return
            lease._fenced.popleft()
            lease.tables, lease.num_tokens, lease.metadata = said.tables, said.num_tokens, said.metadata
            lease.version = lease.versions.add(said.tables)
            if not said.more:
                lease.machine.move(LeaseState.PUBLISHED)
            lease.wake()
            self._restart_ttl(lease)
            whole_at_once = lease.version == 1 and not said.more
            if whole_at_once and not (lease.awaited or lease.live_readers) and len(self.audience) <= ANNOUNCED_TO:
                for announce in self.audience:
                    announce(lease)
            self._settle(lease)

    async def find(self, request_id: str) -> Lease:
        """The lease, waiting for its publish if that is still to come. The caller bounds the wait."""
        lease = self._live.get(request_id)
        if lease is not None:
            return lease
        if self._closed:
            raise _lease_ended(request_id, self._closed)
        if request_id in self._ended:
            raise self._ended[request_id].over()
        awaited = self._awaited.get(request_id)
        if awaited is None:
            if len(self._awaited) >= self.limit:
                raise KvferryError("full", f"readers wait for {self.limit} publishes already", value=self.limit)
            awaited = self._awaited[request_id] = _Awaited(asyncio.get_running_loop().create_future())
        awaited.readers += 1
        try:
            return await asyncio.shield(awaited.lease)
        finally:
            awaited.readers -= 1
            if not awaited.readers and self._awaited.get(request_id) is awaited:
                del self._awaited[request_id]

    @contextmanager
    def reading(self, lease: Lease, who: ReaderId) -> Iterator[Opened]:
        """`who` is a live reader inside this block; yields what `close` asks for."""
        known = lease._readers.get(who)
        if known is not None and known.live:
            raise KvferryError(
                "already_reading",
                f"{who.engine_id} rank {who.rank} reads request {lease.request_id} already",
                field="request_id",
                value=lease.request_id,
                remedy="wait for that read to end",
            )
        self._check_room(lease, who)
        reader = lease._readers[who] = Opened()
        try:
            yield reader
        finally:
            reader.live = False
            self._settle(lease)

    def packed(self, lease: Lease, who: ReaderId) -> None:
        """All that this live reader wants has been gathered while the lease held: it counts as one that has read."""
        reader = lease._readers.get(who)
        if reader is not None and reader.live and not lease.state.ended:
            reader.read = True
            self._settle(lease)

    async def follow(self, lease: Lease) -> AsyncIterator[int]:
        """The lease's version now and after every publish. Ends after the last; raises when the lease ends before."""
        seen = 0
        while True:
            while lease.version == seen and not lease.state.ended:
                await lease.changed()
            seen = lease.version
            if lease.state in (LeaseState.EXPIRED, LeaseState.REVOKED):
                raise lease.over()
            last = not lease.more  # as it is told now: while the reader is told, more may be published
            yield seen
            if last:
                return

    async def ended(self, lease: Lease) -> None:
        while not lease.state.ended:
            await lease.changed()

    def close(self, request_id: str, who: ReaderId, opened: Opened | None, complete: bool) -> tuple[bool, str]:
        """A reader has finished: (whether the lease held throughout, why not). Idempotent.

        None is a rank that had nothing to read here, or went by an announcement; it only counts as having read.
        """
        lease = self._live.get(request_id) or self._ended.get(request_id)
        if lease is None and complete and opened is None and not self._closed:
            self._remember_early(request_id, who)
            return True, ""
        if lease is None:
            return False, "the lease is not known"
        reader = lease._readers.get(who)
        if opened is not None or (reader is not None and reader.live):
            if reader is None or reader is not opened:
                raise _not_opened(request_id)
            reader.live = False
        elif reader is None:
            self._check_room(lease, who)
            reader = lease._readers[who] = Opened(live=False)
        held = lease.state in (LeaseState.PUBLISHING, LeaseState.PUBLISHED) or (
            lease.state is LeaseState.RELEASED and (reader.read or opened is None)
        )
        reader.read = reader.read or (complete and held)
        self._settle(lease)
        return held, "" if held else f"the lease is {lease.state.value}: {lease.reason}"

    def _check_room(self, lease: Lease, who: ReaderId) -> None:
        if who not in lease._readers and len(lease._readers) >= TOMBSTONES:
            raise KvferryError("full", f"request {lease.request_id} has {TOMBSTONES} readers already", value=TOMBSTONES)

    def _remember_early(self, request_id: str, who: ReaderId) -> None:
        """A rank with nothing to read here was through before this rank published."""
        early = self._early.setdefault(request_id, set())
        self._early_count += who not in early
        early.add(who)
        while self._early_count > TOMBSTONES:
            self._early_count -= len(self._early.popitem(last=False)[1])

    def revoke(self, request_id: str, reason: str) -> bool:
        """End a lease whatever its readers do: they will be told that it did not hold. Idempotent."""
        lease = self._live.get(request_id)
        self._early_count -= len(self._early.pop(request_id, ()))
        if lease is None:
            awaited = self._awaited.pop(request_id, None)
            if awaited is not None:
                awaited.lease.set_exception(_lease_ended(request_id, reason))
            return False
        self._end(lease, LeaseState.REVOKED, reason)
        return True

    def get(self, request_id: str) -> Lease | None:
        return self._live.get(request_id)

    def revoke_all(self, reason: str) -> None:
        """The engine's registration is over: nothing of it is read from now on."""
        self._closed = reason
        for request_id in [*self._live, *self._awaited]:
            self.revoke(request_id, reason)

    def revoke_unfinished(self, reason: str) -> None:
        """Nothing more will be published: end what is being published or waited for. What is whole stays."""
        self._closed = reason
        for request_id in [*(lease.request_id for lease in self if lease.more), *self._awaited]:
            self.revoke(request_id, reason)

    def _restart_ttl(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        self._cancel_timer(lease)
        lease._deadline = loop.time() + lease.ttl_s
        self._timers[lease.request_id] = loop.call_at(lease._deadline, self._settle, lease)

    def _cancel_timer(self, lease: Lease) -> None:
        timer = self._timers.pop(lease.request_id, None)
        if timer is not None:
            timer.cancel()

    def _settle(self, lease: Lease) -> None:
        """End the lease if it is time to: all have read, or its ttl has passed and nobody is reading. What waits for a
        fence has the fence's own deadline."""
        if lease.state.ended:
            return
        if lease._all_read():
            self._end(lease, LeaseState.RELEASED, "")
        elif not lease.live_readers and not lease._fenced and asyncio.get_running_loop().time() >= lease._deadline:
            self._end(lease, LeaseState.EXPIRED, f"nobody read it within {lease.ttl_s:g} s")

    def _end(self, lease: Lease, state: LeaseState, reason: str) -> None:
        lease.machine.move(state)
        self.seals.break_(lease.seal)  # first of all: who reads on must not find it whole
        lease.reason = reason
        lease.tables, lease.metadata, lease.published = {}, b"", None  # a tombstone needs none of them
        for _, after in lease._fenced:
            if after is not None:
                after.cancel()
        lease._fenced.clear()
        lease.versions = Versions()
        self._cancel_timer(lease)
        del self._live[lease.request_id]
        self._ended[lease.request_id] = lease
        while len(self._ended) > TOMBSTONES:
            self._ended.popitem(last=False)
        lease.wake()
        self.on_end(lease)


def _check_kept(request_id: str, published: Tables, tables: Tables) -> None:
    """Readers may be reading what was published before: it stays where it is."""
    for name, before in published.items():
        now = tables.get(name)
        if now is None or now.first_token != before.first_token:
            continue  # a window that moves on
        kept = now.block_ids[: len(before.block_ids)]
        if not np.array_equal(kept, before.block_ids):
            raise KvferryError(
                "published_blocks_moved",
                f"request {request_id} had other blocks of group {name} published already",
                field=f"tables.{name}.block_ids",
                value=kept.tolist(),
                remedy="append blocks only; what was published stays in its blocks until the lease ends",
            )


def _not_opened(request_id: str) -> KvferryError:
    return KvferryError(
        "not_opened",
        f"request {request_id} is being read by this rank, in another reading",
        field="reading",
        remedy="close it by the number with which it was opened, on the same stream",
    )


def _lease_ended(request_id: str, why: str) -> KvferryError:
    return KvferryError(
        "lease_ended",
        f"the lease of request {request_id} is {why}",
        field="request_id",
        value=request_id,
        remedy="prefill the request again",
    )
