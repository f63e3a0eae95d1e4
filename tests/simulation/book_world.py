"""One engine rank with its book, and daemons that answer late, say an end twice or say nothing; drawn from one seed.

The engine uses a block otherwise the moment it may: when no lease and no call of its own is known to hold it. A daemon
may read what was published and write what it receives until the lease or the transfer has ended there, whatever the
engine has heard. A run has three parts: blows, then none until all has come to rest, and at last a publish and a
receive more, which must come about.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from violation import Violation

from kvferry.errors import Conflict, KvferryError, Unavailable
from kvferry.protocol import book_events as e
from kvferry.protocol.book import Book

NAMES = ("r", "s")
CLOSED = Unavailable("session_closed", "closed")


@dataclass(eq=False)
class Held:
    """A lease, as the engine knows it."""

    request_id: str
    number: int = 0
    blocks: set[int] = field(default_factory=set)
    more: bool = True
    ended: bool = False
    aborted: bool = False
    """The engine computes anew what it publishes after this."""


@dataclass(eq=False)
class Asked:
    """A call of the engine's. state: open, left, told, doubtful, quiet."""

    kind: str
    request_id: str = ""
    blocks: set[int] = field(default_factory=set)
    state: str = "open"
    held: Held | None = None
    more: bool = False
    end: str = ""
    aborted: bool = False
    weights: str = ""
    """The weights that it names, or is for."""

    @property
    def holds(self) -> bool:
        return self.state not in ("told", "quiet")


@dataclass(eq=False)
class Served:
    """A lease or a transfer at the daemon: it is there until it has ended and nothing moves any more."""

    name: str
    number: int
    blocks: set[int]
    more: bool = False
    ended: bool = False
    of: Asked | None = None
    """Of a transfer: nobody orders it, so it ends by an abort, or with its deadline while its caller waits."""


@dataclass(eq=False)
class Daemon:
    """One session, on the daemon's side."""

    up: deque[tuple[e.Send | e.SendAbort, Asked | None]] = field(default_factory=deque)
    down: deque[e.Event] = field(default_factory=deque)
    leases: dict[str, Served] = field(default_factory=dict)
    newest: Counter[str] = field(default_factory=Counter)
    transfers: dict[str, Served] = field(default_factory=dict)
    lost: set[tuple[str, int]] = field(default_factory=set)
    gone: bool = False
    weights: str = ""

    def uses(self, block: int) -> bool:
        return any(block in each.blocks for each in (*self.leases.values(), *self.transfers.values()))


