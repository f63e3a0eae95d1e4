"""Assigns orders and reservations to attempts, on one daemon: waiting, under way, over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import assert_never

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.protocol import attempts as a
from kvferry.protocol import requests_events as e
from kvferry.protocol.attempts import Attempt, Key, Limits, ReadingRank
from kvferry.protocol.claims import Claims
from kvferry.protocol.kept import Latest
from kvferry.protocol.parts import ATTEMPTS, Part, Parts
from kvferry.protocol.values import Sizes

Effects = list[e.Effect]


class Requests:
    """A reservation begins its attempt and ends the one before. An order belongs to the attempt that it names; one that
    names none is of the attempt under way, or waits for the next reservation. Rank 0 hands an order on when its own
    reservation says which attempt it is of, and counts the orders that bring their tables."""

    def __init__(self, instance: str, limits: Limits) -> None:
        self._instance, self._limits = instance, limits
        self._counted = itertools.count(1)
        """Number the attempts of orders that bring their tables."""
        self.parts, self._claims = Parts(limits.history), Claims()
        self._orders: Latest[str, tuple[int, object]] = Latest(ATTEMPTS)
        """The part of each order_id, and what the order said."""

    @property
    def left(self) -> int:
        """Parts that go on: here, as a read that may still write, or on ranks that this one leads."""
        return sum(not part.quiet or (part.ended and not part.over) for part in self.parts.all())

    def find(self, key: Key, attempt: Attempt) -> int | None:
        """The part of this attempt; None where the attempt is still to come. Raises KvferryError where it is over."""
        found = self.parts.of(key, attempt)
        return None if found is None else found.number

    def on(self, event: e.Event) -> Effects:
        """Raises KvferryError where a router's order is refused. Other refusals are effects: `Refused` is the last."""
        match event:
            case e.Ordered():
                return self._ordered(event)
            case e.Reserved():
                return self._or_refused(event, lambda: self._reserved(event))
            case e.Handed():
                return self._or_refused(event, lambda: self._handed(event))
            case e.Unfit(at, request_id, attempt, why):
                return self._refuse(at, request_id, attempt, why, led=False)
            case e.EndedElsewhere():
                return self._ended_elsewhere(event)
            case e.Abort(at, request_id, why):
                found = self.parts.of_request(at.key(request_id))
                return [each for part in found for each in self._abort(part, why)]
            case e.AbortPart(number, why):
                return self._abort(self.parts[number], why) if number in self.parts else []
            case e.HandBack(at, why):
                return self._stop_all(at, why, lambda part: not (part.reserved or part.handed))
            case e.Led(at, leader):
                return self._stop_all(at, a.leader_lost(), lambda part: part.leader not in ("", leader))
            case e.ReplaceWeights(at, weights):
                return self._replace_weights(at, weights)
            case e.Shut(at, why):
                return self._stop_all(at, why, lambda part: True)
            case e.Left(at):
                self._claims.leave(at.life)
                return []
            case e.Ended():
                return [*self._ended(self.parts[event.part], event), *self.parts.forget()]
            case e.Over(number):
                self.parts.over(self.parts[number])
                return [e.OneFewer(), *self.parts.forget()]
            case e.Quiet(number):
                return [*self._quiet(self.parts[number]), *self.parts.forget()]
            case _:
                assert_never(event)

    # ---- the two halves ----

    def _ordered(self, event: e.Ordered) -> Effects:
        if not event.order_id:
            return self._order(event)
        if (known := self._orders.get(event.order_id)) is not None:
            number, said = known
            if said != event.said:
                raise a.given_already(event.order_id, "otherwise")
            if number not in self.parts:
                raise a.given_already(event.order_id, "and its record is forgotten")
            return [e.Taken(number, new=False)]
        effects = self._order(event)
        taken = effects[-1]
        assert isinstance(taken, e.Taken)
        self._orders.put(event.order_id, (taken.part, event.said))
        return effects

    def _order(self, event: e.Ordered) -> Effects:
        key, found = event.at.key(event.request_id), self.parts.under_way(event.at.key(event.request_id))
        if event.brought and event.number:
            why = f"brings its tables, and names attempt {event.number}: rank 0 counts such orders"
            raise a.conflict(event.request_id, why)
        if event.brought and (found is None or found.attempt.by):
            return self._order_tables(event, found)
        if event.number:
            found = self.parts.of(key, Attempt(event.number))
        elif found is None:
            found = self.parts.next(key)
        if found is not None:
            if event.reservation not in (None, found.reservation):
                if not self._limits.tables:
                    raise a.tables_not_allowed()
                raise a.reserved_otherwise(event.request_id)
            if found.has(event.order, exactly=True):
                return [e.Taken(found.number, new=False)]
            if found.stopped:
                raise a.conflict(event.request_id, "has ended already")
            effects: Effects = []
        else:
            self._check_room(event.closed)
            found, effects = self._begin(event.at, event.request_id, Attempt(event.number))
            self.parts.wait(found)
        effects += self._take_order(found, event.order)
        if not found.reserved:
            effects.append(e.Meet(found.number))
        return [*effects, e.Taken(found.number)]

    def _order_tables(self, event: e.Ordered, found: Part | None) -> Effects:
        """An order that brings its tables is a whole attempt. found: the one under way."""
        if not self._limits.tables:
            raise a.tables_not_allowed()
        if found is not None:
            found.has(event.order, exactly=True)  # as every such attempt has its order; or it raises
            if event.brought != found.brought:
                raise a.conflict(event.request_id, "was ordered already, with other tables")
            return [e.Taken(found.number, new=False)]
        assert event.reservation is not None
        self.parts.check_kind(event.at.key(event.request_id), self._instance)
        self._check_room(event.closed)
        claim = self._claims.take(event.at.life, event.reservation.blocks, event.request_id)
        attempt = Attempt(next(self._counted), self._instance)
        part, effects = self._begin(event.at, event.request_id, attempt)
        effects += self._reserve(part, attempt, event.reservation, claim)
        effects += self._take_order(part, event.order, event.brought)
        return [*effects, e.Taken(part.number)]

    def _reserved(self, event: e.Reserved) -> Effects:
        """The same reservation again joins the part under way."""
        key, attempt, order = event.at.key(event.request_id), event.attempt, event.order
        found = self.parts.of(key, attempt) or self.parts.next(key)
        if found is not None and found.stopped:
            raise found.why_over()
        had = found is not None and order is not None and found.has(order, exactly=False)
        if found is None:
            self._check_room(event.closed)
        elif found.reserved and found.reservation != event.reservation:
            raise a.reserved_otherwise(event.request_id)
        claim, effects = 0, Effects()
        if found is None or not found.reserved:
            claim = self._claims.take(event.at.life, event.reservation.blocks, event.request_id)
        if found is None:
            found, effects = self._begin(event.at, event.request_id, attempt, event.deadline_s)
        if order is not None and found.order is not None and claim:
            named = found.order.naming(order)  # other ranks may know this lease alone
            if named != found.order:
                found.order = named
                effects.append(e.NameSource(found.number, named))
        if claim:
            effects += self._reserve(found, attempt, event.reservation, claim)
        if order is not None and not had:
            effects += self._take_order(found, order)
        elif found.order is not None:
            effects += self._hand_on(found)
        return [*effects, e.Taken(found.number)]

    def _handed(self, event: e.Handed) -> Effects:
        key, attempt, reservation = event.at.key(event.request_id), event.attempt, event.reservation
        found = self.parts.of(key, attempt)
        if found is not None:
            if not found.ended and found.reserved and reservation not in (None, found.reservation):
                raise a.reserved_otherwise(event.request_id)
            if found.has(event.order, exactly=False, handed=True):
                return [e.Follow(found.number, event.order), e.Taken(found.number, new=False)]
            if found.stopped:
                raise found.why_over()
            effects: Effects = []
        else:
            self.parts.check_not_passed(key, attempt)
            self._check_room(event.closed)
            if reservation is not None:
                if not self._limits.tables:
                    raise a.tables_not_allowed()
                claim = self._claims.take(event.at.life, reservation.blocks, event.request_id)
            found, effects = self._begin(event.at, event.request_id, attempt)
            if reservation is not None:
                effects += self._reserve(found, attempt, reservation, claim)
            else:
                effects += self._supersede(self.parts.in_vain(key, attempt), attempt)
                self.parts.wait(found)
        found.order, found.handed = event.order, True
        effects.append(e.TakeOrder(found.number, event.order, handed=True))
        if not found.reserved:
            effects.append(e.Meet(found.number))
        return [*effects, e.Taken(found.number)]

    def _begin(
        self, at: ReadingRank, request_id: str, attempt: Attempt, deadline_s: float | None = None
    ) -> tuple[Part, Effects]:
        part = self.parts.add(at, request_id, attempt)
        return part, [e.Begin(part.number, at, request_id, attempt, deadline_s), e.Appeared(request_id)]

    def _reserve(self, part: Part, attempt: Attempt, reservation: e.Reservation, claim: int) -> Effects:
        """It is the newest attempt from now on, and the only one."""
        before = self.parts.make_newest(part, attempt)
        part.reservation, part.claim = reservation, claim
        return [
            *self._supersede(before, attempt),
            e.Appeared(part.request_id),
            e.TakeReservation(part.number, attempt, reservation),
        ]

    def _take_order(self, part: Part, order: e.Order, brought: Mapping[int, object] | None = None) -> Effects:
        part.order, part.brought = order, brought
        return [e.TakeOrder(part.number, order), *self._hand_on(part)]

    def _hand_on(self, part: Part) -> Effects:
        """Rank 0 hands an order on as soon as its own reservation says which attempt it is of."""
        if part.at.rank or part.led or not self.parts.is_newest(part):
            return []
        part.led = True
        return [e.HandOn(part.number, part.brought or {})]

    def _check_room(self, closed: KvferryError | None) -> None:
        if closed is not None:
            raise closed
        if self.parts.unfinished >= self._limits.transfers:
            raise a.full(self._limits.transfers)

    # ---- refusals ----

    def _or_refused(self, event: e.Reserved | e.Handed, take: Callable[[], Effects]) -> Effects:
        """A refusal ends the attempt on this rank, where it has not begun here, or not as rank 0 leads it."""
        try:
            return take()
        except KvferryError as refusal:
            of, led = (event.at, event.request_id, event.attempt), isinstance(event, e.Handed)
            return [*self._refuse(*of, refusal, led=led), e.Refused(refusal)]

    def _refuse(self, at: ReadingRank, request_id: str, attempt: Attempt, why: KvferryError, *, led: bool) -> Effects:
        """Other ranks need not wait for this one, and what comes later has missed it."""
        key = at.key(request_id)
        try:
            found = self.parts.of(key, attempt)
        except KvferryError:
            return []
        if found is not None and found.reserved:
            return found.stop(why.kept(), failed=True) if led else []
        effects = self._pass_by(key, attempt, why) + (found.stop(why.kept(), failed=True) if found is not None else [])
        return effects if at.rank else [*effects, e.TellRefused(at, request_id, attempt, why)]

    def _pass_by(self, key: Key, attempt: Attempt, why: KvferryError) -> Effects:
        if not self.parts.pass_by(key, attempt, why):
            return []
        return [*self._supersede(self.parts.in_vain(key, attempt), attempt), e.Appeared(key[2])]

    def _ended_elsewhere(self, event: e.EndedElsewhere) -> Effects:
        """It ends here too, or does not begin."""
        key = event.at.key(event.request_id)
        try:
            found = self.parts.of(key, event.attempt)
        except KvferryError:
            return []
        ended = f"{event.attempt} of request {event.request_id} has ended on another rank: {event.why}"
        why = PeerFailed("rank_failed", ended) if event.failed else Conflict("aborted", ended)
        if found is None:
            return self._pass_by(key, event.attempt, why)
        if found.ended:  # the other rank tells: two that have ended would do so by turns
            return []
        return found.stop(why, failed=event.failed)

    # ---- the end ----

    def _abort(self, part: Part, why: str) -> Effects:
        if part.over:
            return []
        if part.ended:
            return [e.TellEnded(part.number)]
        problem = Conflict("aborted", f"request {part.request_id} was aborted: {why}")
        return part.stop(problem, failed=False)

    def _stop_all(self, at: ReadingRank, why: KvferryError, wanted: Callable[[Part], bool]) -> Effects:
        return [each for part in self.parts.select(at, wanted) for each in part.stop(why, failed=True)]

    def _supersede(self, parts: list[Part], by: Attempt) -> Effects:
        return [each for part in parts for each in part.stop(a.superseded(part.request_id, by), failed=False)]

    def _replace_weights(self, at: ReadingRank, weights: str) -> Effects:
        """Transfers into blocks that were reserved for other weights fail."""
        effects: Effects = []
        for part in self.parts.select(at, lambda part: not part.ended):
            if part.reservation is not None and part.reservation.weights != weights:
                why = a.replaced(part.request_id, part.reservation.weights, weights)
                effects += part.stop(why, failed=True)
        return effects

    def _ended(self, part: Part, event: e.Ended) -> Effects:
        waited, part.problem, part.over = self.parts.end(part), event.problem, event.over
        effects: Effects = []
        if waited and part.handed:  # a reservation that comes later has missed it
            effects += self._pass_by(part.key, part.attempt, part.why_over())
        return effects if event.problem is None else [*effects, e.TellEnded(part.number)]

    def _quiet(self, part: Part) -> Effects:
        assert not part.quiet
        part.quiet = True
        self._claims.release(part.claim)
        return [e.OneFewer()]

    def check(self) -> None:
        self.parts.check()
        self._claims.check()
        assert self._claims.numbers() == {part.claim for part in self.parts.all() if part.claim and not part.quiet}
        assert self.parts.unfinished <= self._limits.transfers

    def sizes(self) -> Sizes:
        return {**self.parts.sizes(), **self._claims.sizes(), "order ids": len(self._orders)}
