"""The parts of a daemon's ranks in attempts: the newest attempt at each request, orders that wait, what is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferry.protocol import attempts as a
from kvferry.protocol.attempts import NO_ATTEMPT, Attempt, Key, ReadingRank
from kvferry.protocol.kept import Latest
from kvferry.protocol.requests_events import Effect, Forgotten, Order, Reservation, Stop
from kvferry.protocol.values import Sizes

ATTEMPTS = 1 << 16
"""Requests whose last attempt is remembered after its record is forgotten, and order ids."""


@dataclass(slots=True, eq=False)
class Part:
    """This rank's part of an attempt, or an order that waits for the reservation of one."""

    number: int
    at: ReadingRank
    key: Key
    attempt: Attempt
    order: Order | None = None
    brought: Mapping[int, object] | None = None
    """The tables that came with a router's order, by rank, until it has ended."""
    reservation: Reservation | None = None
    """Until it has ended."""
    claim: int = 0
    """The claim on the blocks of its reservation; 0 where it has none."""
    handed: bool = False
    """Its order has come from rank 0 to another rank."""
    led: bool = False
    """Its order was handed on to the other ranks."""
    stopped: bool = False
    """It has ended, or is about to: nothing joins it any more."""
    ended: bool = False
    over: bool = False
    """The parts of all ranks have ended."""
    quiet: bool = False
    """Nothing can be written any more."""
    problem: KvferryError | None = None

    @property
    def request_id(self) -> str:
        return self.key[-1]

    @property
    def reserved(self) -> bool:
        return bool(self.claim)

    @property
    def leader(self) -> str:
        """The instance of rank 0's daemon that has handed its order on; empty where none has."""
        return "" if self.order is None else self.order.leader

    def stop(self, why: KvferryError, *, failed: bool) -> list[Effect]:
        """Idempotent."""
        if self.stopped:
            return []
        self.stopped, self.problem = True, why
        return [Stop(self.number, failed, why)]

    def why_over(self) -> KvferryError:
        """Nothing more belongs to it."""
        if self.problem is None:
            return a.conflict(self.request_id, f"has ended already in {self.attempt}")
        return self.problem.kept()

    def has(self, order: Order, *, exactly: bool, handed: bool = False) -> bool:
        """Whether it has this order. Raises KvferryError (`order_conflict`) when it has another.

        Orders of one request that reach a rank in several ways need only agree on the source (`exactly` false); but its
        own engine names no lease where rank 0, which has `handed` on the other, knows none.
        """
        known = self.order
        if known is not None and (not known.same_source(order) or (exactly and known != order)):
            how = f"was ordered already, otherwise, from {known.engine_id} at {known.address}"
            raise a.conflict(self.request_id, how)
        if known is not None and handed is not self.handed:
            own, rank_0 = (order, known) if self.handed else (known, order)
            if own.lease_id is not None and rank_0.lease_id is None:
                raise a.lease_of_some(self.request_id, own.lease_id)
        return known is not None


