"""An engine of one to four ranks that reads, its daemons and its routers, drawn from one seed.

The machines are those that daemons run. Around them everything takes its step when the seed says so: reservations on
each rank in their own time, orders with numbers, ids and tables, messages between ranks, which come late or twice,
transfers that end, and become quiet later. Blows are drains, daemons that start anew, aborts, weights, time.

A run has three parts: blows, then none until all has come to rest, and at last one more request, which must be done.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from drawn import drawn
from violation import Violation

from kvferry.errors import Conflict, KvferryError, PeerFailed, Unavailable
from kvferry.protocol import leader_events as le
from kvferry.protocol import requests_events as e
from kvferry.protocol.attempts import Attempt, Key, Limits, ReadingRank
from kvferry.protocol.frozen import frozen
from kvferry.protocol.leader import AGAIN_S, Leader
from kvferry.protocol.requests import Requests
from kvferry.tables import BlockIds

BLOCKS, MOST, HISTORY, DEADLINE_S = 16, 4, 2, 30.0
ENGINES = 3
"""Engines of one run, in turn: few attempts have few numbers, and meet."""
NAMES, BY_TABLES = ("r", "s", "t"), "t"
"""The last one's orders bring their tables, as a rule."""
BLOWS = (
    "drain",
    "restart",
    "abort",
    "abort part",
    "abort part",
    "unfit",
    "time",
    "time",
    "weights",
    "late",
    "elsewhere",
)
DEAD = {"blocks_not_quiet", "full", "draining", "aborted"}
"""Refusals that are the end of an attempt that has not begun."""


@frozen
class Order:
    """number: of the attempt that it is meant for; 0 for the next."""

    engine_id: str = "p"
    address: str = "a"
    leader: str = ""
    lease: int = 0
    number: int = field(default=0, compare=False)
    deadline: float = field(default=0.0, compare=False)

    @property
    def lease_id(self) -> int | None:
        return self.lease or None

    def same_source(self, other: Order) -> bool:
        return self.engine_id == other.engine_id and len({self.lease, other.lease} - {0}) <= 1

    def naming(self, other: Order) -> Order:
        return replace(self, lease=self.lease or other.lease)


@dataclass(eq=False)
class Job:
    """A transfer: one rank's part as its shell has it."""

    part: int
    key: Key
    attempt: Attempt
    deadline: float
    order: Order | None = None
    handed: bool = False
    brought: dict[int, frozenset[int]] = field(default_factory=dict)
    blocks: frozenset[int] = frozenset()
    reserved: bool = False
    weights: str = ""
    stop: KvferryError | None = None
    ended: bool = False
    done: bool = False
    quiet: bool = False
    over: bool = False
    lives: set[int] = field(default_factory=set)
    """Of the daemons when its order was handed on."""
    shares: dict[int, bool | None] = field(default_factory=dict)
    """On rank 0: whether the part of each other rank is done; None before it has ended."""

    @property
    def failed(self) -> bool:
        return self.ended and not self.done


@dataclass(eq=False)
class Call:
    """The leader's effect, which takes its time. life: of the daemon that has taken the order."""

    effect: le.Gather | le.Ask | le.Pause | le.Tell
    life: int = 0


@dataclass(eq=False)
class Daemon:
    rank: int
    life: int
    machine: Requests
    at: ReadingRank
    instance: str
    jobs: dict[int, Job] = field(default_factory=dict)
    highest: Counter[Key] = field(default_factory=Counter)
    """The highest attempt of the engine that has had a reservation."""
    dead: dict[Key, set[Attempt]] = field(default_factory=lambda: defaultdict(set))
    """Attempts to which nothing belongs any more."""
    refused: list[tuple[Key, Attempt, set[int], float]] = field(default_factory=list)
    """Reservations; with the lives of the daemons then, and until when they are told."""
    leader: Leader = field(default_factory=Leader)
    """The machine that hands orders on, used on rank 0."""
    calls: list[Call] = field(default_factory=list)
    """Calls to other ranks that are under way."""
    gave_up: set[int] = field(default_factory=set)
    pauses: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """How often each rank was asked or told again, by what."""
    answers: dict[str, tuple[int, object]] = field(default_factory=dict)
    """The part of each order id, and what the order said."""

    def going_on(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.ended]

    def of(self, key: Key, attempt: Attempt) -> list[Job]:
        return [job for job in self.jobs.values() if (job.key, job.attempt) == (key, attempt)]


