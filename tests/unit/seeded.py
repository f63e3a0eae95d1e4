"""Runs that are drawn from a seed: two engines of one to three ranks, blows at first, then none, and what must hold.

Every rank is a whole daemon in a world that takes one step at a time (stepwise.py). A run has three parts. Blows come
in the first one: preempted prefills, aborts, reads that fail, streams that break, daemons that die, time that passes.
Then they stop, and everything has to end within its bounds. At last each request is prefilled and ordered once more;
nothing stands in the way of it any more, so all ranks have to be told `done`.

`python seeded.py --hours 8` draws seeds on all cores, and prints one for each kind that it finds; `--seed N` plays one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from bounds import Kept
from stepped import BLOCKS, PIECE, SLOTS, Daemon, manifest_of, stepping

from kvferry.errors import Conflict, KvferryError
from kvferry.protocol.events import Lose
from kvferry.protocol.leader import GRACE_S
from kvferry.protocol.packing import KEPT_S
from kvferry.protocol.roster_events import Member
from kvferry.protocol.values import Account, Publication
from kvferry.schemas import LeaseState, OrderBody, SourceBody, TransferState
from kvferry.schemas import Ordered as Said
from kvferry.tables import BlockTable
from kvferry.v1 import engine_pb2
from kvferryd.aio import NOTED_S
from kvferryd.transfers.order import Order, Reservation
from kvferryd.transfers.record import OF_ANOTHER
from kvferryd.transfers.transfer import Transfer

TTL_S, DEADLINE_S = 20.0, 30.0
MOST = 8
"""Leases, and transfers, that a daemon may hold."""
HISTORY = 4
UNSEEN = 1 << 48
"""Tags from here on are an engine's other use of a block."""
REQUESTS = ("r", "s")
SEEDS = 1 << 48
HIGHEST = (1 << 31) - 1
"""The highest attempt that an order may name: the reservation that it waits for never comes."""
BLOWS = ("preempt", "preempt", "other prompt", "abort", "abort here", "read", "stream", "restart source",
         "restart reader", "time", "time", "order again", "plans")  # fmt: skip
NOT_DONE = "not done though nothing stands in the way"


class Violation(AssertionError):
    """kind: the same for all runs that find the same."""

    def __init__(self, kind: str, about: str = "") -> None:
        super().__init__(f"{kind}: {about}" if about else kind)
        self.kind = kind


@dataclass(eq=False)
class Published:
    """A publish of the source's engine, on all of its ranks. held: ranks where it is not known to be over."""

    number: int
    request_id: str
    digest: bytes
    blocks: list[int]
    held: set[int] = field(default_factory=set)

    def tags(self, heads: range) -> np.ndarray[Any, Any]:
        """(component, token, head), as this publish has them."""
        component, token, head = np.ogrid[0:2, 0 : SLOTS * len(self.blocks), heads.start : heads.stop]
        return np.asarray(self.number << 16 | component << 12 | token << 4 | head, dtype=np.uint64)


@dataclass(eq=False)
class Part:
    """The blocks that one rank of the reading engine received into."""

    receive: Receive
    rank: int
    blocks: list[int]
    transfer: Transfer
    ended: engine_pb2.TransferEnded | None = None
    publish: int = 0
    """The number of the publish whose bytes it was told to have."""
    holds: np.ndarray[Any, Any] | None = None
    lost: bool = False
    """Its daemon has died: nobody is told how it ended."""


@dataclass
class Ordered:
    """A router's order. leader: rank 0's daemon when it was given."""

    body: OrderBody
    leader: Daemon
    answer: asyncio.Task[tuple[Said, bool]]
    again: bool
    """Its id was given before, answered or not: the answer is that of the first."""
    known: str | None = None
    """The transfer that its id, if it has one, was answered with before."""


@dataclass(eq=False)
class Receive:
    """A reservation of the reading engine for a request, on all of its ranks. number: of its attempt."""

    request_id: str
    digest: bytes
    number: int
    parts: dict[int, Part] = field(default_factory=dict)
    refused: dict[int, KvferryError] = field(default_factory=dict)
    aborted: bool = False