class World:
    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        self.seed, self.rng, self.steps = seed, random.Random(seed), 0
        self._told = told
        self.ranks = self.rng.choice((1, 1, 2))
        self.book, self.daemon = Book(self.ranks), Daemon()
        self.daemons = [self.daemon]
        self.numbers, self.transfers = itertools.count(1), itertools.count(1)
        self.asked: list[Asked] = []
        self.held: list[Held] = []
        self.free: set[int] = set()
        self.blocks = itertools.count()
        self.computed: list[str] = []
        """The weights that have computed each block."""
        self.registering = False
        self.registers_with = ""
        """The weights that the daemon is told with the cache."""
        self.losing: set[tuple[str, int]] = set()
        """Leases that the engine was told to be lost, and no daemon knows of."""
        self.sent: Counter[tuple[str, str]] = Counter()
        """The highest number of each kind of each request."""
        self.ends: Counter[str] = Counter()
        self.calm = False

    def tell(self, *said: object) -> None:
        if self._told is not None:
            self._told(f"{self.steps:5}  {' '.join(map(str, said))}")

    # ---- the book ----

    def feed(self, event: e.Event) -> None:
        """Raises KvferryError for a call that is refused at once."""
        effects = self.book.on(event)
        self.tell(event, "->", effects)
        for effect in effects:
            self._do(effect)
            self._reuse()
        self.book.check()

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Send(asked, _, number, held):
                if self.book.ended is not None:
                    raise Violation("something is sent when the session has ended")
                if asked.aborted:
                    raise Violation("what was aborted is sent", f"{asked.kind} of {asked.request_id}")
                kind = "lease" if asked.kind == "publish" else "attempt"
                if number < self.sent[kind, asked.request_id] and asked.kind in ("publish", "receive"):
                    raise Violation("a number falls", f"{asked.kind} {number}")
                self.sent[kind, asked.request_id] = max(self.sent[kind, asked.request_id], number)
                if held is not None:
                    held.number, asked.held, held.more = number, held, asked.more
                self.daemon.up.append((effect, asked))
            case e.SendAbort():
                self.daemon.up.append((effect, None))
            case e.Named(asked):
                if asked.state != "open":
                    raise Violation("a receive is named after its end", asked.state)
            case e.Taken(asked):
                self._over(asked, "told", "taken")
                if asked.held is not None and not asked.held.ended:
                    asked.held.blocks |= asked.blocks
            case e.Refused(asked, why):
                self._over(asked, "told", "refused", "left")
                asked.end = why.code
            case e.Doubtful(asked, _):
                self._over(asked, "doubtful", "doubtful")
            case e.Ended(asked, end, problem):
                if end == "done" and problem is None and asked.weights != self.book.start.weights:
                    raise Violation("what other weights have computed is taken", asked.request_id)
                self._over(asked, "doubtful", str(end) if problem is None else problem.code)
            case e.Quiet(asked, unknown):
                if asked.state not in ("left", "doubtful"):
                    raise Violation("quiet out of turn", f"{asked.kind} {asked.state}")
                asked.state = "quiet" if unknown is None else "unknown"
            case e.LeaseEnded(held, end):
                if held.ended:
                    raise Violation("a lease ends twice", f"{held.request_id} {held.number}")
                self.ends["lease"] += 1
                held.ended = True
                if end is CLOSED:
                    return  # its blocks are never known to be quiet
                held.blocks = set()
                if isinstance(end, KvferryError):
                    self.losing.add((held.request_id, held.number))

    def _over(self, asked: Asked, state: str, end: str, *also: str) -> None:
        if asked.state not in ("open", *also):
            raise Violation("a call is told two ends", f"{asked.kind}: {end} when {asked.state}")
        self.ends[end] += 1
        asked.state, asked.end = state, end

    def _reuse(self) -> None:
        """The engine takes every block that it may, at once."""
        kept = {block for each in self.held for block in each.blocks}
        kept |= {block for each in self.asked if each.holds for block in each.blocks}
        known = {block for blocks in (self.held, self.asked) for each in blocks for block in each.blocks}
        for block in known - kept:
            if any(daemon.uses(block) for daemon in self.daemons):
                raise Violation("a block is reused that the daemon still uses", f"block {block}")
        self.asked = [each for each in self.asked if each.holds]

    # ---- the engine ----

    def act(self) -> None:
        rng, name = self.rng, self.rng.choice(NAMES)
        what = rng.choice(("publish", "publish", "publish", "receive", "receive", "abort", "leave", "weights", "probe",
                           "register"))  # fmt: skip
        match what:
            case "publish":
                self.publish(name, more=rng.random() < 0.5)
            case "receive":
                self.receive(name)
            case "abort":
                for each in (*self.asked, *self.held):
                    each.aborted = each.aborted or each.request_id == name
                self.ask(Asked("abort", name), lambda asked: e.Abort(asked, name))
            case "leave" if open := [each for each in self.asked if each.state == "open"]:
                self.leave(rng.choice(open))
            case "weights" if rng.random() < 0.3:
                weights = f"w{self.steps}"
                self.ask(Asked("weights", weights=weights), lambda asked: e.ReplaceWeights(asked, weights))
            case "probe":
                self.ask(Asked("probe"), e.Probe)
            case "register" if not self.registering and self.book.ended is None:
                self.register()
            case _:
                pass

    def leave(self, asked: Asked) -> None:
        asked.state = "left"
        self.feed(e.Leave(asked))

    def ask(self, asked: Asked, event: Callable[[Asked], e.Event]) -> Asked:
        self.asked.append(asked)
        try:
            self.feed(event(asked))
        except KvferryError as error:
            if error.code not in ("mixed_weights", "number_required"):
                raise
            asked.state, asked.end = "told", error.code
        return asked

    def publish(self, name: str, *, more: bool) -> Asked:
        """More of the request's lease where it has one that takes more, or another."""
        last = next((each for each in reversed(self.held) if each.request_id == name), None)
        goes_on = last is not None and last.more and not (last.ended or last.aborted) and self.rng.random() < 0.8
        table = set(last.blocks) if goes_on and last is not None else set()
        for each in self.asked:
            if goes_on and each.kind == "publish" and each.held is last:
                table |= each.blocks
        held = Held(name)
        self.held.append(held)
        number = 0
        if self.ranks > 1:
            number = last.number if goes_on and last is not None else next(self.numbers)
            held.number = number
        table |= {self._compute()}
        withdraw = self.rng.random() < 0.3
        current = self.rng.random() < 0.8
        # An engine that names weights names those that have computed the first block.
        weights = self.book.start.weights if current else self.computed[min(table)]
        asked = Asked("publish", name, table, more=more, weights=weights)
        return self.ask(asked, lambda asked: e.Publish(asked, held, name, number, more, withdraw, current))

    def _compute(self) -> int:
        self.computed.append(self.book.start.weights)
        return next(self.blocks)

    def receive(self, name: str) -> Asked:
        attempt = next(self.numbers) if self.ranks > 1 else 0
        asked = Asked("receive", name, {self._compute()}, weights=self.book.start.weights)
        return self.ask(asked, lambda asked: e.Receive(asked, name, attempt))

    def register(self) -> None:
        self.registering, self.registers_with = True, self.book.start.weights
        self.feed(e.Register())

    def registered(self) -> None:
        self.registering = False
        lost = tuple(self.book.start.lost)
        if self.book.ended is None and (self.calm or self.rng.random() < 0.7):
            if self.losing - set(lost):
                raise Violation("a lease is lost, and no daemon is told", f"{self.losing - set(lost)}")
            self.daemon.lost |= set(lost)
            self.losing.clear()
        else:
            lost = ()
        self.daemon.weights = self.registers_with
        self.feed(e.Registered(lost))

    # ---- the daemon ----

    def obey(self, daemon: Daemon) -> bool:
        """The next command."""
        if not daemon.up or daemon.gone:
            return False
        said, asked = daemon.up.popleft()
        if isinstance(said, e.SendAbort) or asked is None or asked.kind == "abort":
            name = said.request_id if isinstance(said, e.SendAbort) else asked.request_id if asked else ""
            tell_first = self.rng.random() < 0.5
            if tell_first:
                self._answer(daemon, said.id)
            self.end_lease(daemon, name)
            for transfer_id, each in list(daemon.transfers.items()):
                if each.name == name and not each.ended:
                    self.end_transfer(daemon, transfer_id, "aborted")
            if not tell_first:
                self._answer(daemon, said.id)
        elif asked.kind == "publish":
            self._take_publish(daemon, said, asked)
        elif asked.kind == "receive":
            self._take_receive(daemon, said, asked)
        else:
            if asked.kind == "weights":
                daemon.weights = asked.weights
                for name in list(daemon.leases):
                    self.end_lease(daemon, name)
            self._answer(daemon, said.id)
        return True

    def _answer(self, daemon: Daemon, id: int, code: str = "", transfer_id: str = "") -> None:
        daemon.down.append(e.Answered(id, Conflict(code, "refused") if code else None, transfer_id))

    def _take_publish(self, daemon: Daemon, said: e.Send, asked: Asked) -> None:
        lease, name = daemon.leases.get(asked.request_id), asked.request_id
        if asked.weights != daemon.weights:
            self._answer(daemon, said.id, "mixed_weights")
        elif said.number < daemon.newest[name] or (said.number == daemon.newest[name] and lease is None):
            self._answer(daemon, said.id, "lease_ended")
        elif lease is not None and lease.number == said.number and not lease.more:
            self._answer(daemon, said.id, "already_published")
        elif not self.calm and self.rng.random() < 0.15:
            self._answer(daemon, said.id, "full")
        else:
            if lease is not None and lease.number < said.number:
                self.end_lease(daemon, name)
            if mixed := {self.computed[block] for block in asked.blocks} - {asked.weights}:
                raise Violation("one lease is computed by several weights", f"{name}: {mixed} and {asked.weights!r}")
            daemon.newest[name] = said.number
            daemon.leases[name] = Served(name, said.number, set(asked.blocks), asked.more)
            self._answer(daemon, said.id)

    def _take_receive(self, daemon: Daemon, said: e.Send, asked: Asked) -> None:
        if not self.calm and self.rng.random() < 0.15:
            self._answer(daemon, said.id, "full")
            return
        if any(each.name == asked.request_id and not each.ended for each in daemon.transfers.values()):
            raise Violation("two receives of a request are under way", asked.request_id)
        transfer_id = f"t{next(self.transfers)}"
        of = asked if self.rng.random() < 0.2 else None
        daemon.transfers[transfer_id] = Served(asked.request_id, said.number, set(asked.blocks), of=of)
        if self.rng.random() < 0.1:  # the end may overtake the answer that names it
            self.end_transfer(daemon, transfer_id, "failed")
        self._answer(daemon, said.id, transfer_id=transfer_id)

    def end_lease(self, daemon: Daemon, name: str) -> None:
        lease = daemon.leases.pop(name, None)
        if lease is not None:
            daemon.down.append(e.LeaseOver(name, lease.number, "over"))
            if self.rng.random() < 0.1:
                daemon.down.append(e.LeaseOver(name, lease.number, "over"))

    def end_transfer(self, daemon: Daemon, transfer_id: str, end: str) -> None:
        transfer = daemon.transfers[transfer_id]
        transfer.ended = True
        safe = self.rng.random() < 0.6
        if safe:
            del daemon.transfers[transfer_id]
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            daemon.down.append(e.TransferOver(transfer.name, transfer_id, end, end == "done", safe))

    def make_safe(self, daemon: Daemon, transfer_id: str) -> None:
        transfer = daemon.transfers.pop(transfer_id)
        for _ in range(self.rng.choice((1, 1, 2))):
            daemon.down.append(e.BlocksSafe(transfer.name, transfer_id))

    def work(self, daemon: Daemon) -> bool:
        """Something of the daemon's own ends."""
        todo: list[Callable[[], None]] = []
        for name in daemon.leases:
            todo.append(lambda name=name: self.end_lease(daemon, name))  # type: ignore[misc]  # bound now
        for transfer_id, each in daemon.transfers.items():
            if each.ended:
                todo.append(lambda it=transfer_id: self.make_safe(daemon, it))  # type: ignore[misc]  # bound now
            elif each.of is None or (self.calm and each.of.state == "open"):
                end = self.rng.choice(("done", "done", "failed"))
                todo.append(lambda it=transfer_id, end=end: self.end_transfer(daemon, it, end))  # type: ignore[misc]
        if not todo or daemon.gone:
            return False
        self.rng.choice(todo)()
        return True

    def hear(self) -> bool:
        if not self.daemon.down or self.book.ended is not None:
            return False
        self.feed(self.daemon.down.popleft())
        return True

    # ---- sessions ----

    def lose(self) -> None:
        if self.book.ended is None:
            if self.registering and (self.calm or self.rng.random() < 0.5):
                self.registered()
            self.feed(e.SessionLost(Unavailable("daemon_gone", "it ended")))

    def settle(self) -> None:
        """The daemon has revoked everything, or the client is closed first and will never know."""
        if self.book.ended is None or self.book._over:
            return
        if not self.calm and self.rng.random() < 0.15:
            self.feed(e.SessionOver(CLOSED))
        else:
            self.daemon.leases.clear()
            self.daemon.transfers.clear()
            self.daemon.gone = True
            self.feed(e.SessionOver())

    def resume(self) -> None:
        if not self.book._over or self.registering:
            return
        self.book, self.daemon = Book(self.ranks, self.book), Daemon()
        self.daemons.append(self.daemon)
        self.tell("another session")
        self.register()

    def step(self) -> bool:
        self.steps += 1
        kinds: list[Callable[[], bool]] = [
            self.hear, self.hear, lambda: self.obey(self.daemon), lambda: self.obey(self.daemon),
            lambda: self.rng.random() < 0.3 and self.work(self.daemon if self.calm else self.rng.choice(self.daemons)),
        ]  # fmt: skip
        if self.registering and self.rng.random() < 0.2:
            self.registered()
        self.rng.shuffle(kinds)
        return any(kind() for kind in kinds)

    def run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(10, 60)):
            for _ in range(rng.choice((1, 1, 2, 4))):
                self.act()
            for _ in range(rng.choice((0, 1, 3, 8))):
                self.step()
            if (drawn := rng.random()) < 0.1:
                self.lose()
                if self.registering and rng.random() < 0.3:
                    self.settle()
            elif drawn < 0.2:
                self.settle()
            elif drawn < 0.3:
                self.resume()
        self.tell("blows stop")
        self.calm = True
        self._rest()
        self.lose()
        self.settle()
        if any(self.book.sizes()[name] for name in self.book.sizes() if name not in ("lost", "cut")):
            raise Violation("something is kept of a session that is over", str(self.book.sizes()))
        self.resume()
        self._rest()
        self._once_more()

    def _rest(self) -> None:
        """Until nothing happens any more."""
        self.settle()
        idle = 0
        for _ in range(5000):
            idle = 0 if self.step() else idle + 1
            if idle > 60:
                break
        else:
            raise Violation("it never comes to rest")
        if self.registering:
            self.registered()
            self._rest()
            return
        if self.book.ended is None:
            waits = [each for each in self.asked if each.holds and each.state != "unknown"]
            if waits:
                raise Violation("a call never ends", f"{waits[0].kind} {waits[0].state}")
            for name, size in self.book.sizes().items():
                if size and name not in ("lost", "cut"):
                    raise Violation(f"something is left: {name}", str(self.book.sizes()))
            if self.daemon.weights != self.book.start.weights:
                raise Violation("the daemon has another name of the weights", self.daemon.weights)
            if any(not each.ended and each.blocks for each in self.held):
                raise Violation("a lease never ends")

    def _once_more(self) -> None:
        for name in NAMES:
            self.ask(Asked("abort", name), lambda asked, name=name: e.Abort(asked, name))  # type: ignore[misc]
            asked = [self.publish(name, more=False), self.receive(name)]
            self._rest()
            if asked[0].end != "taken" or asked[1].end not in ("done", "failed"):
                raise Violation("nothing stands in the way, and it does not come about", f"{[it.end for it in asked]}")