@functools.cache
def ids(blocks: frozenset[int]) -> BlockIds:
    return np.array(sorted(blocks), dtype=np.int64)


class World:
    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        """told: each line of the transcript."""
        self.seed, self.rng, self.now, self.steps = seed, random.Random(seed), 0.0, 0
        self._told, self._lives = told, itertools.count(1)
        self.ends: Counter[str] = Counter()
        self._anew()

    def _anew(self) -> None:
        """Another engine."""
        self.of = self.rng.choice((1, 2, 2, 3, 4))
        self.weights, self.calm = "", False
        """calm: no transfer fails by chance."""
        self.daemons = [self._daemon(rank) for rank in range(self.of)]
        self.draining: set[int] = set()
        self.numbers: Counter[str] = Counter()
        """The engine's last attempt at each request."""
        self.tells: list[tuple[int, e.EndedElsewhere]] = []
        """Ends that ranks hear of by other ways."""

    def lives(self) -> set[int]:
        return {at.life for at in self.daemons}

    def tell(self, *said: object) -> None:
        if self._told is not None:
            self._told(f"{self.steps:5} {self.now:6.1f} s  {' '.join(map(str, said))}")

    def _daemon(self, rank: int) -> Daemon:
        life = next(self._lives)
        machine = Requests(f"i{life}", Limits(MOST, HISTORY))
        return Daemon(rank, life, machine, ReadingRank("d", "1", rank, life), f"i{life}")

    # ---- the machine of a rank ----

    def feed(self, at: Daemon, event: e.Event) -> list[e.Effect]:
        """Raises KvferryError for an order that is refused."""
        name = getattr(event, "request_id", None)
        key = None if name is None else at.at.key(name)
        unfinished, awaited = len(at.going_on()), self._awaited(at, key)
        try:
            effects = at.machine.on(event)
        except KvferryError as why:
            self.tell("rank", at.rank, event, "is refused:", why.code)
            self._check_full(at, event, why, unfinished)
            raise
        self.tell("rank", at.rank, event, "->", effects)
        told = any(isinstance(each, e.Appeared) for each in effects)
        if awaited and not told and awaited - self._awaited(at, key):
            raise Violation("an attempt that is waited for is there, and nobody is told", f"{event}")
        begun = {each.part for each in effects if isinstance(each, e.Begin)}
        waiting = isinstance(event, e.Reserved) and any(
            key == job.key and not (job.reserved or job.attempt.number or job.stop) for job in at.going_on()
        )
        for effect in effects:
            self._do(at, effect)
        if begun and waiting:
            raise Violation("a reservation passes an order that waits for the next one")
        if begun and not isinstance(event, e.Handed) and (self.draining if self.of > 1 else at.rank in self.draining):
            raise Violation("a transfer begins on an engine that drains")
        at.machine.check()
        if effects and isinstance(effects[-1], e.Refused):
            self._check_full(at, event, effects[-1].why, unfinished)
        self._check(at)
        return effects

    def _awaited(self, at: Daemon, key: Key | None) -> set[int]:
        """The engine's attempts that are still to come there: none up to the highest that came."""
        awaited: set[int] = set()
        if key is not None:
            with contextlib.suppress(KvferryError):  # this one is over, as are all below it
                for number in range(self.numbers[key[2]] + 2, at.highest[key], -1):
                    if at.machine.find(key, Attempt(number)) is None:
                        awaited.add(number)
        return awaited

    def _check_full(self, at: Daemon, event: e.Event, why: KvferryError, unfinished: int) -> None:
        if why.code == "full" and unfinished < MOST and isinstance(event, e.Ordered | e.Reserved | e.Handed):
            attempt = Attempt(event.number) if isinstance(event, e.Ordered) else event.attempt
            if attempt not in at.dead[at.at.key(event.request_id)]:  # else it is refused as before
                raise Violation("refused as full, and there is room")

    def _check(self, at: Daemon) -> None:
        sizes, left, going = at.machine.sizes(), [job for job in at.jobs.values() if not job.quiet], at.going_on()
        if at.machine.left != sum(not (job.over and job.quiet) for job in at.jobs.values()):
            raise Violation("more or fewer are left than are")
        if sizes["parts"] != len(at.jobs) or sizes["claims"] > len(left) or sizes["waiting"] > len(going):
            raise Violation("more is kept than there is", f"{sizes}")
        taken: set[int] = set()
        for job in left:
            if job.reserved:
                if taken & job.blocks:
                    raise Violation("one block, two transfers")
                taken |= job.blocks
        if at.rank:  # it has its orders of rank 0, which leads one attempt at a request
            waiting = [(job.key, job.attempt.by) for job in going if not (job.reserved or job.stop)]
            if len({*waiting}) < len(waiting):
                raise Violation("orders wait for two attempts at a request")

    def _do(self, at: Daemon, effect: e.Effect) -> None:
        match effect:
            case e.Begin(part, where, request_id, attempt, _):
                job = at.jobs[part] = Job(part, where.key(request_id), attempt, self.now + DEADLINE_S)
                if attempt in at.dead[job.key]:
                    raise Violation("an attempt that is over begins anew", f"{attempt}")
            case e.TakeOrder(part, order, handed):
                assert isinstance(order, Order)
                job = at.jobs[part]
                job.order, job.handed = order, handed
                job.deadline = order.deadline or job.deadline
                if order.number not in (0, job.attempt.number):
                    raise Violation("an order in another attempt than it names")
            case e.NameSource(part, order):
                assert isinstance(order, Order)
                at.jobs[part].order = order
            case e.TakeReservation(part, attempt, reservation):
                self._take_reservation(at, at.jobs[part], attempt, reservation)
            case e.HandOn(part, brought):
                job = at.jobs[part]
                job.brought = dict(brought)  # type: ignore[arg-type]
                if bool(brought) is not bool(job.attempt.by):
                    raise Violation("rank 0 hands on other tables than the order's")
                if at.rank or job.shares or not job.reserved or job.order is None:
                    raise Violation("an order is handed on that is not to be")
                others = tuple(range(1, self.of))
                job.shares, job.lives = dict.fromkeys(others), self.lives()
                if others:
                    self.lead(at, le.Lead(part, at.at, job.key[2], job.attempt, others, job.deadline))
            case e.Stop(part, _, why):
                at.jobs[part].stop = at.jobs[part].stop or why
            case e.TellEnded(part):
                at.gave_up.add(part)
                self.lead(at, le.GaveUp(part, "failed", failed=True))
            case e.TellRefused(where, request_id, attempt, why):
                end = le.End(where, request_id, attempt, why.code, failed=True)
                self.lead(at, le.Refused(end, tuple(range(1, self.of)), self.now + DEADLINE_S))
            case e.Forgotten(part):
                job = at.jobs.pop(part)
                if not (job.over and job.quiet):
                    raise Violation("a transfer is forgotten that goes on")
            case _:
                pass

    def _take_reservation(self, at: Daemon, job: Job, attempt: Attempt, reservation: e.Reservation) -> None:
        if job.attempt.number and job.attempt != attempt:
            raise Violation("a reservation in another attempt than its own")
        if attempt in at.dead[job.key]:
            raise Violation("a reservation of an attempt that is over")
        if not attempt.by:
            if attempt.number <= at.highest[job.key]:
                raise Violation("a lower attempt after a higher one", f"{attempt}")
            at.highest[job.key] = attempt.number
        assert isinstance(reservation.said, frozenset)
        job.attempt, job.blocks, job.reserved, job.weights = attempt, reservation.said, True, reservation.weights
        for other in at.going_on():
            lower = other.key == job.key and other.attempt.number and other.attempt.before(attempt)
            if lower and other is not job and other.stop is None:
                raise Violation("an attempt goes on beside a higher one")

    @staticmethod
    def _check_pause(at: Daemon, effect: le.Effect) -> None:
        """An end is told at once. Each pause is twice the one before."""
        match effect:
            case le.Pause(part, rank, seconds):
                key, first = ("ask", part, rank), AGAIN_S[0]
            case le.Tell(number, rank, _, seconds):
                key, first = ("tell", number, rank), 0.0
            case _:
                return
        times = at.pauses[key] - (first == 0.0)
        at.pauses[key] += 1
        if seconds != (0.0 if times < 0 else min(AGAIN_S[0] * 2**times, AGAIN_S[1])):
            raise Violation("a rank is asked or told again too early or too late", f"{effect} after {times}")

    def lead(self, at: Daemon, event: le.Event) -> None:
        """Tell rank 0's machine."""
        effects = at.leader.on(event, self.now)
        self.tell("rank 0 leads:", event, "->", effects)
        for effect in effects:
            match effect:
                case le.Gather() | le.Ask() | le.Pause() | le.Tell():
                    self._check_pause(at, effect)
                    at.calls.append(Call(effect))
                case le.Close(part, rank) | le.Late(part, rank):
                    if isinstance(effect, le.Close) and effect.why is None and part not in at.gave_up:
                        raise Violation("a rank is closed, and nobody says why", f"{effect}")
                    if at.jobs[part].shares[rank] is not None:
                        raise Violation("a part that has ended is closed")
                    at.jobs[part].shares[rank] = False
                case le.StopOwn(part, rank, _):
                    job = at.jobs[part]
                    job.stop = job.stop or Conflict("rank_failed", f"rank {rank}")
                case le.Finished(part):
                    at.calls = [each for each in at.calls if getattr(each.effect, "part", 0) != part]
                    self._look_over(at, at.jobs[part])
        at.leader.check()

    def end(self, at: Daemon, job: Job, problem: KvferryError | None) -> None:
        job.ended, job.done = True, problem is None
        if job.done and False in job.shares.values():
            raise Violation("rank 0 goes on when another rank has not got its KV")
        self.ends["done" if job.done else problem.code if problem else ""] += 1
        if job.reserved or job.handed:
            at.dead[job.key].add(job.attempt)
        job.over = self._is_over(job)
        self.feed(at, e.Ended(job.part, problem, job.over))
        self._look_over(at, job)
        self._cross(at, job)
        if self.rng.random() < 0.7:
            self.be_quiet(at, job)

    def _cross(self, at: Daemon, job: Job) -> None:
        """A router's DELETE crosses the end."""
        if not self.calm and self.rng.random() < 0.2:
            self.feed(at, e.AbortPart(job.part, "by DELETE"))

    def be_quiet(self, at: Daemon, job: Job) -> None:
        job.quiet = True
        self.feed(at, e.Quiet(job.part))

    def _is_over(self, job: Job) -> bool:
        return job.ended and None not in job.shares.values()

    def _look_over(self, at: Daemon, job: Job) -> None:
        if self._is_over(job) and not job.over:
            job.over = True
            self.feed(at, e.Over(job.part))

    # ---- the engine and the routers ----

    def closed(self, at: Daemon, *, handed: bool = False) -> KvferryError | None:
        if at.rank in self.draining or (self.draining and not handed):
            return Unavailable("draining", "it drains")
        return None

    def blocks(self, at: Daemon, *, careful: bool = False) -> frozenset[int]:
        used = {block for job in at.jobs.values() if job.reserved and not job.quiet for block in job.blocks}
        free = sorted(set(range(BLOCKS)) - used)
        if not careful and (self.rng.random() < 0.1 or len(free) < 2):
            free = list(range(BLOCKS))
        return frozenset(self.rng.sample(free, 2))

    def reservation(self, blocks: frozenset[int]) -> e.Reservation:
        return e.Reservation(blocks, {"full": ids(blocks)}, self.weights)

    def reserve(self, at: Daemon, name: str, number: int, order: Order | None, *, careful: bool = False) -> None:
        key, attempt = at.at.key(name), Attempt(number)
        known = [job for job in at.of(key, attempt) if job.reserved]
        again = bool(known) and self.rng.random() < 0.8
        blocks = known[0].blocks if again else self.blocks(at, careful=careful)
        event = e.Reserved(at.at, name, attempt, self.reservation(blocks), order, None, self.closed(at))
        answer = self.feed(at, event)[-1]
        if not isinstance(answer, e.Refused):
            if known and blocks != known[0].blocks:
                raise Violation("an attempt has two reservations")
            return
        if answer.why.code == "blocks_not_quiet":
            held = [job for job in at.jobs.values() if job.reserved and not job.quiet and job.blocks & blocks]
            before = attempt in at.dead[key]
            if not (held or before):
                raise Violation("blocks are refused that are free")
        if answer.why.code in DEAD and not known and attempt not in at.dead[key]:
            at.dead[key].add(attempt)
            at.refused.append((key, attempt, self.lives(), self.now + DEADLINE_S))

    def refuse(self, at: Daemon, name: str, number: int) -> None:
        """A reservation that cannot be taken as it is."""
        key, attempt = at.at.key(name), Attempt(number)
        orders = [job for job in at.of(key, attempt) if not job.reserved and not job.ended]
        ends = bool(orders) or number in self._awaited(at, key)
        self.feed(at, e.Unfit(at.at, name, attempt, Conflict("other_blocks", "it does not fit")))
        if ends and attempt not in at.dead[key]:
            at.dead[key].add(attempt)
            at.refused.append((key, attempt, self.lives(), self.now + DEADLINE_S))

    def order(self, name: str, *, number: int = 0, order_id: str = "", lease: int = 0) -> None:
        first = self.daemons[0]
        order = Order(lease=lease, number=number, deadline=self.now + DEADLINE_S)
        brought: dict[int, object] = {}
        if name == BY_TABLES and self.rng.random() < 0.9:
            brought = {rank: self.blocks(self.daemons[rank]) for rank in range(self.of)}
        own = brought.get(0)
        said = name, order, tuple(brought.items()), number
        reservation = self.reservation(own) if isinstance(own, frozenset) else None
        event = e.Ordered(
            first.at, name, order, number, brought, reservation, order_id, said, self.closed(first)
        )  # fmt: skip
        part, before = first.answers.get(order_id, (0, None))
        remembered, known = order_id in first.answers, part in first.jobs
        try:
            answer = self.feed(first, event)[-1]
        except KvferryError:
            if known and before == said:
                raise Violation("an order that comes again is refused") from None
            return
        assert isinstance(answer, e.Taken)
        if remembered and (answer.part != part or before != said):
            raise Violation("an order id has two answers")
        if order_id:
            first.answers[order_id] = answer.part, said

    def advance(self) -> None:
        """The engine's next reservation on some rank, now and then an old one."""
        rng, name = self.rng, self.rng.choice(NAMES)
        if name == BY_TABLES and rng.random() < 0.9:
            return
        at = rng.choice(self.daemons)
        if not self.numbers[name] or rng.random() < 0.3:
            self.numbers[name] += 1
        number = self.numbers[name] if rng.random() < 0.8 else rng.randint(1, self.numbers[name])
        if rng.random() < 0.04:
            self.refuse(at, name, number)
        else:
            self.reserve(at, name, number, Order() if rng.random() < 0.4 else None)
        ordered = [job.attempt.number for job in at.going_on() if job.key[2] == name and not job.reserved]
        if any(ordered) and rng.random() < 0.5:  # in the same turn
            self.reserve(at, name, max(ordered), None)

    def route(self) -> None:
        rng, name = self.rng, self.rng.choice(NAMES)
        number = 0 if rng.random() < 0.6 else rng.randint(1, self.numbers[name] + 2)
        order_id = f"o{rng.randint(1, len(self.daemons[0].answers) + 1)}" if rng.random() < 0.3 else ""
        self.order(name, number=number, order_id=order_id, lease=rng.choice((0, 0, 0, 1)))

    # ---- between the ranks ----

    def _hear(self) -> bool:
        """An end that a rank hears of by another way."""
        if not self.tells:
            return False
        rank, said = self.tells.pop(self.rng.randrange(len(self.tells)))
        self._end_elsewhere(self.daemons[rank], said)
        return True

    def _end_elsewhere(self, to: Daemon, said: e.EndedElsewhere) -> None:
        key = to.at.key(said.request_id)
        found = to.of(key, said.attempt)
        effects = self.feed(to, replace(said, at=to.at))
        if not found and not any(isinstance(each, e.Stop) for each in effects):
            to.dead[key].add(said.attempt)
        if self.rng.random() < 0.2:
            self.feed(to, replace(said, at=to.at))

    def _follow(self) -> bool:
        """A call of rank 0 comes to something."""
        first = self.daemons[0]
        for call in drawn(self.rng, first.calls):
            event = self._come_to(first, call)
            if event is not None:
                if not (isinstance(event, le.Heard) and event.done is None):
                    first.calls.remove(call)
                self.lead(first, event)
                return True
        return False

    def _come_to(self, first: Daemon, call: Call) -> le.Event | None:
        lost = not self.calm and self.rng.random() < 0.1
        match call.effect:
            case le.Gather(part) if lost:
                return le.Incomplete(part, Unavailable("roster_incomplete", "rank 1 is missing"))
            case le.Gather(part):
                return le.Whole(part, {at.rank: at.instance for at in self.daemons})
            case le.Pause(part, rank, _):
                return le.Again(part, rank, self.daemons[rank].instance)
            case le.Tell(number, rank, end, _):
                if not lost:
                    said = e.EndedElsewhere(end.at, end.request_id, end.attempt, end.failed, end.code)
                    self._end_elsewhere(self.daemons[rank], said)
                return le.Told(number, lost=lost)
            case le.Ask(part, rank):
                job, to = first.jobs[part], self.daemons[rank]
                if lost or call.life not in (0, to.life):
                    return le.Unheard(part, rank, PeerFailed("rank_lost", "it cannot be reached"), lost=True)
                if not call.life:
                    call.life = to.life
                    why = self._hand(job, to)
                    return le.Heard(part, rank) if why is None else le.Unheard(part, rank, why)
                found = to.of(job.key, job.attempt)
                if found and not found[-1].ended:
                    return None
                job.shares[rank] = done = bool(found and found[-1].done)
                return le.Heard(part, rank, done, "lease_ended")

    def _hand(self, job: Job, to: Daemon) -> KvferryError | None:
        """Why the rank does not take it."""
        assert job.order is not None
        order = replace(job.order, leader=self.daemons[0].instance, number=job.attempt.number)
        blocks = job.brought.get(to.rank)
        reservation = None if blocks is None else self.reservation(blocks)
        event = e.Handed(to.at, job.key[2], job.attempt, order, reservation, self.closed(to, handed=True))
        answer = self.feed(to, event)[-1]
        if not isinstance(answer, e.Refused):
            return None
        if answer.why.code in DEAD and not to.of(job.key, job.attempt):
            to.dead[job.key].add(job.attempt)
        return answer.why

    def _move(self) -> bool:
        """A transfer ends, or becomes quiet."""
        jobs = [(at, job) for at in self.daemons for job in at.jobs.values() if not job.quiet]
        for at, job in drawn(self.rng, jobs):
            if job.ended:
                self.be_quiet(at, job)
            elif job.stop is not None:
                self._cross(at, job)
                self.end(at, job, job.stop)
            elif job.reserved and job.order is not None and (job.handed or at.rank or job.shares or self.of == 1):
                self.end(
                    at, job, None if self.calm or self.rng.random() < 0.8 else Conflict("lease_ended", "by chance")
                )
            else:
                continue
            return True
        return False

    # ---- blows ----

    def blow(self) -> None:
        rng, what = self.rng, self.rng.choice(BLOWS)
        at = rng.choice(self.daemons)
        self.tell(f"blow: {what}")
        match what:
            case "drain":
                self.draining ^= {at.rank}
                for each in self.daemons:
                    if (why := self.closed(each)) is not None:
                        self.feed(each, e.HandBack(each.at, why))
            case "restart" if rng.random() < 0.5:
                self.restart(at.rank)
            case "abort":
                self.feed(at, e.Abort(at.at, rng.choice(NAMES), "by the router"))
            case "abort part":  # its routers tidy up
                for part in list(at.jobs):
                    if rng.random() < 0.5:
                        self.feed(at, e.AbortPart(part, "by DELETE"))
            case "unfit" if self.numbers["r"]:
                self.refuse(at, "r", max(1, self.numbers["r"] - rng.randint(0, 1)))
            case "time":
                self.pass_time(rng.choice((1.0, 10.0, 31.0)))
            case "weights" if rng.random() < 0.3:
                self.weights = f"w{self.steps}"
                for each in self.daemons:
                    self.feed(each, e.ReplaceWeights(each.at, self.weights))
                    if any(
                        job.reserved and job.stop is None and job.weights != self.weights for job in each.going_on()
                    ):
                        raise Violation("it is read into blocks of other weights")
            case "late" if self.numbers["r"]:
                self.reserve(at, "r", rng.randint(1, self.numbers["r"]), None)
            case "elsewhere" if at.rank and self.numbers["r"]:
                attempt = Attempt(rng.randint(1, self.numbers["r"]))
                self.tells.append((at.rank, e.EndedElsewhere(at.at, "r", attempt, rng.random() < 0.5, "told")))
            case _:
                pass

    def restart(self, rank: int) -> None:
        """Its daemon. The engine's memory outlives it, and nothing is written any more."""
        self.draining.discard(rank)
        self.daemons[rank] = new = self._daemon(rank)
        if not rank:
            for each in self.daemons[1:]:
                self.feed(each, e.Led(each.at, new.instance))
                for job in each.going_on():
                    if job.handed and job.stop is None:
                        raise Violation("a part goes on that nobody gathers")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for at in self.daemons:
            for job in at.going_on():
                if job.deadline <= self.now:
                    self.end(at, job, Conflict("deadline", "it passed"))
        due = self.daemons[0].leader.next_timer()
        if due is not None and due <= self.now:
            self.lead(self.daemons[0], le.Tick())

    # ---- a run ----

    def step(self) -> bool:
        """Somebody's next step, if anybody can take one."""
        self.steps += 1
        return any(kind() for kind in drawn(self.rng, (self._hear, self._follow, self._move)))

    def run_dry(self) -> None:
        for _ in range(20_000):
            if not self.step():
                return
        raise Violation("it never comes to rest")

    def run(self) -> None:
        for engine in range(ENGINES):
            if engine:
                self._anew()
            self._live()

    def _live(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(20, 52)):
            for act in itertools.islice(drawn(rng, (self.advance, self.advance, self.route)), 2):
                act()
                for _ in range(rng.choice((0, 1, 5))):
                    self.step()
            if rng.random() < 0.3:
                self.blow()
        self.tell("blows stop")
        self.run_dry()
        self._check_together()
        self.pass_time(2 * DEADLINE_S)
        self.run_dry()
        self._check_rest()
        self._serve_once_more()

    def _check_together(self) -> None:
        """Before any deadline: what has ended on one rank has ended on all that rank 0 leads."""
        first = self.daemons[0]
        if self.draining and any(not (job.reserved or job.handed) for job in first.going_on()):
            raise Violation("an order waits on an engine that drains")
        for job in first.jobs.values():
            for rank, done in job.shares.items():
                if done is None and not any(self._asks(call, job.part, rank) for call in first.calls):
                    raise Violation("a rank is not asked again")
        failed = [job for job in first.jobs.values() if job.shares and job.failed]
        given_up = [(job.key, job.attempt, job.lives, job.deadline) for job in failed]
        for key, attempt, lives, until in [*given_up, *first.refused]:
            if until <= self.now:  # ends are told until then
                continue
            for at in self.daemons[1:]:
                if at.life in lives and any(not part.ended for part in at.of(key, attempt)):
                    raise Violation("a rank goes on with what rank 0 has given up")

    def _asks(self, call: Call, part: int, rank: int) -> bool:
        return isinstance(call.effect, le.Ask) and (call.effect.part, call.effect.rank) == (part, rank)

    def _check_rest(self) -> None:
        for at in self.daemons:
            sizes = at.machine.sizes()
            if at.going_on() or at.machine.left or sizes["waiting"] or sizes["claims"]:
                raise Violation("something never ends", f"rank {at.rank}: {sizes}")
            led = at.leader.sizes()
            if led["led"] or led["told"] or at.calls:
                raise Violation("rank 0 never ends with an order", f"{led}")
            if at.machine.sizes()["parts"] > HISTORY:
                raise Violation("more is kept than the history")

    def _serve_once_more(self) -> None:
        """Nothing stands in the way of it."""
        rng, name = self.rng, "once more"
        self.draining.clear()
        self.calm = True
        for number in (1, 2):
            acts = [functools.partial(self.order, name, number=rng.choice((0, number)))]
            for at in self.daemons:
                acts.append(functools.partial(self.reserve, at, name, number, None, careful=True))
            rng.shuffle(acts)
            for act in acts:
                act()
                if rng.random() < 0.5:
                    self.step()
            self.run_dry()
            found = [at.of(at.at.key(name), Attempt(number)) for at in self.daemons]
            if not all(jobs and jobs[-1].done for jobs in found):
                raise Violation("not done though nothing stands in the way")
        self._leave()

    def _leave(self) -> None:
        """The engine's sessions end, on some ranks while blocks may still be written."""
        for at in self.daemons:
            self.reserve(at, "once more", 3, None, careful=True)
            why = Unavailable("session_closed", "it left")
            for event in (e.Shut(at.at, why), e.Left(at.at)):
                self.feed(at, event)
        self.run_dry()
        for at in self.daemons:
            sizes = at.machine.sizes()
            if at.going_on() or sizes["claims"] or sizes["claimed groups"] or sizes["lives gone"]:
                raise Violation("something is kept of an engine that has left", f"rank {at.rank}: {sizes}")