class Run:
    """One run. `play` raises Violation."""

    def __init__(self, seed: int, *, blows: int = 8) -> None:
        self.seed, self.blows = seed, blows
        self.rng = random.Random(seed)
        self.steps = 0
        self.ends: Counter[str] = Counter()
        self.log: list[str] = []
        """The steps, as a person reads them."""

    def play(self) -> None:
        BROKE.clear()
        with stepping() as self.world:
            gc.disable()
            try:
                self._set_up()
                self._strike_and_serve()
                self._come_to_rest()
                self._serve_all_once_more()
                self._leave()
            finally:
                gc.enable()

    # ---- the engines ----

    def _set_up(self) -> None:
        ranks = self.rng.choice(((1, 2), (2, 2), (2, 1), (1, 1), (2, 2), (1, 3)))
        self.heads = max(2, *ranks)
        self.way = self.rng.choice(("direct", "staged", "auto"))
        self.world.maps_slots = self.rng.random() < 0.5
        self.addresses = {
            engine: {rank: f"127.0.0.1:{port + rank}" for rank in range(count)}
            for engine, count, port in zip(("prefill", "decode"), ranks, (7001, 7101), strict=True)
        }
        self.published: list[Published] = []
        self.receives: list[Receive] = []
        self.ordered: list[Ordered] = []
        """Orders of routers that are not answered."""
        self.given: set[str] = set()
        """The ids of all orders."""
        self.answered: dict[str, tuple[Daemon, str]] = {}
        """Keyed by order id: rank 0's daemon, and the transfer that it has named."""
        self.others = 0
        self.numbers = dict.fromkeys(REQUESTS, 0)
        """The number of each request's last attempt, as the reading engine counts."""
        self.bodies: list[OrderBody] = []
        self.attempt_ordered = 0
        """The attempt that routers name in orders that name one; 0 for the next one."""
        self.prompts = dict.fromkeys(REQUESTS, b"one")
        self.signed = {request_id: self.rng.random() < 0.7 for request_id in REQUESTS}
        self.stopping: list[asyncio.Task[None]] = []
        self.ended: dict[tuple[int, str], tuple[LeaseState, int]] = {}
        """How each source rank's last lease of a request ended, and the number of its publish."""
        self.sources = {rank: self._daemon("prefill", rank) for rank in self.addresses["prefill"]}
        self.readers = {rank: self._daemon("decode", rank) for rank in self.addresses["decode"]}
        self._join()
        self.log.append(f"{ranks[0]} ranks read by {ranks[1]}, {self.way}")

    def _daemon(self, engine: str, rank: int) -> Daemon:
        members = self.addresses[engine]
        manifest = manifest_of(engine, rank=rank, of=len(members), heads=self.heads)
        settings: dict[str, Any] = {
            "lease_ttl_s": TTL_S, "deadline_s": DEADLINE_S, "max_leases": MOST, "max_transfers": MOST,
            "history": HISTORY, "way": self.way,
        }  # fmt: skip
        daemon = Daemon(self.world, members[rank], manifest, members, **settings)
        self._use_otherwise(daemon, range(BLOCKS))
        if engine == "prefill":
            self._watch(rank, daemon)
        return daemon

    def _join(self) -> None:
        """The reading ranks' rosters name the daemons that there are now."""
        members = {
            rank: Member(daemon.address, instance=daemon.ferry.instance) for rank, daemon in self.readers.items()
        }
        for daemon in self.readers.values():
            daemon.engine.roster.know({**daemon.engine.roster.members, **members})
            with self.world.within(daemon.process):
                self.world.loop.call(daemon.ferry.jobs.on_roster, daemon.engine)

    def _watch(self, rank: int, daemon: Daemon) -> None:
        tell = daemon.engine.leases.on_end

        def on_end(account: Account) -> None:
            self.ended[rank, account.request_id] = account.state, account.number
            tell(account)

        daemon.engine.leases.on_end = on_end

    def _tags(self, daemon: Daemon) -> np.ndarray[Any, Any]:
        """(component, block, token, head, words)."""
        return daemon.memory.view(np.uint64).reshape(2, BLOCKS, SLOTS, -1, PIECE // 8)

    def _heads(self, daemon: Daemon) -> range:
        each = self.heads // daemon.engine.world_size
        return range(daemon.engine.rank * each, (daemon.engine.rank + 1) * each)

    def _use_otherwise(self, daemon: Daemon, blocks: range | list[int]) -> None:
        self.others += 1
        self._tags(daemon)[:, list(blocks)] = UNSEEN + self.others

    def _call(self, daemon: Daemon, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call into a daemon; raises what that raises. Engines see at once what they are told."""
        try:
            return daemon.at(function, *args, **more)
        finally:
            self._told()

    def _told(self) -> None:
        for rank, daemon in self.sources.items():
            while (event := daemon.engine.session.events.pop()) is not None:
                if event.WhichOneof("kind") == "lease_ended":
                    self._lease_over(rank, event.lease_ended.lease)
        for rank, daemon in self.readers.items():
            while (event := daemon.engine.session.events.pop()) is not None:
                self._on_event(rank, event)
        self._check_answers()

    # ---- the source's engine ----

    def _live(self, request_id: str) -> Published | None:
        return next((each for each in self.published if each.request_id == request_id and each.held), None)

    def _lease_over(self, rank: int, number: int) -> None:
        """This rank's daemon says so: the engine uses the blocks otherwise, at once."""
        published = self.published[number - 1]
        if rank in published.held:
            published.held.discard(rank)
            self._use_otherwise(self.sources[rank], published.blocks)

    def publish(self, request_id: str, ranks: list[int] | None = None) -> None:
        """All ranks publish, with steps of everything else in between. Nothing where blocks are missing."""
        taken = {block for each in self.published if each.held for block in each.blocks}
        blocks = [block for block in range(BLOCKS) if block not in taken][:2]
        if len(blocks) < 2 or self._live(request_id) is not None:
            return
        digest = self.prompts[request_id] if self.signed[request_id] else b""
        published = Published(len(self.published) + 1, request_id, digest, blocks)
        self.published.append(published)
        self.log.append(f"publish {published.number} of {request_id}")
        published.held = set(self.sources)
        for rank in self.rng.sample(sorted(self.sources), len(self.sources)):
            if rank not in published.held:
                continue  # taken back by another step already
            for count in self.rng.choice(((2,), (2,), (1, 2))):
                if rank in published.held:
                    self._publish_at(published, rank, count, fenced=self.rng.random() < 0.2)
                self.go(self.rng.choice((0, 0, 3, 10)))

    def _publish_at(self, published: Published, rank: int, count: int, *, fenced: bool) -> None:
        """So many blocks of it; more follow unless these are all. fenced: they are written some steps later."""
        daemon, blocks = self.sources[rank], published.blocks[:count]
        more, fence = count < len(published.blocks), self.world.loop.create_future() if fenced else None
        said = Publication({"full": BlockTable.of(blocks)}, SLOTS * count, b"", more=more, digest=published.digest)

        def write() -> None:
            meant = published.tags(self._heads(daemon)).reshape(2, len(published.blocks), SLOTS, -1)
            self._tags(daemon)[:, blocks] = meant[:, :count, ..., None]

        if fence is None:
            write()
        try:
            self._call(
                daemon, daemon.engine.leases.publish, published.request_id, published.number, said, ttl_s=TTL_S,
                readers=1, after=fence,
            )  # fmt: skip
        except KvferryError as error:
            raise Violation(f"publish refused: {error.code}", str(error)) from error
        if fence is not None:
            self.go(self.rng.choice((3, 10, 40)))
            if not fence.done():  # else it was cancelled with its lease
                write()
                self._call(daemon, fence.set_result, None)

    def revoke(self, request_id: str) -> None:
        """The engine takes it back, on all ranks."""
        self.log.append(f"revoke {request_id}")
        published = self._live(request_id)
        for rank, daemon in self.sources.items():
            self._call(daemon, daemon.ferry.abort_here, daemon.engine, request_id, "by the engine")
            if published is not None:
                self._lease_over(rank, published.number)

    # ---- the reading engine, and its router ----

    def _order(self, request_id: str) -> Order:
        """The engine's own order: it may have been told the lease's number by the prefill."""
        source, way = self.addresses["prefill"][0], "" if self.way == "auto" else self.way
        published = self._live(request_id)
        if published is None or len(published.held) < len(self.sources) or self.rng.random() < 0.5:
            return Order("prefill", source, way=way)
        return Order("prefill", source, self.sources[0].engine.epoch, published.number, way=way)

    def receive(self, request_id: str, *, own: bool) -> Receive:
        """Reserve blocks on all ranks, with steps in between, for a new attempt. own: the engine names the source."""
        self.numbers[request_id] += 1
        digest = self.prompts[request_id] if self.signed[request_id] else b""
        receive, order = Receive(request_id, digest, self.numbers[request_id]), None
        if own:
            order = self._order(request_id)
        self.receives.append(receive)
        of_lease = f", lease {order.lease or 'any'}" if order else " for a router"
        self.log.append(f"receive {request_id} {receive.number}{of_lease}")
        for rank in self.rng.sample(sorted(self.readers), len(self.readers)):
            if receive.aborted:
                break
            self._receive_at(receive, rank, order)
            self.go(self.rng.choice((0, 0, 3, 10, 40)))
        return receive

    def _free_blocks(self, rank: int) -> list[int]:
        taken = {block for part in self._parts(rank) for block in part.blocks}
        return [block for block in range(BLOCKS) if block not in taken][:2]

    def _receive_at(self, receive: Receive, rank: int, order: Order | None) -> None:
        daemon, blocks = self.readers[rank], self._free_blocks(rank)
        if len(blocks) < 2:
            receive.refused[rank] = Conflict("no_blocks", "all are taken")
            return

        def begin() -> None:
            reservation = Reservation({"full": BlockTable.of(blocks)}, (0, 2 * SLOTS), receive.digest)
            transfer = daemon.ferry.jobs.receive(
                daemon.engine, receive.request_id, receive.number, reservation, order, None
            )
            receive.parts[rank] = Part(receive, rank, blocks, transfer)

        try:
            self._call(daemon, begin)
        except KvferryError as error:
            self.log.append(f"  rank {rank} refuses: {error.code}")
            self.ends[f"refused: {error.code}"] += 1
            receive.refused[rank] = error

    def order(self, request_id: str, body: OrderBody | None = None) -> None:
        """A router orders, at any rank. body: that of an order given before."""
        rank = self.rng.choice(sorted(self.readers))
        daemon, leader = self.readers[rank], self.readers[0]
        if body is None:
            next_one = self.numbers[request_id] + 1
            body = OrderBody(
                request_id=request_id,
                source=SourceBody(engine_id="prefill", address=self.addresses["prefill"][0]),
                way=None if self.way == "auto" else self.way,
                attempt=self.rng.choice((None, None, self.attempt_ordered or next_one)),
                order_id=self.rng.choice((None, f"order {self.rng.randrange(SEEDS)}")),
            )
            self.bodies.append(body)
        self.log.append(f"order {request_id} at rank {rank}, attempt {body.attempt}, {body.order_id or 'without id'}")
        known = self.answered.get(body.order_id or "")
        with self.world.within(daemon.process):
            answer = self.world.loop.create_task(daemon.ferry.order(body))
        named = known[1] if known is not None and known[0] is leader else None
        self.ordered.append(Ordered(body, leader, answer, body.order_id in self.given, named))
        self.given |= {body.order_id} - {None}
        self.world.loop.settle()
        self._told()

    def _check_answers(self) -> None:
        """No order is told of what has ended before it, unless it has been given before, or names that attempt."""
        for order in [each for each in self.ordered if each.answer.done()]:
            self.ordered.remove(order)
            if order.answer.cancelled() or isinstance(error := order.answer.exception(), KvferryError):
                continue
            if error is not None:
                raise error
            (said, new), body, leader = order.answer.result(), order.body, self.readers[0]
            self.ends[f"ordered: {said.state.value}"] += 1
            if order.leader is not leader:
                continue
            transfer = leader.ferry.jobs.find(said.transfer_id)
            before = order.known
            if before is not None and (said.transfer_id != before or new):
                raise Violation("an order that comes again with its id is another", body.order_id or "")
            named = transfer is not None and transfer.attempt.number == body.attempt
            if said.state.ended and not named and not order.again:
                raise Violation("an order is told of what has ended before it", str(body))
            if body.order_id:
                self.answered[body.order_id] = leader, said.transfer_id

    def abort(self, request_id: str) -> None:
        """The engine aborts, on all ranks."""
        for receive in self.receives:
            receive.aborted |= receive.request_id == request_id
        for daemon in self.readers.values():
            self._call(daemon, daemon.ferry.abort_here, daemon.engine, request_id, "by the engine")

    def _parts(self, rank: int) -> list[Part]:
        """Parts of this rank whose blocks are not free."""
        return [part for receive in self.receives if (part := receive.parts.get(rank)) is not None and part.blocks]

    def _on_event(self, rank: int, event: engine_pb2.Event) -> None:
        match event.WhichOneof("kind"):
            case "transfer_ended":
                for part in self._parts(rank):
                    if part.transfer.transfer_id == event.transfer_ended.transfer_id:
                        self._ended(part, event.transfer_ended)
            case "blocks_safe":
                for part in self._parts(rank):
                    if part.transfer.transfer_id == event.blocks_safe.transfer_id:
                        self._free(part)

    def _ended(self, part: Part, ended: engine_pb2.TransferEnded) -> None:
        code = ended.problem.code or ended.state
        self.ends[code] += 1
        self.log.append(f"  {part.receive.request_id} {part.receive.number} rank {part.rank}: {code}")
        if part.ended is not None:
            raise Violation("ended twice", code)
        part.ended = ended
        if ended.state == TransferState.DONE:
            self._check_bytes(part)
            self._check_one_lease(part.receive)
        elif code == "lease_ended":
            self._check_why_ended(part.receive.request_id)
        elif code in ("internal", "protocol", "malformed_read", "malformed_pack", "unknown_pairing"):
            raise Violation(f"between daemons of ours: {code}", ended.problem.message)
        if ended.blocks_safe and part.holds is None:
            self._free(part)

    def _free(self, part: Part) -> None:
        self._use_otherwise(self.readers[part.rank], part.blocks)
        part.blocks, part.holds = [], None

    # ---- safety ----

    def _check_bytes(self, part: Part) -> None:
        daemon, blocks = self.readers[part.rank], part.blocks
        part.holds = self._tags(daemon)[:, blocks].copy()
        number = int(part.holds.flat[0]) >> 16
        published = next((each for each in self.published if each.number == number), None)
        if published is None:
            raise Violation("done with what nobody published")
        meant = published.tags(self._heads(daemon)).reshape(2, len(blocks), SLOTS, -1)[..., None]
        if not np.array_equal(part.holds, np.broadcast_to(meant, part.holds.shape)):
            raise Violation("done with torn bytes")
        if published.request_id != part.receive.request_id or (
            part.receive.digest and published.digest != part.receive.digest
        ):
            raise Violation("done with another prompt's bytes")
        part.publish = number

    def _check_one_lease(self, receive: Receive) -> None:
        """The ranks that are done hold one publish."""
        numbers = {rank: part.publish for rank, part in receive.parts.items() if part.publish}
        if len(set(numbers.values())) > 1:
            raise Violation("ranks of one request read two publishes", str(numbers))

    def _check_why_ended(self, request_id: str) -> None:
        """The lease of each source rank was revoked, has expired or is lost; or all reading ranks of one attempt have
        read it."""
        for rank in self.sources:
            state, number = self.ended.get((rank, request_id), (LeaseState.REVOKED, 0))
            if state is not LeaseState.RELEASED or rank in getattr(self._live(request_id), "held", ()):
                continue
            if not any(self._all_read(receive, number) for receive in self.receives):
                raise Violation(
                    f"needless lease_ended: {'staged' if self.way != 'direct' else 'direct'}",
                    f"publish {number} of {request_id} at rank {rank} was released",
                )

    def _all_read(self, receive: Receive, number: int) -> bool:
        """A part that still goes on may have read this source rank."""
        return len(receive.parts) == len(self.readers) and all(
            part.publish in (0, number) and (part.ended is None or part.publish) for part in receive.parts.values()
        )

    def check(self) -> None:
        """Check what must hold after every step."""
        for rank, daemon in self.readers.items():
            for part in self._parts(rank):
                if part.holds is not None and not np.array_equal(part.holds, self._tags(daemon)[:, part.blocks]):
                    raise Violation("overwritten after done")
            for transfer in daemon.ferry.jobs:
                late_s = self.world.loop.now - transfer.deadline
                if late_s > 0 and not transfer.ended.is_set():
                    raise Violation("a transfer outlives its deadline")
                if late_s > GRACE_S and not transfer.over:
                    raise Violation("a transfer of all ranks outlives its deadline")
                self._check_said(transfer)
            self._check_claims(daemon)
        self._check_kept(whole=False)
        if BROKE:
            raise Violation(f"inside a daemon {BROKE[0].partition(':')[0]}", BROKE[0])
        if self.world.loop.problems:
            raise Violation("the loop heard of an error", str(self.world.loop.problems))

    def _check_said(self, transfer: Transfer) -> None:
        """Rank 0 calls no part done that is not."""
        for share in transfer.ranks.values():
            for part in self.readers[share.rank].ferry.jobs if share.state is TransferState.DONE else ():
                of = part.request_id, part.attempt
                if of == (transfer.request_id, transfer.attempt) and part.state is not TransferState.DONE:
                    raise Violation("a part is called done that is not", f"rank {share.rank}: {part.state}")

    def _check_claims(self, daemon: Daemon) -> None:
        """Blocks are claimed until nothing can write them any more, each by one transfer; nothing writes others."""
        requests, taken = daemon.ferry.jobs.requests, set[int]()
        for transfer in daemon.ferry.jobs:
            if number := requests.parts[transfer.part].claim:
                claim = requests._claims._held.get(number)
                if (claim is None) != transfer.quiet.is_set():
                    raise Violation("a claim is not held until quiet, or longer")
                blocks = set() if claim is None else set(claim.blocks["full"].tolist())
                if blocks & taken:
                    raise Violation("one block is claimed by two transfers")
                taken |= blocks
        for address in _written(daemon):
            inside = address - daemon.memory.ctypes.data
            block = inside * 2 * BLOCKS // daemon.memory.nbytes % BLOCKS
            if 0 <= inside < daemon.memory.nbytes and block not in taken:
                raise Violation("a block is written that is not claimed", str(block))

    def _check_kept(self, *, whole: bool = True, at_rest: bool = False) -> None:
        daemons = [*self.sources.values(), *self.readers.values()]
        for daemon in daemons:
            kept = Kept(daemon, len(daemons) - 1, whole=whole)
            for name, size, most in kept.too_many(at_rest=at_rest):
                raise Violation(f"more than may be kept: {name}", f"{size}, at most {most}")

    # ---- what happens ----

    def go(self, steps: int) -> None:
        for _ in range(steps):
            if not self.world.step(self.rng.randrange(1 << 16)):
                return
            self.steps += 1
            self._told()
            self.check()

    def pass_time(self, seconds: float) -> None:
        until = self.world.loop.now + seconds
        while self.world.loop.now < until:
            due = self.world.loop.next_timer() or until
            self.world.loop.pass_time(min(until, max(due, self.world.loop.now + 1e-6)) - self.world.loop.now)
            self._told()
            self.check()

    def _strike_and_serve(self) -> None:
        for _ in range(self.blows):
            request_id = self.rng.choice(REQUESTS)
            deeds = [self.publish, self.receive_somehow]
            self.rng.shuffle(deeds)
            for deed in deeds[: self.rng.choice((1, 2, 2))]:
                deed(request_id)
                self.go(self.rng.randrange(60))
            if self.rng.random() < 0.6:
                self._strike(self.rng.choice(BLOWS), request_id)
                self.go(self.rng.randrange(40))
            self._check_kept()

    def receive_somehow(self, request_id: str) -> None:
        how = self.rng.choice(("own", "own", "order first", "reservation first"))
        if how == "order first":
            self.attempt_ordered = self.rng.choice((0, 0, self.numbers[request_id] + 2, HIGHEST))
            self.order(request_id)
            self.go(self.rng.randrange(20))
        self.receive(request_id, own=how == "own")
        if how == "reservation first":
            self.attempt_ordered = self.numbers[request_id]
            self.order(request_id)
        self.attempt_ordered = 0

    def _strike(self, blow: str, request_id: str) -> None:
        self.log.append(f"{blow} ({request_id})")
        match blow:
            case "preempt":
                self.revoke(request_id)
                self.publish(request_id)
            case "other prompt":
                self.revoke(request_id)
                self.abort(request_id)
                self.prompts[request_id] = self.rng.choice((b"one", b"another"))
                self.publish(request_id)
            case "abort":
                self.abort(request_id)
            case "abort here":  # a router aborts, at one rank
                daemon = self.readers[self.rng.choice(sorted(self.readers))]
                for receive in self.receives:
                    receive.aborted |= receive.request_id == request_id
                self._call(daemon, daemon.ferry.abort_here, daemon.engine, request_id, "by a router")
            case "read" if flights := self.world.flights():
                self.rng.choice(flights).fail()
                self.world.loop.settle()
                self._told()
            case "stream" if streams := self.world.streams():
                self.rng.choice(streams).break_down()
            case "plans":
                self._forget_plans()
            case "restart source":
                self._restart(self.sources, "prefill")
            case "restart reader":
                self._restart(self.readers, "decode")
            case "time":
                self.pass_time(self.rng.choice((0.01, 0.6, 6.0, TTL_S + 1)))
            case "order again":
                given = [body for body in self.bodies if body.request_id == request_id]
                self.order(request_id, self.rng.choice(given) if given else None)

    def _forget_plans(self) -> None:
        """A source rank serves more shapes at a time than it keeps plans."""
        self.sources[self.rng.choice(sorted(self.sources))].forget_pairings()

    def _restart(self, daemons: dict[int, Daemon], engine: str) -> None:
        """The daemon of one rank dies. Its engine's rank attaches to the next one, in the same epoch."""
        rank = self.rng.choice(sorted(daemons))
        before = daemons[rank]
        self.world.kill(before.process)
        with self.world.within(before.process):
            self.stopping.append(self.world.loop.create_task(before.ferry.close()))
        daemons[rank] = after = self._daemon(engine, rank)
        if engine == "prefill":
            lost = tuple((each.request_id, each.number) for each in self.published if rank in each.held)
            self._call(after, after.engine.leases.on, Lose(lost))
            for published in self.published:
                published.held.discard(rank)
            self.ended = {key: how for key, how in self.ended.items() if key[0] != rank}
        else:
            for part in self._parts(rank):
                part.blocks, part.holds, part.lost = [], None, True
            self._join()
        self.log.append(f"  rank {rank} of {engine}")

    # ---- blows have stopped ----

    def _run(self) -> None:
        """Until nothing is under way, without time passing."""
        for _ in range(20_000):
            if not self.world.step(self.rng.randrange(1 << 16)):
                return
            self.steps += 1
            self._told()
            self.check()
        raise Violation("what is under way never ends")

    def _wait(self, until: Callable[[], bool], bound_s: float) -> bool:
        """Let everything go on. Time passes only while nothing is under way."""
        end = self.world.loop.now + bound_s
        while True:
            self._run()
            if until():
                return True
            due = self.world.loop.next_timer()
            if due is None or due > end:
                self.pass_time(end - self.world.loop.now)
                self._run()
                return until()
            self.pass_time(due - self.world.loop.now + 1e-6)

    def _over(self) -> bool:
        jobs = [transfer for daemon in self.readers.values() for transfer in daemon.ferry.jobs]
        return not self.ordered and all(transfer.over and transfer.quiet.is_set() for transfer in jobs)

    def _come_to_rest(self) -> None:
        """All that was begun ends within its bounds; leases by their ttl, counted from their last read."""
        self.log.append("blows stop")
        if not self._wait(self._over, DEADLINE_S + GRACE_S + 5):
            raise Violation("something does not end once blows have stopped")
        if not all(part.ended or part.lost for receive in self.receives for part in receive.parts.values()):
            raise Violation("an engine is not told of an end")
        if not self._wait(lambda: not any(len(each.engine.leases) for each in self.sources.values()), 2 * TTL_S):
            raise Violation("a lease does not end once nobody reads it")
        if not self._wait(lambda: all(task.done() for task in self.stopping), DEADLINE_S):
            raise Violation("a daemon does not stop")
        self.pass_time(NOTED_S + KEPT_S)
        self._run()  # timers have rung meanwhile
        self._check_kept(at_rest=True)
        for receive in self.receives:
            for part in receive.parts.values():
                if part.blocks:
                    self._free(part)

    def _serve_all_once_more(self) -> None:
        """Prefilled anew, with another prompt perhaps, and ordered anew: nothing stands in the way."""
        for request_id in REQUESTS:
            self.prompts[request_id] = self.rng.choice((b"one", b"another"))
            how = self.rng.choice((*3 * ("own",), *3 * ("reservation first",), "order first"))
            for _ in range(self.rng.choice((0, 1, 2))):
                self._forget_plans()
            receives_first = self.rng.random() < 0.5 and not self._tombs(request_id)
            self.log.append(f"once more: {request_id}, {how}, {'receive' if receives_first else 'publish'} first")
            if not receives_first:
                self.publish(request_id)
                self.go(self.rng.choice((0, 0, 50)))
            if how == "order first":
                self.order(request_id)
                self.go(self.rng.randrange(30))
            receive = self.receive(request_id, own=how == "own")
            if how == "reservation first":
                self.attempt_ordered = receive.number
                self.order(request_id)
                self.attempt_ordered = 0
            if receives_first:
                self.go(self.rng.randrange(60))
                self.publish(request_id)
            for _ in range(self.rng.choice((0, 0, 5))):
                self.go(5)
                self._forget_plans()
            self._wait(self._over, DEADLINE_S + GRACE_S)
            if not all((part := receive.parts.get(rank)) and part.publish for rank in self.readers):
                raise Violation(*self._why_not_done(receive, how))

    def _why_not_done(self, receive: Receive, how: str) -> tuple[str, str]:
        """(the kind of it, what each rank says). The failure of another rank is no reason."""
        whys = {rank: (why.code, why.message) for rank, why in receive.refused.items()}
        for rank, part in receive.parts.items():
            if part.ended is None:
                whys[rank] = "not told", ""
            elif not part.publish:
                whys[rank] = part.ended.problem.code, part.ended.problem.message
        codes = [code for code, _ in sorted(whys.values())]
        code = next((code for code in codes if code not in OF_ANOTHER), codes[0])
        of_order = f"{how}, " if code == "deadline" else ""
        return f"{NOT_DONE}: {of_order}{code}", str(whys)

    def _tombs(self, request_id: str) -> bool:
        """Whether a source rank remembers that its lease has ended: readers are refused until the next one."""
        every = [daemon.engine.leases.source.leases for daemon in self.sources.values()]
        return any(each.newest(request_id) and each.get(request_id) is None for each in every)

    def _leave(self) -> None:
        """A wish to drain or to stop is fulfilled, the one when a last lease has expired. Nothing is left."""
        loop = self.world.loop
        self.publish(REQUESTS[0])
        for daemon in (*self.readers.values(), *self.sources.values()):
            with self.world.within(daemon.process):
                draining = loop.create_task(daemon.ferry.drain(DEADLINE_S, "a test"))
            loop.settle()
            if not self._wait(draining.done, DEADLINE_S):
                raise Violation("who waits for a drain is not answered")
            if not draining.result().drained:
                raise Violation("a drain is not fulfilled though nothing goes on")
        for daemon in (*self.readers.values(), *self.sources.values()):
            with self.world.within(daemon.process):
                closing = loop.create_task(daemon.ferry.close())
            if not self._wait(closing.done, 5.0):
                raise Violation("a daemon does not stop")
            if failed := closing.result():
                raise Violation("a daemon stops by halves", str(sorted(failed)))
        if self.world.flights():
            raise Violation("reads are left")


def _written(daemon: Daemon) -> Iterator[int]:
    """Addresses that reads and copies of this daemon may still write."""
    for flight in daemon.engine.agent.flights:
        for address, nbytes in flight.writes():
            yield from (address, address + nbytes - 1)
    arena = daemon.engine.arena
    of_engine: Any = (daemon.engine.copies, *(() if arena is None else (arena.copies,)))
    for copies in of_engine:
        for part in (part for copying in copies.queue for part in copying.parts):
            side = part.destination
            offsets = side.table.offsets[side.first_row : side.first_row + part.rows]
            yield from (int(segment + offset) for segment in side.segments for offset in offsets)


# ---- many runs ----


BROKE: list[str] = []
"""Errors that nobody foresaw, as daemons have logged them in this run."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Daemons write no lines. Errors that nobody foresaw are kept in BROKE."""

    def hear(logger: object, method: str, about: MutableMapping[str, Any]) -> Any:
        if "broke" in about["event"]:
            BROKE.append(f"{about['event']}: {sys.exc_info()[1] or about.get('exc_info')}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[hear], wrapper_class=structlog.make_filtering_bound_logger("error"), cache_logger_on_first_use=False
    )
    yield
    structlog.configure(**before)


def found_by(seed: int) -> tuple[Run, str, str]:
    """(the run, the kind of what it found or nothing, more about it)."""
    run = Run(seed)
    try:
        run.play()
    except Violation as violation:
        return run, violation.kind, str(violation)
    except Exception as error:  # noqa: BLE001  a find as well
        return run, f"{type(error).__name__}: {error}"[:120], traceback.format_exc()
    return run, "", ""


def drawn(first: int, hours: float, runs: float) -> tuple[int, int, dict[str, int]]:
    """(runs, steps, the first seed that showed each kind)."""
    rng, until, count, steps, kinds = random.Random(first), time.monotonic() + 3600 * hours, 0, 0, dict[str, int]()
    with quiet():
        while count < runs and time.monotonic() < until:
            run, kind, _ = found_by(seed := rng.randrange(SEEDS))
            count, steps = count + 1, steps + run.steps
            if kind:
                kinds.setdefault(kind, seed)
    return count, steps, kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="play this run, and print what was done in it")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--runs", type=float, default=float("inf"), help="of each core, at most")
    asked = parser.parse_args()
    if asked.seed is not None:
        with quiet():
            run, kind, about = found_by(asked.seed)
        print(*run.log, about or f"nothing found in {run.steps} steps", sep="\n")
        return bool(kind)
    work = [(random.SystemRandom().randrange(SEEDS), asked.hours, asked.runs) for _ in range(os.cpu_count() or 1)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        done = pool.starmap(drawn, work)
    kinds = {kind: seed for each in done for kind, seed in each[2].items()}
    print(f"{sum(each[0] for each in done)} runs, {sum(each[1] for each in done)} steps")
    print(*(f"{kind}: python tests/unit/seeded.py --seed {seed}" for kind, seed in kinds.items()), sep="\n")
    return bool(kinds)


if __name__ == "__main__":
    sys.exit(main())
