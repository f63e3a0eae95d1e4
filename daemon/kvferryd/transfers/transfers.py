"""All transfers of the daemon: which attempt an order or a reservation belongs to, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from weakref import WeakKeyDictionary

from cachetools import LRUCache

from kvferry.errors import Conflict, Full, KvferryError, NotFound, PeerFailed, Unavailable
from kvferry.schemas import TransferState
from kvferryd import logs
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.metrics import Metrics
from kvferryd.peers.peers import Peers
from kvferryd.transfers.claims import Claim, Claims
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.ranks import STALE_ATTEMPT, Ranks
from kvferryd.transfers.transfer import Surroundings, Transfer

log = logs.get(__name__)
ATTEMPTS = 1 << 16
"""Requests whose last attempt is remembered after their records are forgotten."""
Key = tuple[str, str, str]
"""Engine, epoch, request."""


class Transfers:
    """Owns every transfer: `close` aborts those that are under way.

    A request has one current transfer, that of its newest attempt. Attempts count from 1. An order or a reservation may
    give the number; without one it belongs to the attempt under way, and a reservation after its end begins the next.
    What an attempt of the past brought never answers for a later one.
    """

    def __init__(self, config: Config, peers: Peers, metrics: Metrics) -> None:
        self._config, self._metrics = config, metrics
        self._ranks = Ranks(config, peers.channels)
        self._around = Surroundings(peers, config.way, config.deadline_s, self._on_end, self._spawn)
        self._claims: WeakKeyDictionary[Engine, Claims] = WeakKeyDictionary()
        self._by_id: OrderedDict[str, Transfer] = OrderedDict()
        self._current: dict[Key, Transfer] = {}
        self._finished: dict[str, Transfer] = {}
        self._attempts: LRUCache[Key, int] = LRUCache(ATTEMPTS)
        """The last attempt begun."""
        self._dead: LRUCache[Key, int] = LRUCache(ATTEMPTS)
        """The last attempt that ended on another rank: its order may still be on its way here."""
        self._after: set[asyncio.Task[None]] = set()
        self.unfinished = 0
        """Transfers whose part on this rank has not ended."""
        self.draining = False
        self._appeared = asyncio.Event()

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_id.values()))

    def get(self, transfer_id: str) -> Transfer:
        transfer = self._by_id.get(transfer_id)
        if transfer is None:
            raise NotFound(
                "unknown_transfer",
                f"transfer {transfer_id} is not known",
                field="transfer_id",
                value=transfer_id,
                remedy="the daemon keeps the last ones only (history); look it up by request_id at the right daemon",
            )
        return transfer

    def of_request(self, request_id: str) -> list[Transfer]:
        return [transfer for transfer in self if transfer.request_id == request_id]

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
        from_rank: int | None = None,
    ) -> tuple[Transfer, bool]:
        """Take an order; (its transfer, whether the order is new).

        brought: reservations that came with it, by rank. from_rank: the rank that handed it on; None for an order that
        is handed on from here. counted: the number was counted by that rank's daemon. Raises KvferryError:
        `order_conflict`, `receive_conflict`, `stale_attempt`, `aborted`, `blocks_not_quiet`, `full`, `draining`.
        """
        key, brought = _key(engine, request_id), dict(brought or {})
        transfer = self._transfer_of(key, attempt, counted=counted)
        reservation = brought.get(engine.rank)
        if transfer is not None:
            if _has(transfer, order, exactly=from_rank is None):
                if from_rank is None and brought != transfer.brought:
                    raise _conflict(request_id, "was ordered already, with other tables")
                _check_reserved(transfer, reservation)
                return transfer, False
            if transfer.ended.is_set():
                raise _conflict(request_id, "has ended already")
            _check_reserved(transfer, reservation)
        claim = None
        if reservation is not None and (transfer is None or transfer.reservation is None):
            claim = self._claim(engine, request_id, reservation)
        if transfer is None:
            transfer = self._begin(engine, key, attempt or self._next(key), claim, counted=counted or not attempt)
        if from_rank is None:
            transfer.brought = brought
        self._match(transfer, order=order, reservation=reservation, claim=claim)
        if from_rank is None:
            self._ranks.hand_on(transfer)
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
        key = _key(engine, request_id)
        current = self._current.get(key)
        counted = not attempt
        if not attempt:
            attempt = current.attempt if current and not current.ended.is_set() else self._next(key)
        self._attempts[key] = max(attempt, self._attempts.get(key, 0))
        running = self._transfer_of(key, attempt, counted=counted)
        if running is not None and running.ended.is_set():
            raise running.problem or _conflict(request_id, f"has ended already in attempt {attempt}")
        if running is not None:
            _check_reserved(running, reservation)
        new_order = order if order is not None and not (running and _has(running, order, exactly=False)) else None
        claim = None
        if running is None or running.reservation is None:
            claim = self._claim(engine, request_id, reservation)
        transfer = running or self._begin(engine, key, attempt, claim, counted=counted)
        if running is None and deadline_s:
            transfer.set_deadline(deadline_s)
        self._match(transfer, order=new_order, reservation=reservation, claim=claim)
        if new_order is not None:
            self._ranks.hand_on(transfer)
        return transfer

    def _next(self, key: Key) -> int:
        return self._attempts.get(key, 0) + 1

    def _transfer_of(self, key: Key, attempt: int, *, counted: bool) -> Transfer | None:
        """The current transfer, if this attempt is its own; None for a newer attempt, which takes its place.

        attempt: 0 for whichever is current. counted: by a daemon; daemons may have seen different numbers of attempts.
        A transfer under way whose number was counted takes over the number of an order that it has waited for, and a
        higher one that was counted elsewhere. Raises KvferryError (`stale_attempt`, `aborted`).
        """
        current = self._current.get(key)
        if attempt and attempt <= self._dead.get(key, 0):
            raise Conflict("aborted", f"attempt {attempt} of request {key[2]} has ended on another rank")
        if current is None or attempt in (0, current.attempt):
            return current
        if current.counted and not current.ended.is_set():
            waited_for = current.order is None and not counted
            if waited_for or (attempt > current.attempt and (counted or current.order is None)):
                current.attempt, current.counted = attempt, counted
                return current
        if attempt < current.attempt:
            raise Conflict(
                STALE_ATTEMPT,
                f"request {key[2]} is in attempt {current.attempt} by now",
                field="attempt",
                value=current.attempt,
                remedy="give every attempt at a request a higher number, the same on all ranks",
            )
        return None

    def _claim(self, engine: Engine, request_id: str, reservation: Reservation) -> Claim:
        claims = self._claims.get(engine)
        if claims is None:
            assert engine.manifest is not None
            claims = self._claims[engine] = Claims(engine.manifest)
        return claims.take(reservation, request_id)

    def _begin(self, engine: Engine, key: Key, attempt: int, claim: Claim | None, *, counted: bool) -> Transfer:
        """The transfer of a new attempt, which ends the one before. A refusal releases the claim."""
        try:
            self._check_room(engine)
        except KvferryError:
            if claim is not None:
                claim.release()
            raise
        before = self._current.get(key)
        if before is not None:
            why = Conflict("superseded", f"attempt {attempt} of request {key[2]} took the place of this one")
            before.stop(TransferState.ABORTED, why)
        transfer = Transfer(engine, key[2], attempt, self._around, counted=counted)
        self.unfinished += 1
        self._attempts[key] = attempt
        self._by_id[transfer.transfer_id] = self._current[key] = transfer
        self._appeared.set()
        self._appeared = asyncio.Event()
        return transfer

    def _check_room(self, engine: Engine) -> None:
        if self.draining:
            raise Unavailable(
                "draining",
                "the daemon is draining and takes no new transfers",
                remedy="send the request to another decode worker",
            )
        if not engine.session.attached:
            raise NotFound(
                "unknown_engine",
                f"engine {engine.engine_id} is gone; only what it published is still here",
                field="engine_id",
                value=engine.engine_id,
                remedy="send the request to another decode worker",
            )
        if self.unfinished >= self._config.max_transfers:
            raise Full(
                "full",
                f"{self._config.max_transfers} transfers are under way",
                field="max_transfers",
                value=self._config.max_transfers,
                remedy="try again shortly, or send the request to another worker",
            )

    @staticmethod
    def _match(
        transfer: Transfer, *, order: Order | None, reservation: Reservation | None, claim: Claim | None
    ) -> None:
        if order is not None:
            transfer.take_order(order)
        if reservation is not None and claim is not None:
            transfer.take_reservation(reservation, claim)

    # ---- the end ----

    def _on_end(self, transfer: Transfer) -> None:
        self.unfinished -= 1
        transfer.wake()
        self._finished[transfer.transfer_id] = transfer
        if transfer.state is not TransferState.DONE:
            self._ranks.abort(transfer)
        source = transfer.order.engine_id if transfer.order else ""
        share = transfer.share()
        self._metrics.transfer_ended(share, source)
        write = log.info if transfer.problem is None else log.warning
        write(
            "transfer ended",
            request_id=transfer.request_id,
            attempt=transfer.attempt,
            transfer_id=transfer.transfer_id,
            engine_id=transfer.engine.engine_id,
            rank=transfer.engine.rank,
            source=source,
            state=transfer.state.value,
            bytes=transfer.nbytes,
            descriptors=transfer.descriptors,
            path=share.path,
            transport=share.transport,
            announced=transfer.announced,
            phases_ms=share.phases_ms,
            traceparent=transfer.order.traceparent if transfer.order else "",
            **({"code": transfer.problem.code, "why": str(transfer.problem)} if transfer.problem else {}),
        )
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Keep `history` ended transfers; one whose other ranks or reads go on is kept until they end."""
        oldest = itertools.islice(self._finished.values(), max(0, len(self._finished) - self._config.history))
        for transfer in list(oldest):
            if transfer.over and transfer.quiet.is_set():
                del self._finished[transfer.transfer_id]
                del self._by_id[transfer.transfer_id]
                key = _key(transfer.engine, transfer.request_id)
                if self._current.get(key) is transfer:
                    del self._current[key]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._after.add(task)
        task.add_done_callback(self._after.discard)

    def abort(self, engine: Engine, request_id: str, why: str, *, attempt: int = 0, failed: bool = False) -> bool:
        """End the request's transfer; whether one was under way. Idempotent.

        attempt: of another rank, which has ended there; a later one is left alone. failed: it did not abort but fail.
        """
        key = _key(engine, request_id)
        if attempt:
            self._dead[key] = max(attempt, self._dead.get(key, 0))
        transfer = self._current.get(key)
        if transfer is None or transfer.over or (attempt and transfer.attempt > attempt):
            return False
        if transfer.ended.is_set():
            self._ranks.abort(transfer)
        elif failed:
            transfer.stop(TransferState.FAILED, PeerFailed("rank_failed", f"another rank failed: {why}"))
        else:
            problem = Conflict("aborted", f"request {request_id} was aborted: {why}")
            transfer.stop(TransferState.ABORTED, problem)
        return True

    def abort_engine(self, engine: Engine, why: str) -> None:
        """The engine is gone or retired: nothing is read for it any more."""
        for transfer in self:
            if transfer.engine is engine:
                transfer.stop(TransferState.FAILED, Unavailable("engine_gone", why))

    async def leave(self, engine: Engine) -> None:
        """The engine is retired: nothing more is said to its other ranks."""
        await self._ranks.leave(engine)

    async def wait_new(self) -> None:
        """Wait until there is one more transfer. The caller bounds the wait."""
        await self._appeared.wait()

    async def wait(self, transfer: Transfer, until: Callable[[Transfer], bool], wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not until(transfer):
                    changed = transfer.changed
                    await changed.wait()

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


def _key(engine: Engine, request_id: str) -> Key:
    return engine.engine_id, engine.epoch, request_id


def _has(transfer: Transfer, order: Order, *, exactly: bool) -> bool:
    """Whether the transfer has this order. Raises KvferryError (`order_conflict`) when it has another.

    Orders of one request that reach a rank in several ways need only agree on the source (`exactly` false).
    """
    known = transfer.order
    if known is None:
        return False
    if known.engine_id != order.engine_id or (exactly and known != order):
        raise _conflict(
            transfer.request_id, f"was ordered already, otherwise, from {known.engine_id} at {known.address}"
        )
    return True


def _check_reserved(transfer: Transfer, reservation: Reservation | None) -> None:
    """Raise KvferryError (`receive_conflict`) when other blocks are reserved."""
    held = transfer.reservation
    if reservation is not None and held is not None and held != reservation:
        raise Conflict(
            "receive_conflict",
            f"request {transfer.request_id} has other blocks reserved already",
            field="request_id",
            value=transfer.request_id,
            remedy="abort it before reserving other blocks",
        )


def _conflict(request_id: str, why: str) -> KvferryError:
    return Conflict(
        "order_conflict",
        f"request {request_id} {why}",
        field="request_id",
        value=request_id,
        remedy="use one request id for one order, or a higher `attempt`",
    )
