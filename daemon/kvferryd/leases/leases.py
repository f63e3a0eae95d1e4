"""The leases of one engine rank: published, found and waited for, and ended when they are read or it is time."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from cachetools import LRUCache

from kvferry.errors import Full, KvferryError, Unavailable
from kvferry.schemas import InboundRecord, LeaseState
from kvferryd.ending import tried
from kvferryd.leases.lease import Lease, OnServed, Publication, ReaderId, lease_ended
from kvferryd.leases.words import Words

ANNOUNCED_TO = 4
"""A source with more readers announces nothing: most announcements would concern another reader."""
ANY = 1 << 64
"""Above every lease's number."""
TOMBSTONES = 4096
"""Ended leases remembered, so that a late reader fails at once instead of waiting for a publish."""


class Leases:
    """The leases of one engine rank. `on_end` is called once for each that ends."""

    def __init__(
        self, engine_id: str, epoch: str, on_end: Callable[[Lease], None], limit: int,
        on_served: OnServed = lambda who, nbytes: None,
    ) -> None:  # fmt: skip
        self.engine_id, self.epoch, self._on_served = engine_id, epoch, on_served
        self.on_end, self.limit = on_end, limit
        self.words = Words(limit)
        self.audience: set[Callable[[Lease], None]] = set()
        """Readers to whom a lease is announced when it is published whole at once."""
        self.inbound: set[Callable[[], InboundRecord]] = set()
        """Of every reader that is connected, how it stands."""
        self._live: dict[str, Lease] = {}
        self._ended: dict[str, Lease] = {}
        """The last to end comes last."""
        self._awaited: dict[str, dict[asyncio.Future[Lease], tuple[ReaderId, int]]] = {}
        """Readers that wait for a publish, each with the number of its lease; 0 for whichever comes."""
        self._waiting_at: Counter[str] = Counter()
        """How many of them, by where they call from: no place takes all the waits."""
        self._early: LRUCache[str, dict[ReaderId, tuple[int, int]]] = LRUCache(TOMBSTONES, getsizeof=len)
        """Ranks with nothing to read here, which finished before this rank published, each with lease and attempt."""
        self._refused: LRUCache[str, tuple[int, KvferryError]] = LRUCache(TOMBSTONES)
        """Leases whose publish was refused, and why: their readers need not wait."""
        self._lost: LRUCache[str, int] = LRUCache(TOMBSTONES)
        """The last lease of requests whose readers need not wait."""
        self._closed = ""

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def ended(self) -> Iterator[Lease]:
        """As far as they are remembered; the last to end comes first."""
        return reversed(self._ended.values())

    def get(self, request_id: str) -> Lease | None:
        return self._live.get(request_id)

    def publish(
        self,
        request_id: str,
        number: int,
        said: Publication,
        *,
        ttl_s: float,
        readers: int,
        after: asyncio.Future[None] | None = None,
    ) -> Lease:
        """A new lease, or more tokens of the one of this number. Idempotent for an equal publish.

        A higher number than that of the lease that is there ends that one. Raises KvferryError: `lease_ended` for a
        number that has ended or been passed, `full`, and as `Lease.publish`.
        after: readers see it when this is done; when it fails the lease ends with its error. Cancelled with the lease.
        """
        lease = self._live.get(request_id)
        if self._closed:
            raise Unavailable("session_closed", self._closed, remedy="attach again with a new epoch")
        newest = self._newest(request_id)
        if number < newest or (number == newest and lease is None):
            raise lease_ended(request_id, f"over: its last is {newest}", number)
        if lease is not None and number > newest:
            self._end(lease, LeaseState.REVOKED, f"published anew, as lease {number}")
            lease = None
        if lease is None:
            if len(self._live) >= self.limit:
                remedy = "wait for readers, shorten lease_ttl_s, or raise max_leases"
                why = f"{self.limit} leases are held already"
                raise Full("full", why, field="max_leases", value=self.limit, remedy=remedy)
            lease = Lease(
                (self.engine_id, self.epoch),
                request_id,
                number,
                ttl_s,
                readers,
                self.words.set(),
                self._settle,
                self._on_served,
            )
            self._live[request_id] = lease
            for who, (closed, attempt) in self._early.pop(request_id, {}).items():
                if closed == number:
                    lease.finished(who, attempt=attempt)
            self._ended.pop(request_id, None)  # else its end would keep the place of the one before
            self._lost.pop(request_id, None)
            self._refused.pop(request_id, None)
        if not lease.publish(said, after):
            return lease
        lease.restart_ttl()
        for waiting, wanted in self._no_longer_awaited(request_id, number).items():
            if wanted in (0, number):
                lease.awaited = True
                waiting.set_result(lease)
            else:
                waiting.set_exception(lease_ended(request_id, f"over: its last is {number}", wanted))
        if after is not None:
            after.add_done_callback(lambda _: self._show(lease))
        self._show(lease)
        return lease

    def refuse(self, request_id: str, number: int, why: KvferryError) -> None:
        """It is not published: who waits for it, or comes for it, is told why. Not of one that is: that holds."""
        if request_id not in self._live:
            self._refused[request_id] = number, why
            for waiting in self._no_longer_awaited(request_id, number):
                waiting.set_exception(why.kept())

    def lost(self, leases: Iterable[tuple[str, int]]) -> None:
        """(request, number) of leases of the session before this one, or that could not be published since."""
        self._lost.update(itertools.islice(leases, TOMBSTONES))

    def _newest(self, request_id: str) -> int:
        """The number of the request's last lease, as far as it is remembered; 0 where none is."""
        lease = self._live.get(request_id) or self._ended.get(request_id)
        return lease.number if lease is not None else self._lost.get(request_id, 0)

    def _show(self, lease: Lease) -> None:
        """Let readers see what is published, as far as fences are reached."""
        while lease.fenced and not lease.state.ended:
            _, after = lease.fenced[0]
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
            lease.restart_ttl()
            whole_at_once = lease.version == 1 and not lease.more
            if whole_at_once and not (lease.awaited or lease.live_readers) and len(self.audience) <= ANNOUNCED_TO:
                for announce in self.audience:
                    announce(lease)
            self._settle(lease)

    def held(self, request_id: str, number: int) -> Lease | None:
        """The lease of this number, 0 for whichever there is; None where it is still to come.

        Raises KvferryError (`lease_ended`) where it will not: it has ended, or another is there.
        """
        lease, newest = self._live.get(request_id), self._newest(request_id)
        if lease is not None and number in (0, newest):
            return lease
        if self._closed:
            raise lease_ended(request_id, self._closed, number)
        refused, why = self._refused.get(request_id, (0, None))
        if why is not None and number <= refused:
            raise why.kept()
        if number > newest or not newest:
            return None
        if lease is None and number in (0, newest):
            if request_id in self._ended:
                raise self._ended[request_id].over()
            raise lease_ended(request_id, "lost: its daemon has died, or its engine has lost its session", newest)
        raise lease_ended(request_id, f"over: its last is {newest}", number)

    async def find(self, request_id: str, who: ReaderId, number: int = 0) -> Lease:
        """As `held`, waiting for the publish if that is still to come. The caller bounds the wait."""
        lease = self.held(request_id, number)
        if lease is not None:
            return lease
        if request_id not in self._awaited and len(self._awaited) >= self.limit:
            raise Full("full", f"readers wait for {self.limit} publishes already", value=self.limit)
        if who.host and self._waiting_at[who.host] >= self.limit // 2:
            why = f"{self.limit // 2} readers from {who.host} wait for publishes already"
            raise Full("full", why, field="address", value=who.host, remedy="order a request when it is prefilled")
        published: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        others = self._awaited.setdefault(request_id, {})
        others[published] = who, number
        self._waiting_at[who.host] += 1
        try:
            return await published
        finally:
            self._waiting_at[who.host] -= 1
            if not self._waiting_at[who.host]:
                del self._waiting_at[who.host]
            del others[published]
            if not others and self._awaited.get(request_id) is others:
                del self._awaited[request_id]

    def _no_longer_awaited(self, request_id: str, number: int) -> dict[asyncio.Future[Lease], int]:
        """The readers that wait for a lease of the request up to this number, to be answered now, each with its own."""
        waiting = self._awaited.get(request_id, {})
        up_to = {each: wanted for each, (_, wanted) in waiting.items() if wanted <= number and not each.done()}
        if len(up_to) == len(waiting):
            self._awaited.pop(request_id, None)
        return up_to

    def finished(self, request_id: str, number: int, who: ReaderId, nbytes: int = 0, attempt: int = 0) -> None:
        """A rank has finished without opening the lease of this number, perhaps before its publish. Ignored where that
        lease has ended. Raises as `Lease.finished`."""
        lease, newest = self._live.get(request_id), self._newest(request_id)
        if lease is not None and number == newest:
            lease.finished(who, nbytes, attempt)
        elif number > newest and not self._closed:
            early = self._early.get(request_id, {}) | {who: (number, attempt)}
            if len(early) <= TOMBSTONES:
                self._early[request_id] = early

    def give_up(self, request_id: str, reason: str, who: ReaderId) -> bool:
        """End a lease for one that was to read it: not while another engine reads it, or waits for its publish."""
        lease = self._live.get(request_id)
        waiting = self._awaited.get(request_id, {}).values()
        if (lease is not None and lease.read_by_others(who)) or any(each.engine != who.engine for each, _ in waiting):
            return False
        return self.revoke(request_id, reason)

    def revoke(self, request_id: str, reason: str) -> bool:
        """End a lease whatever its readers do; they will find that it did not hold. Idempotent."""
        lease = self._live.get(request_id)
        self._early.pop(request_id, None)
        if lease is not None:
            self._end(lease, LeaseState.REVOKED, reason)
            return True
        for waiting, wanted in self._no_longer_awaited(request_id, ANY).items():
            waiting.set_exception(lease_ended(request_id, reason, wanted))
        return False

    def revoke_others(self, weights: str, reason: str) -> int:
        """End every lease that other weights than these computed; how many."""
        others = [it.request_id for it in self if it.published is not None and it.published.weights != weights]
        return sum(self.revoke(request_id, reason) for request_id in others)

    def revoke_all(self, reason: str, *, keep_whole: bool = False) -> None:
        """Nothing more will be published: end every lease and every wait for one. keep_whole: not what is published
        whole, which may still be read."""
        self._closed = reason
        ending = [lease.request_id for lease in self if lease.more or not keep_whole]
        for request_id in [*ending, *self._awaited]:
            with tried("end a lease", engine_id=self.engine_id, request_id=request_id):
                self.revoke(request_id, reason)

    def _settle(self, lease: Lease) -> None:
        """End the lease if it is time to: all have read, or its ttl has passed and nobody is reading. What waits for a
        fence has the fence's own deadline."""
        if lease.state.ended:
            return
        if lease.all_read:
            self._end(lease, LeaseState.RELEASED, "")
        elif not lease.live_readers and not lease.fenced and lease.expires_in_s <= 0:
            self._end(lease, LeaseState.EXPIRED, f"nobody read it within {lease.ttl_s:g} s")

    def _end(self, lease: Lease, state: LeaseState, reason: str) -> None:
        self.words.clear(lease.word)  # first of all: a reader that goes on must not find it whole
        del self._live[lease.request_id]
        self._ended[lease.request_id] = lease
        if len(self._ended) > TOMBSTONES:
            del self._ended[next(iter(self._ended))]
        lease.end(state, reason)
        self.on_end(lease)
