"""The leases of one engine rank: published, found and waited for, and ended when they are read or it is time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.errors import Full, KvferryError, Unavailable
from kvferry.schemas import LeaseState
from kvferry.tables import Tables
from kvferryd.leases.lease import Lease, Opened, Publication, ReaderId, lease_ended
from kvferryd.leases.words import Words

ANNOUNCED_TO = 4
"""A source with more readers announces nothing: most announcements would concern another reader."""
TOMBSTONES = 4096
"""Ended leases remembered, so that a late reader fails at once instead of waiting for a publish."""


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
    words: Words = field(init=False)
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
        self.words = Words(self.limit)

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
        digest: bytes = b"",
    ) -> Lease:
        """A new lease, or more tokens of one that is being published. Idempotent for an equal publish.

        after: readers see it when this is done; when it fails the lease ends with its error. Cancelled with the lease.
        """
        said = Publication(tables, num_tokens, metadata, more, digest)
        lease = self._live.get(request_id)
        if self._closed:
            raise Unavailable("session_closed", self._closed, remedy="attach again with a new epoch")
        if lease is None:
            if len(self._live) >= self.limit:
                raise Full(
                    "full",
                    f"{self.limit} leases are held already",
                    field="max_leases",
                    value=self.limit,
                    remedy="wait for readers, shorten lease_ttl_s, or raise max_leases",
                )
            lease = self._live[request_id] = Lease(
                self.engine_id, self.epoch, request_id, ttl_s, readers, self.words.set()
            )
            early = self._early.pop(request_id, set())
            self._early_count -= len(early)
            for who in early:
                lease.read_early(who)
            self._ended.pop(request_id, None)
        if not lease.publish(said, after):
            return lease
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
        while lease.fenced and not lease.state.ended:
            after = lease.next_fence
            if after is not None:
                if not after.done():
                    return
                problem = after.exception()
                if problem is not None:
                    assert isinstance(problem, KvferryError)
                    lease.problem = problem
                    self._end(lease, LeaseState.REVOKED, problem.message)
                    return
            lease.show_next()
            self._restart_ttl(lease)
            whole_at_once = lease.version == 1 and not lease.more
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
            raise lease_ended(request_id, self._closed)
        if request_id in self._ended:
            raise self._ended[request_id].over()
        awaited = self._awaited.get(request_id)
        if awaited is None:
            if len(self._awaited) >= self.limit:
                raise Full("full", f"readers wait for {self.limit} publishes already", value=self.limit)
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
        reader = lease.open(who)
        try:
            yield reader
        finally:
            reader.live = False
            self._settle(lease)

    def packed(self, lease: Lease, who: ReaderId) -> None:
        """All that this live reader wants has been gathered while the lease held: it counts as one that has read."""
        lease.packed(who)
        self._settle(lease)

    def close(self, request_id: str, who: ReaderId, opened: Opened | None, complete: bool) -> tuple[bool, str]:
        """A reader has finished: (whether the lease held throughout, why not). Idempotent.

        opened: None of a rank that had nothing to read here; it only counts as having read.
        """
        # The request may have been published again since: what was opened is closed where it was opened.
        lease = opened.lease if opened else self._live.get(request_id) or self._ended.get(request_id)
        if lease is None and complete and opened is None and not self._closed:
            self._remember_early(request_id, who)
            return True, ""
        if lease is None:
            return False, "the lease is not known"
        held = lease.close(who, opened, complete)
        self._settle(lease)
        return held

    def _remember_early(self, request_id: str, who: ReaderId) -> None:
        """A rank with nothing to read here finished before this rank published."""
        early = self._early.setdefault(request_id, set())
        self._early_count += who not in early
        early.add(who)
        while self._early_count > TOMBSTONES:
            self._early_count -= len(self._early.popitem(last=False)[1])

    def revoke(self, request_id: str, reason: str) -> bool:
        """End a lease whatever its readers do; they will find that it did not hold. Idempotent."""
        lease = self._live.get(request_id)
        self._early_count -= len(self._early.pop(request_id, ()))
        if lease is None:
            awaited = self._awaited.pop(request_id, None)
            if awaited is not None:
                awaited.lease.set_exception(lease_ended(request_id, reason))
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
        lease.deadline = loop.time() + lease.ttl_s
        self._timers[lease.request_id] = loop.call_at(lease.deadline, self._settle, lease)

    def _cancel_timer(self, lease: Lease) -> None:
        timer = self._timers.pop(lease.request_id, None)
        if timer is not None:
            timer.cancel()

    def _settle(self, lease: Lease) -> None:
        """End the lease if it is time to: all have read, or its ttl has passed and nobody is reading. What waits for a
        fence has the fence's own deadline."""
        if lease.state.ended:
            return
        if lease.all_read:
            self._end(lease, LeaseState.RELEASED, "")
        elif not lease.live_readers and not lease.fenced and asyncio.get_running_loop().time() >= lease.deadline:
            self._end(lease, LeaseState.EXPIRED, f"nobody read it within {lease.ttl_s:g} s")

    def _end(self, lease: Lease, state: LeaseState, reason: str) -> None:
        self.words.clear(lease.word)  # first of all: a reader that goes on must not find it whole
        lease.end(state, reason)
        self._cancel_timer(lease)
        del self._live[lease.request_id]
        self._ended[lease.request_id] = lease
        while len(self._ended) > TOMBSTONES:
            self._ended.popitem(last=False)
        self.on_end(lease)
