"""All transfers of the daemon: which attempt an order or a reservation belongs to, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakKeyDictionary, WeakValueDictionary

from cachetools import LRUCache

from kvferry.errors import Conflict, Forbidden, Full, KvferryError, NotFound, PeerFailed, Unavailable
from kvferry.schemas import OrderBody, Ordered, TransferRecord, TransferState
from kvferryd.aio import Notes, Tasks
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.engine.session import Rank
from kvferryd.observe import logs
from kvferryd.observe.metrics import Metrics
from kvferryd.observe.spans import Spans
from kvferryd.peers.peers import Peers, reader_of
from kvferryd.transfers.claims import Claim, Claims
from kvferryd.transfers.order import NO_ATTEMPT, Attempt, Order, Reservation, replaced
from kvferryd.transfers.ranks import Ranks
from kvferryd.transfers.record import share_of
from kvferryd.transfers.transfer import Surroundings, Transfer

log = logs.get(__name__)
ATTEMPTS = 1 << 16
"""Requests whose last attempt is remembered after its record is forgotten, and order ids."""
ELSEWHERE = "send the request to another decode worker"
HIGHER = "give every attempt at a request a higher number, the same on all ranks"
Key = tuple[str, str, str]
"""Engine, epoch, request."""


class Transfers:
    """Owns every transfer: `close` aborts those that are under way.

    The engine that reads numbers its attempts at a request, the same on all its ranks: a reservation begins its attempt
    and ends the one before. An order belongs to the attempt that it names. One that names none is of the attempt under
    way, or waits for the next reservation. Rank 0 leads: it takes the orders of routers, and hands each one on with the
    number of its attempt when its own reservation is there. Orders that bring their tables are counted by rank 0.
    """

    def __init__(
        self, config: Config, peers: Peers, metrics: Metrics, notes: Notes, one_fewer: Callable[[], None],
        instance: str, spans: Spans | None = None,
    ) -> None:  # fmt: skip
        """one_fewer: called when a transfer's part on this rank has ended and nothing can be written any more.
        instance: of this daemon."""
        self._config, self._metrics, self._notes, self._spans = config, metrics, notes, spans
        self._one_fewer = one_fewer
        self._ranks = Ranks(config, peers.channels, instance)
        self._after = Tasks()
        self._around = Surroundings(
            config, peers, self._on_end, self._on_over, self._on_quiet, self._ranks.ask_bound, self._after.spawn
        )  # fmt: skip
        self._claims: WeakKeyDictionary[Engine, Claims] = WeakKeyDictionary()
        self._by_id: OrderedDict[str, Transfer] = OrderedDict()
        self._by_request: dict[str, list[Transfer]] = {}
        self._current: dict[Key, Transfer] = {}
        """The newest attempt at each request that has a reservation on this rank."""
        self._waiting: dict[Key, dict[Attempt, Transfer]] = {}
        """Orders that wait for the reservation of a later attempt, by that; NO_ATTEMPT: the next, whichever that is."""
        self._over: LRUCache[Key, tuple[Attempt, KvferryError]] = LRUCache(ATTEMPTS)
        """The newest attempt whose record is forgotten, or that has ended elsewhere or was refused here; and why no
        order and no reservation belongs to it. `_pass` alone sets it: it only ever rises."""
        self._by_order: LRUCache[str, tuple[str, object]] = LRUCache(ATTEMPTS)
        """The transfer of each order_id, and what the order said."""
        self._instance, self._counted = instance, itertools.count(1)
        """Number the attempts of orders that bring their tables."""
        self._under_way: dict[Transfer, Engine] = {}
        """Transfers that are not over: the part of some rank has not ended."""
        self._finished: dict[str, Transfer] = {}
        """Transfers whose part on this rank has ended, the oldest first."""
        self.draining = False
        self.left = 0
        """Transfers whose part on this rank has not ended, or may still write."""
        self._cursor, self._overs = self._instance[:8], 0
        """Names this process in cursors; how many transfers were over so far."""
        self._awaited: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        """Set when the request has a transfer or an attempt more; kept by those that wait for it."""

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_id.values()))

    @property
    def unfinished(self) -> int:
        """Transfers whose part on this rank has not ended."""
        return len(self._by_id) - len(self._finished)

    def find(self, transfer_id: str) -> Transfer | None:
        return self._by_id.get(transfer_id)

    def get(self, transfer_id: str) -> Transfer:
        transfer = self.find(transfer_id)
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
        self, engine: Engine, request_id: str, order: Order, brought: Mapping[int, Reservation] | None = None, *,
        number: int = 0, order_id: str = "",
    ) -> tuple[Transfer, bool]:  # fmt: skip
        """Take a router's order, on rank 0; (its transfer, whether the order is new).

        brought: reservations that came with it, by rank. number: of the attempt; 0 for the one under way, or else the
        next. order_id: the caller's own; an order that comes again with it gets the same answer whatever has ended.
        Raises KvferryError: `order_conflict`, `receive_conflict`, `stale_attempt`, `aborted`, `blocks_not_quiet`,
        `tables_not_allowed`, `full`, `draining`.
        """
        key, brought = _key(engine, request_id), dict(brought or {})
        if not order_id:
            return self._order(engine, key, order, brought, number)
        said = key, order, {rank: each.past() for rank, each in brought.items()}, number
        known_id, known = self._by_order.get(order_id, ("", None))
        if known_id in self._by_id:
            if said != known:
                why, remedy = f"order {order_id} was given already, otherwise", "give another order another order_id"
                raise Conflict("order_conflict", why, field="order_id", value=order_id, remedy=remedy)
            return self._by_id[known_id], False
        transfer, created = self._order(engine, key, order, brought, number)
        self._by_order[order_id] = transfer.transfer_id, said
        return transfer, created

    def _order(
        self, engine: Engine, key: Key, order: Order, brought: dict[int, Reservation], number: int
    ) -> tuple[Transfer, bool]:
        found, reservation = _going_on(self._current.get(key)), brought.get(engine.rank)
        if brought and number:
            raise _conflict(key[2], f"brings its tables, and names attempt {number}: rank 0 counts such orders")
        if brought and (found is None or found.attempt.by):
            return self._order_tables(engine, key, found, order, brought)
        if number:
            found = self._of(key, Attempt(number))
        elif found is None:
            found = self._waiting_at(key, NO_ATTEMPT)
        if found is not None:
            if reservation not in (None, found.reservation):
                self._check_tables_allowed()
            _check_reserved(found, reservation)
            if _has(found, order, exactly=True):
                return found, False
            if found.ended.is_set():
                raise _conflict(key[2], "has ended already")
        else:
            self._check_room(engine)
            found = self._begin(engine, key, Attempt(number))
            self._waiting.setdefault(key, {})[found.attempt] = found
        self._take_order(engine, key, found, order)
        if found.reservation is None:
            self._after.spawn(self._meet(engine, order))
        return found, True

    def _order_tables(
        self, engine: Engine, key: Key, found: Transfer | None, order: Order, brought: dict[int, Reservation]
    ) -> tuple[Transfer, bool]:
        """An order that brings its tables is a whole attempt. found: the one under way."""
        reservation = brought[engine.rank]
        self._check_tables_allowed()
        if found is not None:
            if not _has(found, order, exactly=True) or brought != found.brought:
                raise _conflict(key[2], "was ordered already, with other tables")
            return found, False
        self._check_kind(key, Attempt(0, self._instance))
        self._check_room(engine)
        claim = self._claim(engine, key[2], reservation)
        transfer = self._begin(engine, key, Attempt(next(self._counted), self._instance))
        self._make_current(key, transfer, transfer.attempt)
        transfer.brought = brought
        transfer.take_reservation(reservation, claim, engine.weights)
        self._take_order(engine, key, transfer, order)
        return transfer, True

    def receive(
        self, engine: Engine, request_id: str, number: int, reservation: Reservation, order: Order | None,
        deadline_s: float | None,
    ) -> Transfer:  # fmt: skip
        """Take an engine's reservation for the attempt of this number, and its order if it names the source.

        The same reservation again joins the transfer under way. A refusal is this rank's end of the attempt. Raises as
        `order`.
        """
        attempt = Attempt(number)
        with self.refusing(engine, request_id, attempt):
            return self._receive(engine, _key(engine, request_id), attempt, reservation, order, deadline_s)

    def _receive(
        self, engine: Engine, key: Key, attempt: Attempt, reservation: Reservation, order: Order | None,
        deadline_s: float | None,
    ) -> Transfer:  # fmt: skip
        found = self._of(key, attempt) or self._waiting_at(key, NO_ATTEMPT)
        if found is not None and found.ended.is_set():
            raise _over(found).kept()
        if found is not None and order is not None and _has(found, order, exactly=False):
            if found.order is not None and found.reservation is None:
                found.order = found.order.naming(order)  # which other ranks may have alone
            order = None
        if found is None:
            self._check_room(engine)
        elif found.reservation is not None:
            _check_reserved(found, reservation)
        claim = None
        if found is None or found.reservation is None:
            claim = self._claim(engine, key[2], reservation)
        transfer = found or self._begin(engine, key, attempt, deadline_s)
        self._make_current(key, transfer, attempt)
        if claim is not None:
            transfer.take_reservation(reservation, claim, engine.weights)
        if order is not None:
            self._take_order(engine, key, transfer, order)
        elif transfer.order is not None:
            self._lead(engine, key, transfer)
        return transfer

    def handed(
        self, engine: Engine, request_id: str, attempt: Attempt, order: Order, reservation: Reservation | None
    ) -> Transfer:
        """Take an order that rank 0 hands on. reservation: came with it. Raises as `order`."""
        with self.refusing(engine, request_id, attempt):
            return self._handed(engine, _key(engine, request_id), attempt, order, reservation)

    def _handed(
        self, engine: Engine, key: Key, attempt: Attempt, order: Order, reservation: Reservation | None
    ) -> Transfer:
        found, claim = self._of(key, attempt), None
        if found is not None:
            _check_reserved(found, reservation)
            if _has(found, order, exactly=False):
                found.led = order
                return found
            if found.ended.is_set():
                raise _conflict(key[2], "has ended already")
        else:
            for later in self._waiting.get(key, ()):
                if attempt.before(later):
                    raise _stale(key[2], later)
            self._check_room(engine, handed=True)
            if reservation is not None:
                self._check_tables_allowed()
                claim = self._claim(engine, key[2], reservation)
        transfer = found or self._begin(engine, key, attempt)
        if claim is not None and reservation is not None:
            self._make_current(key, transfer, attempt)
            transfer.take_reservation(reservation, claim, engine.weights)
        elif found is None:
            self._supersede_waiting(key, attempt)
            self._waiting.setdefault(key, {})[attempt] = transfer
            self._after.spawn(self._meet(engine, order))
        transfer.take_order(order, reader_of(engine, order.engine_id), handed=True)
        return transfer

    @contextlib.contextmanager
    def refusing(self, engine: Engine, request_id: str, attempt: Attempt) -> Iterator[None]:
        """What is refused inside is this rank's end of the attempt, where that has not begun here: the other ranks need
        not wait for it."""
        try:
            yield
        except KvferryError as why:
            self._refuse(engine, request_id, attempt, why)
            raise

    def _refuse(self, engine: Engine, request_id: str, attempt: Attempt, why: KvferryError) -> None:
        key = _key(engine, request_id)
        try:
            found = self._of(key, attempt)
        except KvferryError:
            return
        if found is not None and found.reservation is not None:
            return
        self._pass(key, attempt, why)
        if found is not None:
            found.stop(TransferState.FAILED, why.kept())
        if not engine.rank:
            self._ranks.tell_refused(engine, request_id, attempt, why)

    def _pass(self, key: Key, attempt: Attempt, why: KvferryError) -> None:
        """The attempt is over here: no order and no reservation belongs to it any more, or to a lower one."""
        over, _ = self._over.get(key, (NO_ATTEMPT, None))
        if attempt != over and not attempt.before(over):
            self._over[key] = attempt, why.kept()
            self._supersede_waiting(key, attempt)
        self._appeared(key[2])

    def _begin(self, engine: Engine, key: Key, attempt: Attempt, deadline_s: float | None = None) -> Transfer:
        transfer = Transfer(engine, key[2], attempt, self._around, deadline_s)
        self._by_id[transfer.transfer_id] = transfer
        self._by_request.setdefault(key[2], []).append(transfer)
        self._under_way[transfer] = engine
        self.left += 1
        self._appeared(key[2])
        return transfer

    def _make_current(self, key: Key, transfer: Transfer, attempt: Attempt) -> None:
        """It is the newest attempt from now on, and the only one."""
        before = self._current.get(key)
        if before is transfer:
            return
        self._waits_no_more(key, transfer)
        self._supersede_waiting(key, attempt)
        if before is not None:
            self._supersede(before, attempt)
        transfer.attempt, self._current[key] = attempt, transfer
        self._appeared(key[2])

    def _waiting_at(self, key: Key, attempt: Attempt) -> Transfer | None:
        """The transfer whose order waits for this attempt's reservation; NO_ATTEMPT: the next, whichever."""
        return _going_on(self._waiting.get(key, {}).get(attempt))

    def _waits_no_more(self, key: Key, transfer: Transfer) -> bool:
        """Whether it did."""
        waiting = self._waiting.get(key, {})
        waited = waiting.get(transfer.attempt) is transfer
        if waited:
            del waiting[transfer.attempt]
            if not waiting:
                del self._waiting[key]
        return waited

    def _supersede_waiting(self, key: Key, attempt: Attempt) -> None:
        """Orders for earlier attempts wait in vain."""
        for each in list(self._waiting.get(key, {}).values()):
            if each.attempt.number and each.attempt.before(attempt):
                self._supersede(each, attempt)

    def _supersede(self, before: Transfer, attempt: Attempt) -> None:
        why = Conflict("superseded", f"{attempt} of request {before.request_id} took the place of this one")
        before.stop(TransferState.ABORTED, why)

    def _take_order(self, engine: Engine, key: Key, transfer: Transfer, order: Order) -> None:
        transfer.take_order(order, reader_of(engine, order.engine_id))
        self._lead(engine, key, transfer)

    def _lead(self, engine: Engine, key: Key, transfer: Transfer) -> None:
        """Rank 0 hands an order on as soon as its own reservation says which attempt it is of."""
        if not engine.rank and not transfer.ranks and self._current.get(key) is transfer:
            self._ranks.hand_on(transfer, engine)

    async def _meet(self, engine: Engine, order: Order) -> None:
        """The order waits for its reservation: shake hands meanwhile. What fails here fails again when it is needed."""
        with contextlib.suppress(KvferryError):
            await self._around.peers.get(engine, order.engine_id, order.address, order.epoch)

    def _of(self, key: Key, attempt: Attempt) -> Transfer | None:
        """The transfer of this attempt; None where the attempt is still to come.

        Raises KvferryError: `stale_attempt` after a later one, why it is over for one that ended elsewhere or was
        refused here, `order_conflict` for another kind of attempt.
        """
        current = self._current.get(key)
        if current is not None and current.attempt == attempt:
            return current
        over, why = self._over.get(key, (NO_ATTEMPT, None))
        if why is not None and attempt == over:
            raise why.kept()
        for newest in (over, current.attempt if current is not None else NO_ATTEMPT):
            if attempt.before(newest):
                raise _stale(key[2], newest)
        self._check_kind(key, attempt)
        return self._waiting.get(key, {}).get(attempt)

    def _check_kind(self, key: Key, attempt: Attempt) -> None:
        """A request's attempts are all the engine's, or all of orders that bring their tables."""
        current, (over, _) = self._current.get(key), self._over.get(key, (NO_ATTEMPT, None))
        newest = current.attempt if current is not None else over
        if newest != NO_ATTEMPT and bool(newest.by) != bool(attempt.by):
            how = "its orders bring tables" if newest.by else "its engine reserves blocks for it"
            raise _conflict(key[2], f"has another kind of attempts: {how}")

    def _check_tables_allowed(self) -> None:
        if not self._config.order_tables:
            why = "this daemon writes only blocks that the engine itself has reserved"
            remedy = "leave the tables to the engine, or set order_tables = true"
            raise Forbidden("tables_not_allowed", why, field="destination.tables", remedy=remedy)

    def _appeared(self, request_id: str) -> None:
        if (appeared := self._awaited.pop(request_id, None)) is not None:
            appeared.set()

    def _claim(self, engine: Engine, request_id: str, reservation: Reservation) -> Claim:
        if engine not in self._claims:
            self._claims[engine] = Claims(engine.manifest)
        return self._claims[engine].take(reservation, request_id)

    def on_roster(self, engine: Engine) -> None:
        """It is known anew which daemons the engine's ranks have. An attempt that an earlier one of rank 0 has
        handed on ends here: nobody gathers its ends any more."""
        leader = engine.instances.get(0)
        for each, of in self._under_way.items():
            handed_by = each.order.leader if of is engine and each.order is not None else ""
            if leader and handed_by and handed_by != leader:
                why = "rank 0 of the same engine, which handed the order on, was started anew"
                lost = PeerFailed("rank_failed", why, field="rank", value=0, remedy="try again, in a new attempt")
                each.stop(TransferState.FAILED, lost)
        self.hand_back(engine)

    def hand_back(self, engine: Engine) -> None:
        """End the orders that wait for a reservation here, where a rank of the engine is draining: their router gives
        them to another engine. An order that was handed on goes on."""
        if (why := self._draining(engine)) is not None:
            waiting = [
                each
                for key, waiting in self._waiting.items()
                if key[:2] == engine.session.rank[:2]
                for each in waiting.values()
            ]
            for each in waiting:
                if not each.handed_on:
                    each.stop(TransferState.FAILED, why)

    def _draining(self, engine: Engine) -> KvferryError | None:
        """Why the engine takes no new transfers: one of its ranks is draining. None where none is."""
        rank = engine.rank if self.draining else min(engine.draining - {engine.rank}, default=None)
        if rank is None:
            return None
        if engine.world_size == 1:
            return Unavailable("draining", "the daemon is draining and takes no new transfers", remedy=ELSEWHERE)
        where = f"rank {rank} of engine {engine.engine_id} at {engine.members.get(rank, self._config.advertise)}"
        why = f"{where} is draining, and the engine takes no new transfers"
        return Unavailable("draining", why, field="rank", value=rank, remedy=ELSEWHERE)

    def _check_room(self, engine: Engine, *, handed: bool = False) -> None:
        """handed: rank 0 has taken the order, and knows what other ranks say."""
        most, draining = self._config.max_transfers, self._draining(engine)
        if draining is not None and (self.draining or not handed):
            raise draining
        if not engine.session.attached:
            why = f"engine {engine.engine_id} is gone; only what it published is still here"
            raise NotFound("unknown_engine", why, field="engine_id", value=engine.engine_id, remedy=ELSEWHERE)
        if self.unfinished >= most:
            why, remedy = f"{most} transfers are under way", f"try again shortly, or {ELSEWHERE}"
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
        key = _key(engine, transfer.request_id)
        if self._waits_no_more(key, transfer) and transfer.handed_on:  # a reservation that comes later has missed it
            self._pass(key, transfer.attempt, _over(transfer))
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
            attempt=transfer.attempt.number,
            lease=transfer.lease,
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
            transfer.over_number, transfer.over_at = self._overs, time.time()
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
                    del self._current[key]
                    self._pass(key, transfer.attempt, _over(transfer))

    def abort(self, engine: Engine, request_id: str, why: str) -> bool:
        """End the request's transfers; whether one was under way. Idempotent."""
        key = _key(engine, request_id)
        found = [self._current.get(key), *self._waiting.get(key, {}).values()]
        ended = [self.abort_transfer(each, why) for each in found if each is not None]
        return any(ended)

    def abort_attempt(self, engine: Engine, request_id: str, attempt: Attempt, why: str, *, failed: bool) -> bool:
        """This attempt has ended on another rank: it ends here too, or does not begin. Whether it was under way.
        failed: it did not abort but fail. Idempotent."""
        key = _key(engine, request_id)
        try:
            found = self._of(key, attempt)
        except KvferryError:
            return False
        if found is None:
            ended = f"{attempt} of request {request_id} has ended on another rank: {why}"
            self._pass(key, attempt, Conflict("aborted", ended))
            return False
        if found.ended.is_set():  # that rank tells the others: two that have ended would do so by turns
            return False
        return self.abort_transfer(found, why, failed=failed)

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

    async def prewarm(self, engine: Engine, source: str, address: str) -> None:
        """Let the other ranks shake hands with this source. Raises KvferryError, which names a rank that could not."""
        await self._ranks.prewarm(engine, source, address)

    async def lead(self, engine: Engine, body: OrderBody, trace: logs.Trace) -> tuple[Ordered, bool]:
        """Give a router's order to rank 0; as `order`. Raises KvferryError."""
        return await self._ranks.lead(engine, body, trace)

    async def record_at_leader(
        self, engine: Engine, transfer_id: str, wait_s: float, *, abort: bool = False
    ) -> TransferRecord:
        """The record of a transfer that rank 0 keeps. Raises KvferryError (`unknown_transfer`)."""
        return await self._ranks.record(engine, transfer_id, wait_s, abort=abort)

    async def bound(self, engine: Engine, request_id: str, attempt: Attempt, read: tuple[str, int]) -> tuple[str, int]:
        """Which lease this rank reads in an attempt, as of `Transfer.bound`; waits for the attempt as well. Raises
        KvferryError, too, where it is over."""
        key = _key(engine, request_id)
        while (found := self._of(key, attempt)) is None:
            await self.wait_new(request_id)
        return await found.bound(read)

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


def _stale(request_id: str, newest: Attempt) -> Conflict:
    why = f"request {request_id} is in {newest} by now"
    return Conflict("stale_attempt", why, field="attempt", value=newest.number, remedy=HIGHER)


def _over(transfer: Transfer) -> KvferryError:
    """Why nothing more belongs to an attempt that has ended."""
    return transfer.problem or _conflict(transfer.request_id, f"has ended already in {transfer.attempt}")


def _going_on(transfer: Transfer | None) -> Transfer | None:
    """None for one that has ended, or is about to."""
    return None if transfer is None or transfer.stopped else transfer


def _has(transfer: Transfer, order: Order, *, exactly: bool) -> bool:
    """Whether the transfer has this order. Raises KvferryError (`order_conflict`) when it has another.

    Orders of one request that reach a rank in several ways need only agree on the source (`exactly` false).
    """
    known = transfer.order
    if known is not None and (not known.same_source(order) or (exactly and known != order)):
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
