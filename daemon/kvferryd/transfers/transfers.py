"""The transfers of the daemon: what their machine says (kvferry.protocol.requests) is done here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import assert_never
from weakref import WeakKeyDictionary, WeakValueDictionary

from kvferry.errors import Conflict, Internal, KvferryError, Unavailable
from kvferry.protocol import requests_events as e
from kvferry.protocol.attempts import Attempt, Limits, ReadingRank, draining, engine_gone
from kvferry.protocol.requests import Requests
from kvferry.schemas import FailedRequest, RankTransfer, TransferState
from kvferryd.aio import Notes, Tasks, carry_out
from kvferryd.config import Config
from kvferryd.engine import Engine
from kvferryd.observe import logs
from kvferryd.observe.history import History
from kvferryd.observe.metrics import Metrics
from kvferryd.observe.spans import Spans
from kvferryd.peers.peer import as_reader
from kvferryd.peers.peers import Peers
from kvferryd.transfers.book import Book
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.ranks import Ranks
from kvferryd.transfers.record import GIVEN, began_of, json_of, share_of, why_slow
from kvferryd.transfers.slow import Slow
from kvferryd.transfers.transfer import Transfer
from kvferryd.transfers.work import Surroundings, Was

log = logs.get(__name__)


class Transfers(Book):
    """Owns every transfer: `close` aborts those that are under way. Rank 0 leads: `order` is for its daemon."""

    def __init__(
        self, config: Config, peers: Peers, metrics: Metrics, history: History, notes: Notes,
        one_fewer: Callable[[], None], instance: str, spans: Spans | None = None,
    ) -> None:  # fmt: skip
        """one_fewer: called when a transfer has ended on all ranks, and when nothing of it can be written any more.
        instance: of this daemon."""
        super().__init__(instance[:8])
        self._config, self._metrics, self._notes, self._spans = config, metrics, notes, spans
        self._history, self._slow = history, Slow(config.slow_ms, time.monotonic)
        self._one_fewer = one_fewer
        self._engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()
        """By life."""
        self.ranks = Ranks(config, peers.channels, instance, self._engines, self._on_over)
        self._after = Tasks()
        self._around = Surroundings(config, peers, self._on_end, self._on_quiet, self._after.spawn)
        self.requests = Requests(instance, Limits(config.max_transfers, config.history, config.order_tables))
        self._lives = itertools.count(1)
        self._ranks_of: WeakKeyDictionary[Engine, ReadingRank] = WeakKeyDictionary()
        self.draining = False
        self._awaited: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        """Set when the request has a transfer or an attempt more; kept by those that wait for it."""

    @property
    def unfinished(self) -> int:
        """Transfers whose part on this rank has not ended."""
        return self.requests.parts.unfinished

    @property
    def left(self) -> int:
        """As of the machine."""
        return self.requests.left

    # ---- the machine ----

    def _on(self, event: e.Event) -> list[e.Effect]:
        """The effects, which have been carried out. None of them calls for another event before the loop's next turn.

        Raises KvferryError where the machine refuses the event.
        """
        effects = self.requests.on(event)
        carry_out(effects, self._do)
        return effects

    def _answer(self, event: e.Ordered | e.Reserved | e.Handed) -> tuple[Transfer, bool]:
        """(the transfer, whether the order is new). Raises KvferryError."""
        answer = self._on(event)[-1]
        if isinstance(answer, e.Refused):
            raise answer.why
        assert isinstance(answer, e.Taken)
        try:
            transfer = self._by_part[answer.part]
        except KeyError:
            raise Internal("internal", "the daemon failed to begin a transfer") from None
        # At the loop's next turn: the transfer itself goes first.
        asyncio.get_running_loop().call_soon(self._begun, transfer)
        return transfer, answer.new

    def _begun(self, transfer: Transfer) -> None:
        if not transfer.over_number:
            self._history.began(began_of(transfer))

    def _note_over(self, transfer: Transfer, share: RankTransfer | None = None) -> None:
        """share: its own, if it is at hand."""
        self._history.over(transfer.transfer_id, json_of(transfer, share))
        if transfer.state is not TransferState.FAILED and transfer.state_of_all is TransferState.FAILED:
            # Its request has failed, and the daemon of that rank may never say so.
            self._count(transfer, next(each for each in transfer.ranks.values() if each.state is TransferState.FAILED))

    def _count(self, transfer: Transfer, share: RankTransfer) -> None:
        """share: its own, or that of another rank, which has failed."""
        source = transfer.order.engine_id if transfer.order else ""
        self._metrics.transfer_ended(share, source)
        self._history.ended(share, source)
        if share.state is TransferState.FAILED and share.error is not None:
            self._history.failures.note(
                FailedRequest(
                    at=time.time(), request_id=transfer.request_id, transfer_id=transfer.transfer_id, engine_id=source,
                    error=share.error,
                )
            )  # fmt: skip

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Begin(part, at, request_id, attempt, deadline_s):
                transfer = Transfer(self._engines[at.life], request_id, attempt, self._around, deadline_s, part)
                self.add(part, transfer)
            case e.TakeOrder(part, order, handed):
                transfer, engine = self._with_engine(part)
                assert isinstance(order, Order)
                transfer.take_order(order, as_reader(engine, order.engine_id), handed=handed)
            case e.NameSource(part, order):
                assert isinstance(order, Order)
                self._by_part[part].order = order
            case e.Follow(part, order):
                assert isinstance(order, Order)
                self._by_part[part].follow(order)
            case e.TakeReservation(part, attempt, reservation):
                transfer = self._by_part[part]
                transfer.attempt = attempt
                assert isinstance(reservation.said, Reservation)
                transfer.take_reservation(reservation.said, reservation.weights)
            case e.Meet(part):
                transfer, engine = self._with_engine(part)
                assert transfer.order is not None
                self._after.spawn(self._meet(engine, transfer.order))
            case e.HandOn(part, brought):
                transfer, engine = self._with_engine(part)
                if engine.world_size > 1:
                    self.ranks.hand_on(transfer, engine, self.requests.parts[part].at, brought)
            case e.Stop(part, failed, why):
                self._by_part[part].stop(TransferState.FAILED if failed else TransferState.ABORTED, why)
            case e.TellEnded(part):
                self.ranks.give_up(self._by_part[part])
            case e.TellRefused(at, request_id, attempt, why):
                self.ranks.tell_refused(at, request_id, attempt, why)
            case e.Appeared(request_id):
                if (appeared := self._awaited.pop(request_id, None)) is not None:
                    appeared.set()
            case e.Forgotten(part):
                self.forget(part)
            case e.OneFewer():
                self._one_fewer()
            case e.Taken() | e.Refused():
                pass
            case _:
                assert_never(effect)

    def _with_engine(self, part: int) -> tuple[Transfer, Engine]:
        return self._by_part[part], self._engines[self.requests.parts[part].at.life]

    def _at(self, engine: Engine) -> ReadingRank:
        at = self._ranks_of.get(engine)
        if at is None:
            rank = engine.session.rank
            at = self._ranks_of[engine] = ReadingRank(rank.engine_id, rank.epoch, rank.rank, next(self._lives))
            self._engines[at.life] = engine
        return at

    # ---- the two halves ----

    def order(
        self, engine: Engine, request_id: str, order: Order, brought: Mapping[int, Reservation] | None = None, *,
        number: int = 0, order_id: str = "",
    ) -> tuple[Transfer, bool]:  # fmt: skip
        """Take a router's order, on rank 0; (its transfer, whether the order is new).

        brought: reservations that came with it, by rank. number: of the attempt; 0 for the one under way, or else the
        next. order_id: the caller's own; an order that comes again with it gets the same answer whatever has ended, and
        is refused once the record is forgotten.
        Raises KvferryError: `order_conflict`, `receive_conflict`, `stale_attempt`, `aborted`, `blocks_not_quiet`,
        `tables_not_allowed`, `full`, `draining`.
        """
        brought = dict(brought or {})
        own, said = brought.get(engine.rank), None
        if order_id:
            tables = {rank: each.fingerprint() for rank, each in brought.items()}
            said = engine.engine_id, request_id, order, tables, number
        reservation = None if own is None else self._reservation(engine, own)
        return self._answer(
            e.Ordered(
                self._at(engine), request_id, order, number, brought, reservation, order_id, said, self._closed(engine)
            )
        )

    def receive(
        self, engine: Engine, request_id: str, number: int, reservation: Reservation, order: Order | None,
        deadline_s: float | None,
    ) -> Transfer:  # fmt: skip
        """Take an engine's reservation for the attempt of this number, and its order if it names the source.

        The same reservation again joins the transfer under way. A refusal is this rank's end of the attempt. Raises as
        `order`.
        """
        reserved, closed = self._reservation(engine, reservation), self._closed(engine)
        event = e.Reserved(self._at(engine), request_id, Attempt(number), reserved, order, deadline_s, closed)
        return self._answer(event)[0]

    def handed(
        self, engine: Engine, request_id: str, attempt: Attempt, order: Order, reservation: Reservation | None
    ) -> Transfer:
        """Take an order that rank 0 hands on. reservation: came with it. Raises as `order`."""
        reserved = None if reservation is None else self._reservation(engine, reservation)
        closed = self._closed(engine, handed=True)
        return self._answer(e.Handed(self._at(engine), request_id, attempt, order, reserved, closed))[0]

    @contextlib.contextmanager
    def refusing(self, engine: Engine, request_id: str, attempt: Attempt) -> Iterator[None]:
        """A refusal inside is this rank's end of the attempt, where that has not begun here: the other ranks need not
        wait for it."""
        try:
            yield
        except KvferryError as why:
            self._on(e.Unfit(self._at(engine), request_id, attempt, why))
            raise

    def _reservation(self, engine: Engine, reservation: Reservation) -> e.Reservation:
        return e.Reservation(reservation, reservation.claimed(engine.manifest), engine.weights)

    async def _meet(self, engine: Engine, order: Order) -> None:
        """A fault here fails again when the peer is needed."""
        with contextlib.suppress(KvferryError):
            await self._around.peers.of(engine).get(order.engine_id, order.address, order.epoch)

    # ---- the daemon and its engines ----

    def on_roster(self, engine: Engine) -> None:
        """It is known anew which daemons the engine's ranks have. An attempt that an earlier one of rank 0 has
        handed on ends here: nobody gathers its ends any more."""
        if leader := engine.roster.instance(0):
            self._on(e.Led(self._at(engine), leader))
        self.hand_back(engine)

    def hand_back(self, engine: Engine) -> None:
        """End the orders that wait for a reservation here, where a rank of the engine is draining: their router gives
        them to another engine. An order that was handed on goes on."""
        if (why := self._draining(engine)) is not None:
            self._on(e.HandBack(self._at(engine), why))

    def _draining(self, engine: Engine) -> KvferryError | None:
        """Why the engine takes no new transfers: one of its ranks is draining. None where none is."""
        rank = engine.rank if self.draining else next(iter(engine.roster.draining), None)
        if rank is None:
            return None
        address = engine.roster.address(rank) or self._config.advertise
        where = f"rank {rank} of engine {engine.engine_id} at {address}" if engine.world_size > 1 else ""
        return draining(rank, where)

    def _closed(self, engine: Engine, *, handed: bool = False) -> KvferryError | None:
        """handed: rank 0 has taken the order, and knows what other ranks say."""
        why = self._draining(engine)
        if why is not None and (self.draining or not handed):
            return why
        return None if engine.session.attached else engine_gone(engine.engine_id)

    def replace_weights(self, engine: Engine) -> int:
        """Fail what is on its way into blocks that were reserved for other weights than the engine's now; how many."""
        return len(self._on(e.ReplaceWeights(self._at(engine), engine.weights)))

    # ---- the end ----

    def _on_end(self, transfer: Transfer, read: list[Was]) -> None:
        if over := transfer.over:
            self.over(transfer)
        self._on(e.Ended(transfer.part, transfer.problem, over))
        self._notes.add(functools.partial(self._note_end, transfer, read, over))

    def _note_end(self, transfer: Transfer, read: list[Was], over: bool) -> None:
        """over: on all ranks."""
        share = share_of(transfer)
        if over:
            self._note_over(transfer, share)  # before all that might fail: the next daemon takes it for dead
        transfer.tell_sources(share, read)
        self._count(transfer, share)
        source = transfer.order.engine_id if transfer.order else ""
        if self._spans is not None:
            self._spans.transfer(
                share, transfer.request_id, transfer.course.created_at, transfer.trace, source=source,
                transfer_id=transfer.transfer_id, engine_id=transfer.own.engine_id, attempt=transfer.attempt.number,
                lease=transfer.lease,
            )  # fmt: skip
        said = {name: value for name, value in vars(share).items() if name not in ("error", "waits")}
        write = log.info if transfer.problem is None else log.warning
        write(
            "transfer ended",
            request_id=transfer.request_id,
            attempt=transfer.attempt.number,
            lease=transfer.lease,
            transfer_id=transfer.transfer_id,
            engine_id=transfer.own.engine_id,
            source=source,
            **said,
            announced=transfer.announced,
            traceparent=transfer.trace.traceparent,
            **transfer.trace.about,
            **({"code": transfer.problem.code, "why": str(transfer.problem)} if transfer.problem else {}),
        )
        took_ms = share.phases_ms["total"] - share.phases_ms["waiting"]
        if (left_out := self._slow.says(took_ms)) is not None:
            waited = next((each for each in share.waits if each.what not in GIVEN), None)
            log.warning(
                "slow transfer", request_id=transfer.request_id, transfer_id=transfer.transfer_id, rank=share.rank,
                source=source, took_ms=round(took_ms, 1), why_slow=why_slow(transfer, waited, share.rank),
                left_out=left_out, **transfer.trace.about,
            )  # fmt: skip

    def _on_over(self, transfer: Transfer) -> None:
        if not transfer.over_number:
            self.over(transfer)
            self._notes.add(functools.partial(self._note_over, transfer))
            self._on(e.Over(transfer.part))

    def _on_quiet(self, transfer: Transfer) -> None:
        self._on(e.Quiet(transfer.part))

    def abort(self, engine: Engine, request_id: str, why: str) -> bool:
        """End the request's transfers; whether one was under way. Idempotent."""
        return bool(self._on(e.Abort(self._at(engine), request_id, why)))

    def abort_attempt(self, engine: Engine, request_id: str, attempt: Attempt, why: str, *, failed: bool) -> bool:
        """This attempt has ended on another rank: it ends here too, or does not begin. Whether it was under way.
        failed: it did not abort but fail. Idempotent."""
        effects = self._on(e.EndedElsewhere(self._at(engine), request_id, attempt, failed, why))
        return any(isinstance(each, e.Stop) and self._by_part[each.part].attempt == attempt for each in effects)

    def abort_transfer(self, transfer: Transfer, why: str) -> bool:
        """End this attempt on all ranks; whether it was under way. Idempotent."""
        return bool(self._on(e.AbortPart(transfer.part, why)))

    def abort_engine(self, engine: Engine, why: str) -> None:
        """The engine is gone or retired: nothing is read for it any more."""
        self._on(e.Shut(self._at(engine), Unavailable("engine_gone", why)))

    async def leave(self, engine: Engine) -> None:
        """The engine is retired: close the channels to its other ranks."""
        self._on(e.Left(self._at(engine)))
        await self.ranks.leave(engine)

    async def wait_new(self, request_id: str) -> None:
        """Wait until the request has a transfer more. The caller bounds the wait."""
        await self._awaited.setdefault(request_id, asyncio.Event()).wait()

    async def wait(self, transfer: Transfer, until: Callable[[Transfer], bool], wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not until(transfer):
                    await transfer.changed.wait()

    async def close(self, timeout_s: float = 10.0) -> None:
        """Reads that are not quiet, and handshakes, end with the engines, which are closed next."""
        running = [transfer for transfer in self if not transfer.ended.is_set()]
        for transfer in running:
            transfer.stop(TransferState.ABORTED, Conflict("aborted", "the daemon stops"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for transfer in running:
                    await transfer.ended.wait()
        await self.ranks.close()
