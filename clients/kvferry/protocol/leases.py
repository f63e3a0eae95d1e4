"""The leases of one engine rank: published, opened and waited for, and ended when they are read or it is time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, assert_never

from kvferry.errors import Full, KvferryError, Unavailable
from kvferry.protocol import events as e
from kvferry.protocol.kept import Alarms, Latest
from kvferry.protocol.lease import Lease, lease_ended, why_over
from kvferry.protocol.readers import Finished
from kvferry.protocol.states import LeaseState
from kvferry.protocol.values import Account, ReaderId, Reading, Sizes
from kvferry.protocol.waits import Waits

if TYPE_CHECKING:
    from kvferry.protocol.serving import Serving

ANNOUNCED_TO = 4
"""A source with more readers announces nothing: most announcements would concern another reader."""
TOMBSTONES = 4096
"""Ended leases remembered, so that a late reader fails at once instead of waiting for a publish."""
Effects = list[e.SourceEffect]


class Leases:
    def __init__(self, limit: int, streams: Mapping[int, Serving]) -> None:
        """limit: leases that may be held. streams: of readers, which are told of their leases."""
        self.limit, self._streams = limit, streams
        self._live: dict[str, Lease] = {}
        self._opened: dict[Reading, tuple[Lease, ReaderId]] = {}
        self._waits = Waits(limit)
        self._ended: Latest[str, Account] = Latest(TOMBSTONES)
        self._early: Latest[tuple[str, int], Finished] = Latest(TOMBSTONES, len)
        """Ranks that finish while the lease of this request and number is not published, or open by another reading."""
        self._refused: Latest[str, tuple[int, KvferryError]] = Latest(TOMBSTONES)
        """The last lease of each request whose publish was refused, and why: its readers need not wait."""
        self._lost: Latest[str, int] = Latest(TOMBSTONES)
        """The last lease of requests whose readers need not wait."""
        self._closed = ""
        self._audience: set[int] = set()
        """Streams to which a lease is announced when it is published whole at once."""
        self._alarms: Alarms[str] = Alarms()

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Lease | None:
        return self._live.get(request_id)

    def ended(self) -> Iterator[Account]:
        """As far as they are remembered; the last to end comes first."""
        return reversed(self._ended)

    def state_of(self, request_id: str) -> LeaseState | None:
        """How the request's last lease stands, as far as it is remembered."""
        lease = self._live.get(request_id) or self._ended.get(request_id)
        return lease.state if lease is not None else None

    def newest(self, request_id: str) -> int:
        """The number of the request's last lease, as far as it is remembered; 0 where none is."""
        lease = self._live.get(request_id) or self._ended.get(request_id)
        return lease.number if lease is not None else self._lost.get(request_id) or 0

    def next_timer(self) -> float | None:
        return self._alarms.next()

    def on(self, event: e.LeasesEvent, now: float) -> Effects:
        """Raises KvferryError for a publish that is refused."""
        match event:
            case e.Publish():
                return self._publish(event, now)
            case e.FenceOver():
                return self._fence_over(event, now)
            case e.Refuse(request_id, number, why):
                refused, _ = self._refused.get(request_id) or (0, None)
                if number <= max(self.newest(request_id), refused):
                    return []
                self._refused.put(request_id, (number, why))
                return self._tell_waiting(request_id, number, why)
            case e.Lose(leases):
                return [effect for each in leases[-TOMBSTONES:] for effect in self._lose(*each)]
            case e.Revoke(request_id, reason):
                return self._revoke(request_id, reason, now)
            case e.GiveUp(request_id, reason, who):
                lease = self._live.get(request_id)
                read = lease is not None and lease.readers.others_than(who)
                wanted = read or self._waits.others_than(request_id, who)
                return [] if wanted else self._revoke(request_id, reason, now)
            case e.ReplaceWeights(weights, reason):
                others = [lease for lease in self if lease.published.weights != weights]
                return [each for lease in others for each in self._end(lease, LeaseState.REVOKED, reason, now)]
            case e.Shut():
                return self._shut(event, now)
            case e.Tick():
                due = [self._live[request_id] for request_id in self._alarms.due(now)]
                return [effect for lease in due for effect in self._settle(lease, now)]
            case _:
                assert_never(event)

    # ---- publishes ----

    def _publish(self, event: e.Publish, now: float) -> Effects:
        terms, said = event.terms, event.said
        request_id, number = terms.request_id, terms.number
        lease, newest = self._live.get(request_id), self.newest(request_id)
        if self._closed:
            raise Unavailable("session_closed", self._closed, remedy="attach again with a new epoch")
        if number < newest or (number == newest and lease is None):
            raise lease_ended(request_id, f"over: its last is {newest}", number)
        if lease is not None and number == newest:
            if lease.published == said and not said.more:
                return []  # the same again
            refusal = lease.refusal(said)
            if refusal is not None:
                raise refusal
            return self._queue(lease, event, now)
        if lease is None and len(self._live) >= self.limit:
            remedy = "wait for readers, shorten lease_ttl_s, or raise max_leases"
            why = f"{self.limit} leases are held already"
            raise Full("full", why, field="max_leases", value=self.limit, remedy=remedy)
        anew = f"published anew, as lease {number}"
        effects = [] if lease is None else self._end(lease, LeaseState.REVOKED, anew, now)
        lease = self._live[request_id] = Lease(terms, now)
        effects.append(e.HoldWord(terms.word))
        self._finish_early(lease)
        for remembered in (self._ended, self._lost):
            remembered.pop(request_id)
        for asked, who in self._waits.up_to(request_id, number):
            lease.awaited = True
            effects += self.open(asked, who, now)
        return effects + self._queue(lease, event, now)

    def _queue(self, lease: Lease, event: e.Publish, now: float) -> Effects:
        lease.queue(event.said, event.fence, now)
        return self._show(lease, now)

    def _fence_over(self, event: e.FenceOver, now: float) -> Effects:
        lease = self._live.get(event.request_id)
        if lease is None:
            return []
        lease.fence_over(event.fence, event.problem)
        return self._show(lease, now)

    def _show(self, lease: Lease, now: float) -> Effects:
        """Let readers see what is published, as far as fences are reached."""
        seen = lease.version
        while lease.queued and lease.queued[0].fence is None:
            problem = lease.show_next(now)
            if problem is not None:
                return self._end(lease, LeaseState.REVOKED, problem.message, now, problem)
        if lease.version == seen:
            return []
        self._alarms.set(lease.request_id, lease.expires_at)
        view = lease.view
        effects: Effects = []
        for reading in lease.readers.live_readings():
            effects += self._streams[reading.stream].show(reading.number, view)
        whole_at_once = lease.version == 1 and not lease.more
        if whole_at_once and not (lease.awaited or lease.readers.live) and len(self._audience) <= ANNOUNCED_TO:
            lease.announced = True
            effects += [each for stream in self._audience for each in self._streams[stream].announce(view)]
        return effects + self._settle(lease, now)

    def _lose(self, request_id: str, number: int) -> Effects:
        if number <= self.newest(request_id):
            return []
        self._ended.pop(request_id)
        self._lost.put(request_id, number)
        return self._tell_waiting(request_id, number, _lost(request_id, number))

    # ---- readers ----

    def _held(self, request_id: str, number: int) -> Lease | KvferryError | None:
        """The lease of this number, 0 for whichever there is; None where it is still to come; why it never will: it has
        ended, or another is there."""
        lease, newest = self._live.get(request_id), self.newest(request_id)
        if lease is not None and number in (0, newest):
            return lease
        if self._closed:
            return lease_ended(request_id, self._closed, number)
        refused, why = self._refused.get(request_id) or (0, None)
        if why is not None and newest < (number or refused) <= refused:
            return why.kept()
        if number > newest or not newest:
            return None
        if lease is None and number in (0, newest):
            ended = self._ended.get(request_id)
            return _lost(request_id, newest) if ended is None else why_over(ended)
        return lease_ended(request_id, f"over: its last is {newest}", number)

    def listen(self, stream: int, listening: bool) -> None:
        """Whether the stream is told of leases as they are published."""
        (self._audience.add if listening else self._audience.discard)(stream)

    def open(self, asked: e.Ask, who: ReaderId, now: float) -> Effects:
        held = self._held(asked.request_id, asked.lease)
        if held is None:
            held = self._waits.refusal(asked.request_id, who)
            if held is None:
                self._waits.add(asked, who)
                return self._streams[asked.reading.stream].wait(asked.reading.number)
        if not isinstance(held, Lease):
            return self._over(asked.reading, held)
        try:
            held.readers.open(who, asked.reading, asked.attempt, asked.by, now=now)
        except KvferryError as refused:
            return self._over(asked.reading, refused.kept())
        held.trace, self._opened[asked.reading] = asked.trace, (held, who)
        stream, number = self._streams[asked.reading.stream], asked.reading.number
        return stream.show(number, held.view) if held.version else stream.wait(number)

    def _over(self, reading: Reading, why: KvferryError) -> Effects:
        return self._streams[reading.stream].over(reading.number, why)

    def close(self, left: e.Leave, who: ReaderId, asked: e.Ask | e.Leave, now: float, packed: float | None) -> Effects:
        """asked: as the reader asked for the lease. packed: when all that it wanted of it was packed."""
        served: Effects = [e.Served(who.engine_id, left.nbytes)] if left.nbytes else []
        lease, _ = self._opened.pop(left.reading, (None, who))
        if lease is not None:
            lease.readers.close(who, left, now, packed)
            self._finish_early(lease)
            return served + self._settle(lease, now)
        waited = self._waits.pop(left.reading) is not None
        if left.complete and (waited or not left.reading.number):
            return served + self._finish(left, who, asked, now)
        return served

    def _finish(self, left: e.Leave, who: ReaderId, asked: e.Ask | e.Leave, now: float) -> Effects:
        """A rank has finished without opening the lease of this number, perhaps before its publish."""
        request_id, number, newest = asked.request_id, left.lease, self.newest(asked.request_id)
        lease = self._live.get(request_id) if number == newest else None
        if lease is None and (number <= newest or self._closed):
            return []
        early = (self._early.get((request_id, number)) or {}) | {who: (left.attempt, left.by, left.nbytes, now)}
        if len(early) <= TOMBSTONES:
            self._early.put((request_id, number), early)
        if lease is None or lease.readers.reads(who):
            return []
        lease.trace = asked.trace
        self._finish_early(lease)
        return self._settle(lease, now)

    def _finish_early(self, lease: Lease) -> None:
        early = self._early.pop((lease.request_id, lease.number))
        if early and (left := lease.readers.finish_all(early)):
            self._early.put((lease.request_id, lease.number), left)

    # ---- ends ----

    def _settle(self, lease: Lease, now: float) -> Effects:
        """End the lease if it is time to: all have read, or its ttl has passed and nobody reads it. A publish that
        waits for its fence has the fence's own deadline."""
        if lease.all_read:
            return self._end(lease, LeaseState.RELEASED, "", now)
        if not lease.readers.live and not lease.queued and now >= lease.expires_at:
            return self._end(lease, LeaseState.EXPIRED, f"nobody read it within {lease.terms.ttl_s:g} s", now)
        return []

    def _revoke(self, request_id: str, reason: str, now: float) -> Effects:
        lease = self._live.get(request_id)
        if lease is not None:
            return self._end(lease, LeaseState.REVOKED, reason, now)
        waiting = self._waits.up_to(request_id)
        over = ((asked.reading, lease_ended(request_id, reason, asked.lease)) for asked, _ in waiting)
        return [each for ended in over for each in self._over(*ended)]

    def _shut(self, event: e.Shut, now: float) -> Effects:
        self._closed = event.reason
        effects: Effects = []
        for lease in list(self._live.values()):
            if lease.more or not event.keep_whole:
                effects += self._end(lease, LeaseState.REVOKED, event.reason, now)
        for request_id in self._waits.requests():
            effects += self._revoke(request_id, event.reason, now)
        return effects

    def _tell_waiting(self, request_id: str, number: int, why: KvferryError) -> Effects:
        waiting = self._waits.up_to(request_id, number)
        return [each for asked, _ in waiting for each in self._over(asked.reading, why.kept())]

    def _end(
        self, lease: Lease, state: LeaseState, reason: str, now: float, problem: KvferryError | None = None
    ) -> Effects:
        """The word first, then readers, and the engine last: it may reuse the blocks."""
        fences = lease.end(state, reason, problem)
        account = lease.account(now)
        del self._live[lease.request_id]
        self._alarms.drop(lease.request_id)
        self._ended.put(lease.request_id, account)
        effects: Effects = [e.ClearWord(lease.terms.word)]
        effects += [e.CancelFence(fence) for fence in fences]
        for reading in lease.readers.live_readings():
            del self._opened[reading]
            effects += self._over(reading, lease.over())
        for stream in self._audience if lease.announced else ():
            self._streams[stream].withdraw(lease.terms.word)
        return [*effects, e.LeaseEnded(account)]

    # ---- what must hold ----

    def check(self) -> None:
        for request_id, lease in self._live.items():
            lease.check()
            assert lease.request_id == request_id and request_id not in self._ended and request_id not in self._lost
            live = {reading for reading, (each, _) in self._opened.items() if each is lease}
            assert set(lease.readers.live_readings()) == live
        assert all(self._live.get(lease.request_id) is lease for lease, _ in self._opened.values())
        assert len({lease.terms.word for lease in self}) == len(self._live)
        self._waits.check()
        for asked, _ in self._waits:
            assert self._held(asked.request_id, asked.lease) is None, "it could be answered"

    def sizes(self) -> Sizes:
        of_leases: dict[str, int] = {}
        for lease in self:
            for name, size in lease.sizes().items():
                of_leases[name] = of_leases.get(name, 0) + size
        named = {name.strip("_"): len(kept) for name, kept in vars(self).items() if hasattr(kept, "__len__")}
        named.pop("closed")
        return {**of_leases, **named, "heap": self._alarms.entries, **self._waits.sizes()}


def _lost(request_id: str, number: int) -> KvferryError:
    return lease_ended(request_id, "lost: its daemon has died, or its engine has lost its session", number)
