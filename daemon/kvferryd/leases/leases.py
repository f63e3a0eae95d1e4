"""The leases of one engine rank: their words, timers and fences, by what their machine says (kvferry.protocol)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvferry.errors import KvferryError
from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol.lease import Lease
from kvferry.protocol.source import Source
from kvferry.protocol.values import Account, Publication, ReaderId, Reading, Terms
from kvferry.schemas import InboundRecord, LeaseRecord, LeaseState
from kvferryd.aio import Timer, carry_out, when_done
from kvferryd.leases.record import record_of
from kvferryd.leases.words import Words, drawn
from kvferryd.observe import logs

if TYPE_CHECKING:
    from kvferryd.leases.stream import ServedStream

log = logs.get(__name__)
OnServed = Callable[[str, int], None]
"""Called when a reader has read more: with its engine, and how many bytes."""


class Leases:
    """`on` hands an event to the machine and carries out its effects, in order. `on_end` is called once for each lease
    that ends."""

    def __init__(
        self, engine_id: str, epoch: str, on_end: Callable[[Account], None], limit: int,
        on_served: OnServed = lambda engine_id, nbytes: None,
    ) -> None:  # fmt: skip
        self.engine_id, self.epoch, self.limit = engine_id, epoch, limit
        self.on_end, self._on_served = on_end, on_served
        self.words, self.source = Words(limit), Source(limit)
        self.streams: dict[int, ServedStream] = {}
        self._numbers = itertools.count(1)
        """Numbers of streams and fences."""
        self._fences: dict[int, asyncio.Future[None]] = {}
        self._timer = Timer(lambda: self.on(e.Tick()))
        self._arisen: deque[e.SourceEvent] = deque()
        """Events that came while effects were carried out."""
        self._acting = False

    def on(self, event: e.SourceEvent) -> list[e.SourceEffect]:
        """The effects, which have been carried out; none of an event that comes while others are: it waits for them.

        Raises KvferryError where the machine refuses the event.
        """
        if self._acting:
            self._arisen.append(event)
            return []
        time = asyncio.get_running_loop().time
        effects = self.source.on(event, time())
        self._acting = True
        try:
            self._carry_out(effects)
            while self._arisen:
                self._carry_out(self._on_arisen(self._arisen.popleft(), time()))
        finally:
            self._acting = False
        self._timer.ring_by(self.source.next_timer())
        return effects

    def pack(self, event: p.PackingEvent) -> None:
        """At once, and in a way of its own: one comes with every chunk, and a packing says nothing to leases."""
        packing = self.source.packing(event.at)
        if packing is not None:
            self._carry_out(packing.on(event, asyncio.get_running_loop().time()))

    def _on_arisen(self, event: e.SourceEvent, now: float) -> list[e.SourceEffect]:
        try:
            return self.source.on(event, now)
        except KvferryError:
            log.exception("an event was refused", event_type=type(event).__name__, engine_id=self.engine_id)
            return []

    def _carry_out(self, effects: Iterable[e.SourceEffect]) -> None:
        carry_out(effects, self._do, engine_id=self.engine_id)

    def _do(self, effect: e.SourceEffect) -> None:
        match effect:
            case e.Speak(reading):
                self.streams[reading.stream].speak(reading.number)
            case p.Gather() | p.GiveBack():
                self.streams[effect.at.reading.stream].pack(effect)
            case e.HoldWord(word):
                self.words.hold(word)
            case e.ClearWord(word):
                self.words.clear(word)
            case e.CancelFence(fence):
                self._fences.pop(fence).cancel()
            case e.LeaseEnded(account):
                self.on_end(account)
            case e.Served(engine_id, nbytes):
                self._on_served(engine_id, nbytes)
            case _:
                self.streams[effect.at.reading.stream].pack(effect)

    # ---- for the engine ----

    def publish(
        self, request_id: str, number: int, said: Publication, *, ttl_s: float, readers: int,
        after: asyncio.Future[None] | None = None,
    ) -> LeaseState:  # fmt: skip
        """A new lease, or more tokens of the one of this number. Idempotent for an equal publish.

        A higher number than that of the lease that is there ends that one. Raises KvferryError: `lease_ended` for a
        number that has ended or been passed, `full`, and as `Lease.refusal`.
        after: readers see it when this is done; when it fails the lease ends with its error. Cancelled with the lease.
        """
        terms = Terms(request_id, number, drawn(), ttl_s, readers, time.time())
        fence = None if after is None else next(self._numbers)
        self.on(e.Publish(terms, said, fence))
        if after is not None and fence is not None:
            self._fences[fence] = after
            when_done(after, partial(self._fence_over, request_id, fence))
        state = self.source.leases.state_of(request_id)
        assert state is not None
        return state

    def _fence_over(self, request_id: str, fence: int, after: asyncio.Future[None]) -> None:
        self._fences.pop(fence, None)
        if not after.cancelled():
            problem = after.exception()
            assert problem is None or isinstance(problem, KvferryError)
            self.on(e.FenceOver(request_id, fence, problem))

    def revoke(self, request_id: str, reason: str) -> bool:
        """Whether a lease has ended by it."""
        return self.ended_by(e.Revoke(request_id, reason)) > 0

    def revoke_all(self, reason: str, *, keep_whole: bool = False) -> None:
        self.on(e.Shut(reason, keep_whole))

    def ended_by(self, event: e.SourceEvent) -> int:
        """How many leases end by it."""
        return sum(isinstance(effect, e.LeaseEnded) for effect in self.on(event))

    # ---- for readers' streams ----

    def connect(self, stream: ServedStream, who: ReaderId, *, announcing: bool) -> int:
        """The stream's number."""
        number = next(self._numbers)
        self.streams[number] = stream
        self.on(e.Connect(number, who, announcing))
        return number

    def disconnect(self, stream: int) -> None:
        self.on(e.Disconnect(stream))
        del self.streams[stream]

    def take(self, stream: int, reading: int) -> e.Told | None:
        return self.source.take(Reading(stream, reading))

    # ---- for records ----

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.source.leases)

    def __len__(self) -> int:
        return len(self.source.leases)

    def get(self, request_id: str) -> Lease | None:
        return self.source.leases.get(request_id)

    def record(self, lease: Lease) -> LeaseRecord:
        """The record of a lease that is held."""
        account = lease.account(asyncio.get_running_loop().time())
        return record_of(account, self.engine_id, self.epoch)

    def ended(self) -> Iterator[LeaseRecord]:
        """As far as they are remembered; the last to end comes first."""
        return (record_of(account, self.engine_id, self.epoch) for account in self.source.leases.ended())

    def served(self, request_id: str, number: int, who: ReaderId) -> LeaseRecord | None:
        """The record of a lease that this reader's engine reads or has read, with no other readers; None where none is
        remembered."""
        lease = self.get(request_id)
        held = [] if lease is None else [lease.account(asyncio.get_running_loop().time())]
        for account in (*held, *self.source.leases.ended()):
            if (account.request_id, account.number) == (request_id, number):
                readers = tuple(each for each in account.readers if each.who.engine == who.engine)
                nbytes = sum(each.nbytes for each in readers)
                told = replace(account, readers=readers, nbytes=nbytes)
                return record_of(told, self.engine_id, self.epoch) if readers else None
        return None

    def states(self) -> Counter[LeaseState]:
        """How many stand so, those that have ended and are remembered included."""
        return Counter(it.state for it in (*self.source.leases, *self.source.leases.ended()))

    def inbound(self) -> list[InboundRecord]:
        """The state of every connected reader."""
        return [stream.record() for stream in self.streams.values()]
