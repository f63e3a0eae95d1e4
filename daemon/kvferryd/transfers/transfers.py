"""All transfers of the daemon: which attempt an order or a reservation belongs to, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from weakref import WeakKeyDictionary, WeakValueDictionary

from cachetools import LRUCache

from kvferry.errors import Conflict, Forbidden, Full, KvferryError, NotFound, PeerFailed, Unavailable
from kvferry.schemas import TransferState
from kvferryd.aio import Notes, Tasks
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.engine.session import Rank
from kvferryd.observe import logs
from kvferryd.observe.metrics import Metrics
from kvferryd.observe.spans import Spans
from kvferryd.peers.peers import Peers, reader_of
from kvferryd.transfers.claims import Claim, Claims
from kvferryd.transfers.order import Order, Reservation, replaced
from kvferryd.transfers.ranks import STALE_ATTEMPT, Ranks
from kvferryd.transfers.record import share_of
from kvferryd.transfers.transfer import Surroundings, Transfer

log = logs.get(__name__)
ATTEMPTS = 1 << 16
"""Requests whose last attempt is remembered after their records are forgotten."""
HIGHER = "give every attempt at a request a higher number, the same on all ranks"
NO_PARTS: Mapping[int, str] = MappingProxyType({})
Key = tuple[str, str, str]
"""Engine, epoch, request."""


class Transfers:
    """Owns every transfer: `close` aborts those that are under way.

    A request has one current transfer, that of its newest attempt. Attempts count from 1. An order or a reservation may
    give the number; without one it belongs to the attempt under way, and a reservation after its end begins the next.
    What an attempt of the past brought never answers for a later one.
    """

    def __init__(
        self, config: Config, peers: Peers, metrics: Metrics, notes: Notes, one_fewer: Callable[[], None],
        spans: Spans | None = None,
    ) -> None:  # fmt: skip
        """one_fewer: called when a transfer's part on this rank has ended and nothing can be written any more."""
        self._config, self._metrics, self._notes, self._spans = config, metrics, notes, spans
        self._one_fewer = one_fewer
        self._ranks = Ranks(config, peers.channels)
        self._after = Tasks()
        self._around = Surroundings(
            config, peers, self._on_end, self._on_over, self._on_quiet, self._after.spawn
        )  # fmt: skip
        self._claims: WeakKeyDictionary[Engine, Claims] = WeakKeyDictionary()
        self._by_id: OrderedDict[str, Transfer] = OrderedDict()
        self._by_request: dict[str, list[Transfer]] = {}
        self._current: dict[Key, Transfer] = {}
        self._under_way: dict[Transfer, Engine] = {}
        """Transfers that are not over: the part of some rank has not ended."""
        self._finished: dict[str, Transfer] = {}
        """Transfers whose part on this rank has ended, the oldest first."""
        self._attempts: LRUCache[Key, int] = LRUCache(ATTEMPTS)
        """The last attempt whose record is forgotten, or that was begun by a reservation."""
        self._given: LRUCache[Key, int] = LRUCache(ATTEMPTS)
        """The highest attempt number that a router or an engine gave. A reservation that a daemon counted later never
        takes such a number: a late order of that attempt would be read into the blocks of another."""
        self._dead: LRUCache[Key, tuple[int, float]] = LRUCache(ATTEMPTS)
        """The last attempt that ended on another rank, and when: its order may still be on its way here."""
        self.draining = False
        self.left = 0
        """Transfers whose part on this rank has not ended, or may still write."""
        self._cursor, self._overs = uuid.uuid4().hex[:8], 0
        """Names this process in cursors; how many transfers were over so far."""
        self._awaited: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        """Set when the request has a transfer more; kept by those that wait for it."""

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_id.values()))

    @property
    def unfinished(self) -> int:
        """Transfers whose part on this rank has not ended."""
        return len(self._by_id) - len(self._finished)

    def get(self, transfer_id: str) -> Transfer:
        transfer = self._by_id.get(transfer_id)
        if transfer is None:
            why = f"transfer {transfer_id} is not known"
            remedy = "the daemon keeps the last ones only (history); look it up by request_id at the right daemon"
            raise NotFound("unknown_transfer", why, field="transfer_id", value=transfer_id, remedy=remedy)
        return transfer

    def of_request(self, request_id: str) -> list[Transfer]:
        """The oldest first."""
        return list(self._by_request.get(request_id, ()))

    def listed(self, since: str, limit: int, wanted: Callable[[Transfer], bool]) -> tuple[list[Transfer], str, bool]:
        """(the newest `limit` that are wanted and may have changed since, a cursor for the next call, whether all count
        as changed); the oldest first. Those under way always may have."""
        name, _, number = since.partition("-")
        whole = name != self._cursor
        seen = 0 if whole else int(number)
        found = (each for each in reversed(self._by_id.values()) if each.over_number == 0 or each.over_number > seen)
        newest = list(itertools.islice(filter(wanted, found), limit))
        return newest[::-1], f"{self._cursor}-{self._overs}", whole

    # ---- the two halves ----

    def order(
        self,
        engine: Engine,
        request_id: str,
        order: Order,
        brought: Mapping[int, Reservation] | None = None,
        *,
        attempt: int = 0,
        counted: bool = False,
        since: float | None = None,
        parts: Mapping[int, str] = NO_PARTS,
        earlier: Collection[str] = (),
    ) -> tuple[Transfer, bool]:
        """Take an order; (its transfer, whether the order is new).

        brought: reservations that came with it, by rank. since: when the part of the rank that handed it on began, by
        the monotonic clock here; None for an order that is handed on from here. counted: the number was counted by that
        rank's daemon. parts: of the same attempt by rank, as that rank knows them; earlier: of the one before. Raises
        KvferryError:
        `order_conflict`, `receive_conflict`, `stale_attempt`, `aborted`, `blocks_not_quiet`, `tables_not_allowed`,
        `full`, `draining`.
        """
        key, brought = _key(engine, request_id), dict(brought or {})
        reservation = brought.get(engine.rank)
        current = self._transfer_of(key, attempt, counted=counted, since=since, parts=parts, earlier=earlier)
        if not self._config.order_tables and reservation not in (None, current and current.reservation):
            why = "this daemon writes only blocks that the engine itself has reserved"
            remedy = "leave the tables to the engine, or set order_tables = true"
            raise Forbidden("tables_not_allowed", why, field="destination.tables", remedy=remedy)
        if current is not None and _has(current, order, exactly=since is None):
            if since is None and not current.handed_on and brought != current.brought:
                raise _conflict(request_id, "was ordered already, with other tables")
            _check_reserved(current, reservation)
            current.learn(parts)
            return current, False
        if current is not None and current.ended.is_set():
            raise _conflict(request_id, "has ended already")
        transfer = self._join(engine, key, current, attempt, order, reservation, counted=counted or not attempt)
        transfer.learn(parts)
        if since is None:
            transfer.brought = brought
            self._ranks.hand_on(transfer, engine)
        if transfer.reservation is None:
            self._after.spawn(self._meet(engine, order))
        return transfer, True

    def receive(
        self,
        engine: Engine,
        request_id: str,
        reservation: Reservation,
        order: Order | None,
        deadline_s: float | None,
        *,
        attempt: int = 0,
    ) -> Transfer:
        """Take an engine's reservation, and its order if it names the source. Raises as `order`.

        The same reservation again joins the transfer under way. After the end it is a new attempt, whatever its blocks.
        """
        key, counted = _key(engine, request_id), not attempt
        current = self._current.get(key)
        if counted:
            attempt = current.attempt if current and not current.ended.is_set() else self._next(key)
        _raise(self._attempts, key, max(attempt, self._died(key)[0]) if counted else attempt)
        current = self._transfer_of(key, attempt, counted=counted)
        if current is not None and current.ended.is_set():
            why = _conflict(request_id, f"has ended already in attempt {attempt}")
            raise why if current.problem is None else current.problem.kept()
        if order is not None and current is not None and _has(current, order, exactly=False):
            order = None
        transfer = self._join(engine, key, current, attempt, order, reservation, deadline_s, counted=counted)
        if order is not None:
            self._ranks.hand_on(transfer, engine)
        return transfer

    def _join(
        self,
        engine: Engine,
        key: Key,
        transfer: Transfer | None,
        attempt: int,
        order: Order | None,
        reservation: Reservation | None,
        deadline_s: float | None = None,
        *,
        counted: bool,
    ) -> Transfer:
        """Hand the order and the reservation to the transfer under way. Without one, begin a new attempt, which ends
        the one before. A refusal changes nothing."""
        claim = None
        if transfer is None:
            self._check_room(engine)
        else:
            _check_reserved(transfer, reservation)
        if reservation is not None and (transfer is None or transfer.reservation is None):
            claim = self._claim(engine, key[2], reservation)
        if transfer is None:
            attempt = attempt or max(self._next(key), self._died(key)[0] + 1)
            before = self._current.get(key)
            if before is not None:
                why = Conflict("superseded", f"attempt {attempt} of request {key[2]} took the place of this one")
                before.stop(TransferState.ABORTED, why)
            transfer = Transfer(engine, key[2], attempt, self._around, deadline_s, counted=counted)
            transfer.earlier = set(before.parts.values()) if before is not None else set()
            self._by_id[transfer.transfer_id] = self._current[key] = transfer
            self._by_request.setdefault(key[2], []).append(transfer)
            self._under_way[transfer] = engine
            self.left += 1
            if not counted:
                _raise(self._given, key, attempt)
            if (appeared := self._awaited.pop(key[2], None)) is not None:
                appeared.set()
        if order is not None:
            transfer.take_order(order, reader_of(engine, order.engine_id))
        if reservation is not None and claim is not None:
            transfer.take_reservation(reservation, claim, engine.weights)
        return transfer

    async def _meet(self, engine: Engine, order: Order) -> None:
        """The order waits for its reservation: shake hands meanwhile. What fails here fails again when it is needed."""
        with contextlib.suppress(KvferryError):
            await self._around.peers.get(engine, order.engine_id, order.address, order.epoch)

    def _next(self, key: Key) -> int:
        current = self._current.get(key)  # its number may have been raised since it began
        return max(self._attempts.get(key, 0), current.attempt if current else 0) + 1

    def _died(self, key: Key) -> tuple[int, float]:
        """The last attempt that ended on another rank, and when; 0 where none did."""
        return self._dead.get(key, (0, 0.0))

    def _transfer_of(
        self,
        key: Key,
        attempt: int,
        *,
        counted: bool,
        since: float | None = None,
        parts: Mapping[int, str] = NO_PARTS,
        earlier: Collection[str] = (),
    ) -> Transfer | None:
        """The current transfer, if this attempt is its own; None for a newer attempt, which takes its place.

        attempt: 0 for whichever is current. counted: by a daemon; daemons may have seen different numbers of attempts.
        A transfer under way whose number was counted takes over the number of an order that it has waited for, and a
        higher one that was counted elsewhere.

        Where daemons count, equal numbers may be of different attempts: one that was started anew counts from 1. There
        `Transfer.same_attempt` decides, and a rank whose number is another attempt's is told which one is free. Raises
        KvferryError (`stale_attempt`, `aborted`).
        """
        current = self._current.get(key)
        same = current and current.same_attempt(parts, earlier, -math.inf if since is None else since)
        if current is not None and same:
            if counted and current.counted:
                current.attempt = max(attempt, current.attempt)
            return current
        dead, died_at = self._died(key)
        if attempt and attempt <= dead:
            if counted and since is not None and died_at < since:
                raise _another_attempt(key, attempt, dead + 1)
            raise Conflict("aborted", f"attempt {attempt} of request {key[2]} has ended on another rank")
        if counted and current is not None and same is False and attempt <= current.attempt:
            raise _another_attempt(key, attempt, current.attempt + 1)
        if current is None or attempt in (0, current.attempt):
            if current is not None and attempt and not counted:
                _raise(self._given, key, attempt)
            return current
        if current.counted and not current.ended.is_set() and same is None:
            waited_for = current.order is None and not counted and attempt > self._given.get(key, 0)
            if waited_for or (attempt > current.attempt and (counted or current.order is None)):
                current.attempt, current.counted = attempt, counted
                if not counted:
                    _raise(self._given, key, attempt)
                return current
        if attempt < current.attempt:
            why = f"request {key[2]} is in attempt {current.attempt} by now"
            raise Conflict(STALE_ATTEMPT, why, field="attempt", value=current.attempt, remedy=HIGHER)
        return None

    def _claim(self, engine: Engine, request_id: str, reservation: Reservation) -> Claim:
        if engine not in self._claims:
            self._claims[engine] = Claims(engine.manifest)
        return self._claims[engine].take(reservation, request_id)

    def _check_room(self, engine: Engine) -> None:
        most, elsewhere = self._config.max_transfers, "send the request to another decode worker"
        if self.draining:
            raise Unavailable("draining", "the daemon is draining and takes no new transfers", remedy=elsewhere)
        if not engine.session.attached:
            why = f"engine {engine.engine_id} is gone; only what it published is still here"
            raise NotFound("unknown_engine", why, field="engine_id", value=engine.engine_id, remedy=elsewhere)
        if self.unfinished >= most:
            why, remedy = f"{most} transfers are under way", f"try again shortly, or {elsewhere}"
            raise Full("full", why, field="max_transfers", value=most, remedy=remedy)

    def replace_weights(self, engine: Engine) -> int:
        """Fail what is on its way into blocks that were reserved for other weights than the engine's now; how many."""
        reserved = [each for each, of in self._under_way.items() if of is engine and each.reservation is not None]
        stale = [each for each in reserved if each.weights != engine.weights and not each.ended.is_set()]
        for each in stale:
            each.stop(TransferState.FAILED, replaced(each.request_id, each.weights, engine.weights))
        return len(stale)

    # ---- the end ----

    def _on_end(self, transfer: Transfer, engine: Engine) -> None:
        self._finished[transfer.transfer_id] = transfer
        self._on_over(transfer)
        if transfer.state is not TransferState.DONE:
            self._ranks.abort(transfer, engine)
        self._notes.add(functools.partial(self._note_end, transfer))

    def _note_end(self, transfer: Transfer) -> None:
        self._forget_oldest()  # first, as the note may break
        share = share_of(transfer)
        transfer.tell_sources(share.phases_ms)
        source = transfer.order.engine_id if transfer.order else ""
        self._metrics.transfer_ended(share, source)
        if self._spans is not None:
            about = {"transfer_id": transfer.transfer_id, "engine_id": transfer.own.engine_id, "source": source}
            self._spans.transfer(share, transfer.request_id, transfer.created_at, transfer.trace, **about)
        write = log.info if transfer.problem is None else log.warning
        write(
            "transfer ended",
            request_id=transfer.request_id,
            attempt=transfer.attempt,
            transfer_id=transfer.transfer_id,
            engine_id=transfer.own.engine_id,
            source=source,
            **share.model_dump(mode="json", exclude={"error"}),
            announced=transfer.announced,
            traceparent=transfer.trace.traceparent,
            **transfer.trace.about,
            **({"code": transfer.problem.code, "why": str(transfer.problem)} if transfer.problem else {}),
        )

    def _on_over(self, transfer: Transfer) -> None:
        if transfer.over and not transfer.over_number:
            self._overs += 1
            transfer.over_number, transfer.over_at, transfer.over_since = self._overs, time.time(), time.monotonic()
            del self._under_way[transfer]
            transfer.wake()

    def _on_quiet(self) -> None:
        self.left -= 1
        self._one_fewer()

    def _forget_oldest(self) -> None:
        """Keep `history` ended transfers; one whose other ranks or reads go on is kept until they end."""
        oldest = itertools.islice(self._finished.values(), max(0, len(self._finished) - self._config.history))
        for transfer in list(oldest):
            if transfer.over and transfer.quiet.is_set():
                del self._finished[transfer.transfer_id]
                del self._by_id[transfer.transfer_id]
                of_request = self._by_request[transfer.request_id]
                of_request.remove(transfer)
                if not of_request:
                    del self._by_request[transfer.request_id]
                key = _key(transfer.own, transfer.request_id)
                if self._current.get(key) is transfer:
                    self._attempts[key] = self._next(key) - 1
                    del self._current[key]

    def abort(
        self,
        engine: Engine,
        request_id: str,
        why: str,
        *,
        attempt: int = 0,
        parts: Mapping[int, str] = NO_PARTS,
        failed: bool = False,
    ) -> bool:
        """End the request's transfer; whether one was under way. Idempotent.

        attempt: of another rank, which has ended there; a later one is left alone, unless that rank's part (`parts`) is
        of the same attempt. failed: it did not abort but fail.
        """
        key = _key(engine, request_id)
        if attempt > self._died(key)[0]:
            self._dead[key] = attempt, time.monotonic()
        transfer = self._current.get(key)
        later = transfer is not None and transfer.attempt > attempt > 0 and not transfer.same_attempt(parts)
        if transfer is None or later:
            return False
        _raise(self._attempts, key, attempt)
        if attempt and transfer.ended.is_set():  # that rank tells the others: two that have ended would do so by turns
            return False
        return self.abort_transfer(transfer, why, failed=failed)

    def abort_transfer(self, transfer: Transfer, why: str, *, failed: bool = False) -> bool:
        """End this attempt on all ranks; whether it was under way. Idempotent."""
        engine = self._under_way.get(transfer)
        if engine is None:
            return False
        if transfer.ended.is_set():
            self._ranks.abort(transfer, engine)
        elif failed:
            transfer.stop(TransferState.FAILED, PeerFailed("rank_failed", f"another rank failed: {why}"))
        else:
            problem = Conflict("aborted", f"request {transfer.request_id} was aborted: {why}")
            transfer.stop(TransferState.ABORTED, problem)
        return True

    def abort_engine(self, engine: Engine, why: str) -> None:
        """The engine is gone or retired: nothing is read for it any more."""
        for transfer, its_own in self._under_way.items():
            if its_own is engine:
                transfer.stop(TransferState.FAILED, Unavailable("engine_gone", why))

    async def renew(self) -> None:
        """Dial other ranks anew: the certificates have changed."""
        await self._ranks.renew()

    async def leave(self, engine: Engine) -> None:
        """The engine is retired: close the channels to its other ranks."""
        await self._ranks.leave(engine)

    async def wait_new(self, request_id: str) -> None:
        """Wait until the request has a transfer more. The caller bounds the wait."""
        await self._awaited.setdefault(request_id, asyncio.Event()).wait()

    async def wait(self, transfer: Transfer, until: Callable[[Transfer], bool], wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not until(transfer):
                    await transfer.changed.wait()

    async def close(self, timeout_s: float = 10.0) -> None:
        running = [transfer for transfer in self if not transfer.ended.is_set()]
        for transfer in running:
            transfer.stop(TransferState.ABORTED, Conflict("aborted", "the daemon stops"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for transfer in running:
                    await transfer.ended.wait()
        await self._ranks.close()
        if self._after:
            await asyncio.wait(self._after, timeout=timeout_s)


def _key(engine: Engine | Rank, request_id: str) -> Key:
    return engine.engine_id, engine.epoch, request_id


def _raise(numbers: LRUCache[Key, int], key: Key, least: int) -> None:
    numbers[key] = max(least, numbers.get(key, 0))


def _another_attempt(key: Key, attempt: int, free: int) -> Conflict:
    why = f"attempt {attempt} of request {key[2]} that has ended on this rank is not the one that is ordered now"
    return Conflict(STALE_ATTEMPT, why, field="attempt", value=free, remedy=HIGHER)


def _has(transfer: Transfer, order: Order, *, exactly: bool) -> bool:
    """Whether the transfer has this order. Raises KvferryError (`order_conflict`) when it has another.

    Orders of one request that reach a rank in several ways need only agree on the source (`exactly` false).
    """
    known = transfer.order
    if known is not None and transfer.handed_on:
        order = replace(order, deadline_s=known.deadline_s)
    if known is not None and (known.engine_id != order.engine_id or (exactly and known != order)):
        how = f"was ordered already, otherwise, from {known.engine_id} at {known.address}"
        raise _conflict(transfer.request_id, how)
    return known is not None


def _check_reserved(transfer: Transfer, reservation: Reservation | None) -> None:
    """Raise KvferryError (`receive_conflict`) when other blocks are reserved."""
    if reservation is not None and transfer.reservation not in (None, reservation):
        request, remedy = transfer.request_id, "abort it before reserving other blocks"
        why = f"request {request} has other blocks reserved already"
        raise Conflict("receive_conflict", why, field="request_id", value=request, remedy=remedy)


def _conflict(request_id: str, why: str) -> KvferryError:
    remedy = "use one request id for one order, or a higher `attempt`"
    why = f"request {request_id} {why}"
    return Conflict("order_conflict", why, field="request_id", value=request_id, remedy=remedy)