class Parts:
    def __init__(self, history: int) -> None:
        """history: how many that have ended are kept."""
        self._history = history
        self._by_number: dict[int, Part] = {}
        self._current: dict[Key, Part] = {}
        """The newest attempt at each request that has a reservation on this rank."""
        self._waiting: dict[Key, dict[Attempt, Part]] = {}
        """Orders that wait for the reservation of a later attempt, by that; NO_ATTEMPT: the next, whichever that is."""
        self._over: Latest[Key, tuple[Attempt, KvferryError]] = Latest(ATTEMPTS)
        """The newest attempt whose record is forgotten, or that has ended elsewhere or was refused here; and why no
        order and no reservation belongs to it. `pass_by` alone sets it: it only ever rises."""
        self._ended: dict[int, Part] = {}
        """The oldest first."""
        self._numbers = itertools.count(1)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __getitem__(self, number: int) -> Part:
        return self._by_number[number]

    def all(self) -> list[Part]:
        return list(self._by_number.values())

    @property
    def unfinished(self) -> int:
        """Parts that have not ended."""
        return len(self._by_number) - len(self._ended)

    def select(self, at: ReadingRank, wanted: Callable[[Part], bool]) -> list[Part]:
        """Parts of one life of an engine."""
        return [part for part in self._by_number.values() if part.at.life == at.life and wanted(part)]

    def of_request(self, key: Key) -> list[Part]:
        """The newest, and those that wait."""
        current = self._current.get(key)
        return [*([] if current is None else [current]), *self._waiting.get(key, {}).values()]

    def of(self, key: Key, attempt: Attempt) -> Part | None:
        """The part in this attempt; None where the attempt is still to come.

        Raises KvferryError: `stale_attempt` after a later one, why it is over for one that ended elsewhere or was
        refused here, `order_conflict` for another kind of attempt.
        """
        current, (over, why) = self._current.get(key), self._over.get(key) or (NO_ATTEMPT, None)
        if current is not None and current.attempt == attempt:
            return current
        if why is not None and attempt == over:
            raise why.kept()
        for newest in (over, NO_ATTEMPT if current is None else current.attempt):
            if attempt.before(newest):
                raise a.stale(key[2], newest)
        self.check_kind(key, attempt.by)
        return self._waiting.get(key, {}).get(attempt)

    def under_way(self, key: Key) -> Part | None:
        """The newest attempt, unless it has ended or is about to."""
        current = self._current.get(key)
        return None if current is None or current.stopped else current

    def next(self, key: Key) -> Part | None:
        """The order that waits for the next reservation, whichever that is."""
        waiting = self._waiting.get(key, {}).get(NO_ATTEMPT)
        return None if waiting is None or waiting.stopped else waiting

    def is_newest(self, part: Part) -> bool:
        return self._current.get(part.key) is part

    def check_kind(self, key: Key, by: str) -> None:
        """A request's attempts are all the engine's, or all of orders that bring their tables. by: as of Attempt."""
        current, (over, _) = self._current.get(key), self._over.get(key) or (NO_ATTEMPT, None)
        newest = over if current is None else current.attempt
        if newest != NO_ATTEMPT and bool(newest.by) != bool(by):
            raise a.another_kind(key[2], newest)

    def check_not_passed(self, key: Key, attempt: Attempt) -> None:
        """No order waits for a later one. Raises KvferryError (`stale_attempt`)."""
        for later in self._waiting.get(key, ()):
            if attempt.before(later):
                raise a.stale(key[2], later)

    def add(self, at: ReadingRank, request_id: str, attempt: Attempt) -> Part:
        part = Part(next(self._numbers), at, at.key(request_id), attempt)
        self._by_number[part.number] = part
        return part

    def wait(self, part: Part) -> None:
        self._waiting.setdefault(part.key, {})[part.attempt] = part

    def wait_no_more(self, part: Part) -> bool:
        """Whether it did."""
        waiting = self._waiting.get(part.key, {})
        if waiting.get(part.attempt) is not part:
            return False
        del waiting[part.attempt]
        if not waiting:
            del self._waiting[part.key]
        return True

    def make_newest(self, part: Part, attempt: Attempt) -> list[Part]:
        """The parts whose place it takes."""
        before = self._current.get(part.key)
        self.wait_no_more(part)
        part.attempt, self._current[part.key] = attempt, part
        return [*self.in_vain(part.key, attempt), *([] if before is None else [before])]

    def in_vain(self, key: Key, attempt: Attempt) -> list[Part]:
        """Orders that wait for earlier attempts."""
        return [
            each for each in self._waiting.get(key, {}).values() if each.attempt.number and each.attempt.before(attempt)
        ]

    def pass_by(self, key: Key, attempt: Attempt, why: KvferryError) -> bool:
        """Nothing belongs to the attempt any more, or to a lower one; whether that is news. An attempt of another kind
        than the newest is refused for that."""
        current, (over, _) = self._current.get(key), self._over.get(key) or (NO_ATTEMPT, None)
        other = current is not None and bool(current.attempt.by) != bool(attempt.by)
        news = attempt != over and not attempt.before(over) and not other
        if news:
            self._over.put(key, (attempt, why.kept()))
        return news

    def over(self, part: Part) -> None:
        """It has ended on every rank."""
        assert not part.over
        part.over = True

    def end(self, part: Part) -> bool:
        """Whether it waited."""
        assert not part.ended
        part.stopped = part.ended = True
        part.reservation = part.brought = None
        self._ended[part.number] = part
        return self.wait_no_more(part)

    def _past(self) -> list[Part]:
        """The oldest that have ended, as many as are more than the history, but for those whose other ranks or reads go
        on."""
        if len(self._ended) <= self._history:
            return []
        oldest = itertools.islice(self._ended.values(), len(self._ended) - self._history)
        return [part for part in oldest if part.over and part.quiet]

    def forget(self) -> list[Effect]:
        for part in (past := self._past()):
            del self._ended[part.number], self._by_number[part.number]
            if self.is_newest(part):
                del self._current[part.key]
                self.pass_by(part.key, part.attempt, part.why_over())
        return [Forgotten(part.number) for part in past]

    def check(self) -> None:
        assert not self._past()
        for number, part in self._by_number.items():
            assert part.number == number and part.ended == (number in self._ended)
            assert not (part.over and not part.ended) and not (part.quiet and not part.ended)
            assert not (part.ended and not part.stopped)
            if not part.ended:
                waits = self._waiting.get(part.key, {}).get(part.attempt) is part
                assert part.reserved or waits or part.stopped
        for key, part in self._current.items():
            assert part.key == key and part.reserved and part.number in self._by_number
            over, _ = self._over.get(key) or (NO_ATTEMPT, None)
            assert bool(over.by) == bool(part.attempt.by) or over == NO_ATTEMPT
        for key, waiting in self._waiting.items():
            assert waiting
            for attempt, part in waiting.items():
                assert (part.key, part.attempt) == (key, attempt) and part.number in self._by_number
                assert not (part.ended or part.reserved)
                newest = self._current.get(key)
                assert newest is None or not attempt.number or part.stopped or not attempt.before(newest.attempt)

    def sizes(self) -> Sizes:
        waiting = sum(map(len, self._waiting.values()))
        return {
            "parts": len(self._by_number), "newest": len(self._current), "waiting": waiting, "over": len(self._over),
            "ended": len(self._ended),
        }  # fmt: skip
