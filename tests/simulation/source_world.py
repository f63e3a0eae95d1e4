"""An engine that publishes, on one or two ranks, and engines that read it, drawn from one seed.

The ranks' machines are those that daemons run. Around them everything takes its step when the seed says so: messages of
each stream in order, reads and gathers block by block, streams that break and are noticed later on either side,
processes that die, engines that use a block otherwise the moment they may. Between any two effects of one event
somebody else may read memory: NIXL asks nobody.

A run has three parts: blows, then none until all has come to rest, and at last one more request, which must be done.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from staged_world import SLOTS, Arena, Event, Sent, Staging, fed, stand
from violation import Violation

from kvferry.errors import Conflict, KvferryError
from kvferry.protocol import events as e
from kvferry.protocol import leases
from kvferry.protocol import packing_events as p
from kvferry.protocol.packing import KEPT_S
from kvferry.protocol.readers import MAX_READERS
from kvferry.protocol.source import Source
from kvferry.protocol.states import LeaseState
from kvferry.protocol.values import Account, Publication, ReaderId, Reading, Terms, View
from kvferry.tables import BlockTable

BLOCKS, LIMIT, JUNK = 10, 4, -1
TTL_S, DEADLINE_S = 20.0, 30.0
NAMES = ("r", "s")
BLOWS = ("break", "break", "revoke", "give up", "give up", "refuse", "time", "time", "time", "crash", "reader dies",
         "fence fails", "leave", "weights", "copies hang", "a copy fails", "slots are taken",
         "anew", "anew", "anew")  # fmt: skip


@dataclass(eq=False)
class Prefill:
    """One lease as its engine sees it. ranks: blocks on each rank that has not been told that it is over."""

    name: str
    number: int
    expected: int
    parts: list[int]
    """Blocks that each publish adds."""
    ranks: dict[int, list[int]] = field(default_factory=dict)
    published: Counter[int] = field(default_factory=Counter)
    """Publishes by rank."""
    words: dict[int, int] = field(default_factory=dict)
    """By rank: the word of its first publish."""
    weights: str = ""

    def tags(self, count: int) -> list[int]:
        return [self.number << 8 | index for index in range(count)]


@dataclass(eq=False)
class Link:
    """One stream. Each side learns that it is broken in its own time."""

    number: int
    reader: ReaderRank
    source: SourceRank
    life: int
    up: deque[Event] = field(default_factory=deque)
    down: deque[tuple[int, object]] = field(default_factory=deque)
    turns: dict[int, None] = field(default_factory=dict)
    """Readings that have something to tell, in order."""
    broken: bool = False
    connected: bool = False
    announced: dict[str, View] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Readings whose end was told."""
    readings: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(eq=False)
class SourceRank:
    index: int
    source: Source
    arena: Arena
    slow: bool = False
    """Its engine publishes later than the others."""
    life: int = 0
    words: set[int] = field(default_factory=set)
    memory: list[int] = field(default_factory=lambda: [JUNK] * BLOCKS)
    refused: Counter[str] = field(default_factory=Counter)
    """The highest lease of each request whose publish was refused."""
    fences: dict[int, tuple[Prefill, int]] = field(default_factory=dict)
    """Each with the publish that waits for it."""
    links: dict[int, Link] = field(default_factory=dict)
    complete: defaultdict[tuple[str, int], set[tuple[tuple[object, ...], int, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """(engine, attempt, rank) that has closed each lease complete, as heard here."""
    newest: defaultdict[tuple[str, int], Counter[tuple[object, ...]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """The highest attempt of each engine that has opened each lease."""


@dataclass(eq=False)
class ReaderRank:
    who: ReaderId
    links: dict[int, Link] = field(default_factory=dict)


@dataclass(eq=False)
class Part:
    """What one rank reads of one source rank in one attempt. idle: nothing."""

    receive: Receive
    reader: ReaderRank
    source: SourceRank
    idle: bool = False
    link: Link | None = None
    reading: int = 0
    view: View | None = None
    bytes: dict[int, int] = field(default_factory=dict)
    packing: int = 0
    staging: Staging | None = None
    """The packing of this number, until all of it is read and proven."""
    life: int = 0
    """The source's, whose memory was read."""
    proven: bool = False
    """All of it is read, and held meanwhile."""
    state: str = "reads"

    def progress(self) -> tuple[object, ...]:
        packed = self.staging.progress() if self.staging is not None else ()
        return self.view, self.reading, self.packing, len(self.bytes), self.state, self.proven, packed

    @property
    def over(self) -> bool:
        return self.state != "reads"

    @property
    def has_all(self) -> bool:
        """Whether it needs nothing more of its source: all that it wants has been packed, or it is proven."""
        return self.proven or (self.staging is not None and self.staging.last and self.staging.all_packed)

    @property
    def together(self) -> list[Part]:
        """What its rank reads in this attempt: all of it or nothing, and no further than every source rank has
        published."""
        return [each for each in self.receive.parts if each.reader is self.reader]

    @property
    def views(self) -> list[View | None]:
        return [each.view for each in self.together if not each.idle]


@dataclass(eq=False)
class Receive:
    """One attempt of one engine."""

    name: str
    attempt: int
    lease: int
    staged: bool
    deadline: float
    parts: list[Part] = field(default_factory=list)


class World:
    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        """told: each line of the transcript."""
        self.seed, self.rng, self.now, self.steps = seed, random.Random(seed), 0.0, 0
        self._told = told
        self.numbers, self.streams, self.words = itertools.count(1), itertools.count(1), itertools.count(1)
        self.fences = itertools.count(1)
        self.sources = [
            SourceRank(index, Source(LIMIT), Arena(self.rng), index > 0 and self.rng.random() < 0.5)
            for index in range(self.rng.choice((1, 2)))
        ]
        self.engines = {
            f"d{number}": [
                ReaderRank(ReaderId(f"d{number}", "1", rank, of, host=self._host(number, rank))) for rank in range(of)
            ]
            for number, of in enumerate(self.rng.choice(((1,), (2,), (1, 2), (3,), (2, 1, 1))))
        }
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.weights = ""
        self.at_rest = False
        """No more blows come."""
        self.prefills: list[Prefill] = []
        self.receives: list[tuple[str, Receive]] = []
        self.ends: Counter[str] = Counter()

    def _host(self, engine: int, rank: int) -> str:
        """Two ranks have one, so that each can wait for one request. A caller without an address has no bound."""
        return f"10.0.{engine}.{rank // 2}" if self.rng.random() < 0.7 else ""

    def tell(self, line: str) -> None:
        if self._told is not None:
            self._told(f"{self.steps:5} {self.now:6.1f} s  {line}")

    # ---- the machines of a source rank ----

    def feed(self, at: SourceRank, event: Event) -> list[e.SourceEffect]:
        """Raises KvferryError for a publish that is refused."""
        effects = fed(at.source, event, self.now)
        for each, (lease, who) in at.source.leases._opened.items():
            newest = at.newest[lease.request_id, lease.number]
            newest[who.engine] = max(
                newest[who.engine], at.source.streams[each.stream]._opened[each.number].asked.attempt
            )
        for effect in effects:
            self._do(at, effect)
            while self.rng.random() < 0.4:
                self._read_memory(at)
        at.source.check()
        self._check_sizes(at)
        return effects

    def _do(self, at: SourceRank, effect: e.SourceEffect) -> None:
        match effect:
            case e.HoldWord() | e.ClearWord():
                stand(at.words, effect)
            case e.CancelFence(fence):
                del at.fences[fence]
            case e.LeaseEnded(account):
                self._over(at, account)
            case e.Speak(reading):
                at.links[reading.stream].turns.setdefault(reading.number)
            case e.Served():
                pass
            case _:
                at.arena.do(effect, self.now)

    def _over(self, at: SourceRank, account: Account) -> None:
        """The engine is told, and uses the blocks otherwise."""
        name, number, state = account.request_id, account.number, account.state
        self.ends[state.value] += 1
        self.tell(f"source {at.index}: lease {number} of {name} is {state}")
        prefill = self.prefills[number - 1]
        if at.index not in prefill.ranks:
            raise Violation("an engine is told of an end twice", f"lease {number}")
        if any(of is prefill for of, _ in at.fences.values()):
            raise Violation("a fence is waited for of a lease that is over", f"lease {number}")
        if prefill.words[at.index] in at.words:
            raise Violation("an engine is told of an end while the word stands", f"lease {number}")
        if state is not LeaseState.REVOKED and account.open:
            raise Violation(f"{state} under its readers", f"lease {number}: {account.open}")
        for block in prefill.ranks.pop(at.index):
            at.memory[block] = JUNK
        if state is LeaseState.RELEASED and len(self._whole(at, name, number)) < prefill.expected:
            raise Violation("released before it was read", f"lease {number}: {at.complete[name, number]}")

    def _check_sizes(self, at: SourceRank) -> None:
        sizes = at.source.sizes()
        readers = sum(len(ranks) for ranks in self.engines.values()) + 4 * len(at.links)
        most = {
            "live": LIMIT, "awaited": LIMIT, "ended": leases.TOMBSTONES, "opened": 64 * readers, "alarms": LIMIT,
            "heap": 2 * LIMIT + 64, "readers": MAX_READERS, "queued": 16 * LIMIT, "held": SLOTS, "untold": SLOTS,
            "begun": BLOCKS * readers, "gathering": BLOCKS * readers,
        }  # fmt: skip
        for name, bound in most.items():
            if sizes.get(name, 0) > bound:
                raise Violation(f"more than may be kept: {name}", f"{sizes[name]} of {bound}")
        for host, waiting in Counter(who.host for _, who in at.source.leases._waits).items():
            if host and waiting > LIMIT // 2:
                raise Violation("one place takes all the waits", f"{waiting} from {host}")

    # ---- the engine that publishes ----

    def publish(self, name: str = "", *, expected: int = 0, anew: bool = False) -> Prefill | None:
        """Begin a prefill. Its ranks publish each in its own time. anew: though the one before goes on."""
        rng = self.rng
        name = name or rng.choice(NAMES)
        if not anew and any(each.name == name and each.ranks for each in self.prefills) and rng.random() < 0.6:
            return None
        parts = [rng.randint(1, 2) for _ in range(rng.choice((1, 1, 2, 3)))]
        expected = expected or rng.choice((1, 1, 1, min(2, len(self.engines))))
        prefill = Prefill(name, next(self.numbers), expected, parts, weights=self.weights)
        for at in self.sources:
            taken = {block for each in self.prefills for block in each.ranks.get(at.index, ())}
            free = [block for block in range(BLOCKS) if block not in taken]
            if len(free) < sum(parts):
                self.prefills.append(Prefill(name, prefill.number, 1, []))
                return None
            prefill.ranks[at.index] = rng.sample(free, sum(parts))
        self.prefills.append(prefill)
        return prefill

    def advance(self, prefill: Prefill, at: SourceRank, *, fenced: bool = False) -> bool:
        """The next publish of one rank."""
        done = prefill.published[at.index]
        if at.index not in prefill.ranks or done == len(prefill.parts):
            return False
        prefill.published[at.index] += 1
        blocks = prefill.ranks[at.index][: sum(prefill.parts[: done + 1])]
        more = done + 1 < len(prefill.parts)
        fence = next(self.fences) if fenced or self.rng.random() < 0.3 else None
        if not self.at_rest and self.rng.random() < 0.02:
            self.refuse(prefill, at)
            return True
        terms = Terms(prefill.name, prefill.number, next(self.words), TTL_S, prefill.expected)
        prefill.words.setdefault(at.index, terms.word)
        table = {"full": BlockTable(np.array(blocks))}
        said = Publication(table, len(blocks), b"", more=more, weights=prefill.weights)
        self.tell(
            f"source {at.index}: publish {prefill.number} of {prefill.name}, {len(blocks)} blocks, {more=}, {fence=}"
        )
        if fence is None:
            self._write(prefill, at, len(blocks))
        else:
            at.fences[fence] = prefill, len(blocks)
        try:
            self.feed(at, e.Publish(terms, said, fence))
        except KvferryError as error:
            if fence is not None:
                at.fences.pop(fence, None)
            if error.code not in ("full", "lease_ended"):
                raise Violation(f"a publish is refused: {error.code}", str(error)) from error
            prefill.ranks.pop(at.index, None)
        if not self.at_rest and (more or fence is not None) and self.rng.random() < 0.06:
            self._regret(prefill, at)
        return True

    def _revoke(self, at: SourceRank, name: str) -> None:
        self.feed(at, e.Revoke(name, "preempted"))
        for prefill in self.prefills:
            if prefill.name == name:
                prefill.ranks.pop(at.index, None)

    def _regret(self, prefill: Prefill, at: SourceRank) -> None:
        """Its engine is preempted, or a router aborts it, before all is published."""
        if self.rng.random() < 0.5:
            self._revoke(at, prefill.name)
        else:
            ranks = self.rng.choice(list(self.engines.values()))
            self.feed(at, e.GiveUp(prefill.name, "aborted", self.rng.choice(ranks).who))

    def refuse(self, prefill: Prefill, at: SourceRank) -> None:
        """A publish that cannot be taken as it is: what was published before it stays."""
        self.tell(f"source {at.index}: publish of {prefill.number} of {prefill.name} is refused")
        if prefill.words.get(at.index):
            prefill.published[at.index] -= 1
        else:
            del prefill.ranks[at.index]
            at.refused[prefill.name] = max(at.refused[prefill.name], prefill.number)
        self.feed(at, e.Refuse(prefill.name, prefill.number, Conflict("mixed_weights", "other weights")))

    def _write(self, prefill: Prefill, at: SourceRank, count: int) -> None:
        for block, tag in zip(prefill.ranks.get(at.index, ()), prefill.tags(count), strict=False):
            at.memory[block] = tag

    def reach(self, at: SourceRank, *, problem: KvferryError | None = None) -> None:
        fence = self.rng.choice(list(at.fences))
        prefill, count = at.fences.pop(fence)
        if problem is None:
            # A stream writes in order: what an earlier fence guards is there as well.
            self._write(prefill, at, count)
        self.tell(f"source {at.index}: fence {fence} is {'reached' if problem is None else 'given up'}")
        self.feed(at, e.FenceOver(prefill.name, fence, problem))

    # ---- engines that read ----

    def receive(self, engine: str, name: str = "", *, lease: int | None = None) -> Receive:
        name = name or self.rng.choice(NAMES)
        self.attempts[engine, name] += 1
        if lease is None:
            last = max((each.number for each in self.prefills if each.name == name), default=0)
            lease = self.rng.choice((0, last, last + 1 if self.rng.random() < 0.1 else last))
        staged = self.rng.random() < 0.5
        receive = Receive(name, self.attempts[engine, name], lease, staged, self.now + DEADLINE_S)
        for reader in self.engines[engine]:
            idle = self.rng.choice(self.sources) if self.rng.random() < 0.5 and len(self.sources) > 1 else None
            receive.parts += [Part(receive, reader, at, at is idle) for at in self.sources]
        self.receives.append((engine, receive))
        self.tell(f"{engine}: receive {name}, attempt {receive.attempt}, lease {lease or 'any'}, {staged=}")
        return receive

    def go_on(self, part: Part) -> None:
        """One step of a reader's. Its rank gives up what it reads in an earlier attempt; other ranks may be late."""
        if part.idle or part.proven:
            return
        for each in self.parts():
            earlier = each.receive.name == part.receive.name and each.receive.attempt < part.receive.attempt
            if each.reader is part.reader and earlier:
                self.fail(each, "superseded")
        link = self._link(part)
        if len({view.terms.number for view in part.views if view is not None}) > 1:
            self.fail(part, "lease changed")
        elif part.view is None:
            known = None if part.reading else link.announced.get(part.receive.name)
            if known is not None and part.receive.lease in (0, known.terms.number):
                part.view, part.life = known, link.life
            elif not part.reading:
                self._ask(part, link)
        elif not part.reading and (part.receive.staged or self.rng.random() < 0.5):
            self._ask(part, link)
        elif part.receive.staged:
            self._pack(part, link, part.view)
        else:
            self._read(part)

    def _link(self, part: Part) -> Link:
        at, reader = part.source, part.reader
        if part.link is not None:
            return part.link
        link = reader.links.get(at.index)
        if link is None or link.broken:
            link = reader.links[at.index] = Link(next(self.streams), reader, at, at.life)
            at.links[link.number] = link
            link.up.append(e.Connect(link.number, reader.who, announcing=True))
        part.link = link
        return link

    def _ask(self, part: Part, link: Link) -> None:
        part.reading = next(link.readings)
        link.parts[part.reading] = part
        known = part.view.known_by if part.view is not None else (0, 0)
        receive = part.receive
        link.up.append(e.Ask(Reading(link.number, part.reading), receive.name, receive.lease, receive.attempt, known))

    def _missing(self, part: Part) -> list[int]:
        """Of what every source rank has published."""
        published = min(0 if view is None else view.said.num_tokens for view in part.views)
        return [index for index in range(published) if index not in part.bytes]

    def _all_there(self, part: Part) -> bool:
        """Whether every source rank has published all of one lease."""
        whole = [view.terms.number for view in part.views if view is not None and not view.said.more]
        return len(whole) == len(part.views) and len(set(whole)) == 1

    def _pack(self, part: Part, link: Link, view: View) -> None:
        missing, staging = self._missing(part), part.staging
        if staging is not None and part.life != part.source.life:
            self.fail(part, "the source is gone")
        elif staging is not None and not (part.has_all or link.broken or self.at_rest) and self.rng.random() < 0.02:
            part.staging = None  # another source rank was asked again, and this one packs anew
        elif staging is not None and staging.proven:
            part.bytes, part.staging = part.bytes | staging.bytes, None
        elif staging is not None:
            said = staging.step(part.source.arena, self.rng, self.now)
            if said is not None and not link.broken:
                link.up.append(said)
            if link.broken and staging.asks:
                self.fail(part, "peer lost")
        elif missing:
            part.packing, part.life = part.packing + 1, link.life
            chunks = tuple(tuple(missing[at : at + 2]) for at in range(0, len(missing), 2))
            reading, last = Reading(link.number, part.reading), self._all_there(part)
            part.staging = Staging(p.At(reading, part.packing), chunks, last)
            link.up.append(e.Pack(reading, part.packing, len(chunks), last, (view.terms.word, chunks)))
        elif self._all_there(part):
            self._prove(part)

    def _read(self, part: Part) -> None:
        """By NIXL: one block, or at last the word."""
        view, at = part.view, part.source
        assert view is not None
        missing = self._missing(part)
        if part.life != at.life:
            self.fail(part, "the source is gone")
        elif missing:
            index = self.rng.choice(missing)
            part.bytes[index] = at.memory[int(view.said.tables["full"].block_ids[index])]
        elif self._all_there(part):
            if view.terms.word in at.words:
                self._prove(part)
            else:
                self.fail(part, "torn")

    def _read_memory(self, at: SourceRank) -> None:
        reading = [
            each
            for each in self.parts()
            if each.source is at and not (each.receive.staged or each.proven) and each.view is not None
        ]
        if reading:
            self._read(self.rng.choice(reading))

    def _prove(self, part: Part) -> None:
        """The rank calls it whole; and closes all, once all is."""
        assert part.view is not None
        part.proven, number = True, part.view.terms.number
        meant = dict(enumerate(self.prefills[number - 1].tags(part.view.said.num_tokens)))
        if part.bytes != meant:
            raise Violation("called whole and is not", f"lease {number}: {part.bytes}")
        if all(each.idle or each.proven for each in part.together):
            for each in part.together:
                each.state = "done"
                self.ends["done"] += 1
                self._leave(each, complete=True, lease=number)

    def _leave(self, part: Part, *, complete: bool, lease: int = 0) -> None:
        self.tell(f"{part.reader.who.engine_id}/{part.reader.who.rank}: attempt {part.receive.attempt} at "
                  f"{part.receive.name} of source {part.source.index}: {part.state}")  # fmt: skip
        link = self._link(part) if complete else part.link
        if link is None or link.broken:
            return
        number = lease or (part.view.terms.number if part.view is not None else part.receive.lease)
        if part.reading or complete:
            link.up.append(
                e.Leave(
                    Reading(link.number, part.reading), part.receive.name, number, complete, len(part.bytes),
                    part.receive.attempt,
                )
            )  # fmt: skip
        link.parts.pop(part.reading, None)

    def fail(self, part: Part, why: str) -> None:
        for each in part.together:
            if not each.over:
                each.state = why if each is part else "another part failed"
                self.ends[each.state] += 1
                self._leave(each, complete=False)

    def parts(self) -> list[Part]:
        return [part for _, receive in self.receives for part in receive.parts if not part.over]

    # ---- streams ----

    def carry(self, link: Link) -> bool:
        """One message, or that a side learns that the stream is broken."""
        at, choices = link.source, []
        known = at.links.get(link.number) is link and link.life == at.life
        if known and link.up and not link.broken:
            choices.append("up")
        if known and link.connected and link.turns and not link.broken:
            choices.append("compose")
        if link.down and not link.broken:
            choices.append("down")
        if link.broken and known and (self.at_rest or self.rng.random() < 0.2):
            choices.append("source learns")
        if not choices:
            return False
        match self.rng.choice(choices):
            case "up":
                self._hear(at, link, link.up.popleft())
            case "compose":
                self._compose(at, link)
            case "down":
                self._deliver(link, *link.down.popleft())
            case _:
                if link.connected:
                    self.feed(at, e.Disconnect(link.number))
                del at.links[link.number]
        return True

    def _hear(self, at: SourceRank, link: Link, event: Event) -> None:
        if isinstance(event, e.Connect):
            link.connected = True
        if isinstance(event, e.Leave) and event.complete:
            opened = at.source.leases._opened.get(event.reading)
            number = opened[0].number if opened is not None else event.lease
            who = link.reader.who
            at.complete[event.request_id, number].add((who.engine, event.attempt, who.rank))
        if isinstance(event, p.Want):
            at.arena.heard[event.at] = self.now
        try:
            self.feed(at, event)
        except KvferryError as error:
            raise Violation(f"between daemons of ours: {error.code}", str(error)) from error

    def _compose(self, at: SourceRank, link: Link) -> None:
        number = next(iter(link.turns))
        del link.turns[number]
        told = at.source.take(Reading(link.number, number))
        if isinstance(told, e.Announcement) and told.view.terms.word not in at.words:
            raise Violation("a lease that has ended is announced", f"{told.view.terms}")
        if told is not None:
            link.turns[number] = None
            link.down.append((number, at.arena.sent(told) if isinstance(told, p.Packed) else told))

    def _deliver(self, link: Link, number: int, told: object) -> None:
        if number in link.ended:
            raise Violation("something is told after the end", str(told))
        part = link.parts.get(number)
        match told:
            case e.Announcement(view):
                link.announced[view.terms.request_id] = view
            case e.Problem(why):
                link.ended.add(number)
                if part is not None and not part.has_all:
                    self.fail(part, why.code)
            case e.Update(view) if part is not None:
                if part.view is not None and part.view.terms.word != view.terms.word:
                    part.bytes.clear()
                    part.staging, part.proven = None, False
                elif part.view is not None and view.version <= part.view.version:
                    raise Violation("told what it knows", f"{view.version} after {part.view.version}")
                part.view, part.life = view, link.life
            case Sent(p.Packed(at, problem=problem)) if part is not None and part.staging is not None:
                if at != part.staging.at:
                    return  # of one that was given up
                part.staging.hear(told)
                if problem is not None:
                    self.fail(part, f"not packed: {problem.code}")
            case _:
                pass

    # ---- blows ----

    def blow(self) -> None:
        rng, what = self.rng, self.rng.choice(BLOWS)
        at, engine = rng.choice(self.sources), rng.choice(list(self.engines))
        name = rng.choice(NAMES)
        self.tell(f"blow: {what}")
        match what:
            case "break" if links := [each for each in at.links.values() if not each.broken]:
                self._break(rng.choice(links))
            case "revoke":
                for each in self.sources if rng.random() < 0.5 else [at]:  # its ranks do so each in its own time
                    self._revoke(each, name)
                self._come_late(name)
            case "give up":
                self.feed(at, e.GiveUp(name, "aborted", rng.choice(self.engines[engine]).who))
            case "refuse" if going := [each for each in self.prefills if each.published[at.index] < len(each.parts)]:
                if at.index in (prefill := rng.choice(going)).ranks:
                    prefill.published[at.index] += 1
                    self.refuse(prefill, at)
            case "time":
                self.pass_time(rng.choice((1.0, 7.0, 7.0, 25.0, 35.0)))
                if rng.random() < 0.3:
                    self._come_late(name)
            case "crash" if rng.random() < 0.3:
                self._crash(at)
            case "reader dies" if rng.random() < 0.3:
                self._die(engine)
            case "fence fails" if at.fences:
                self.reach(at, problem=Conflict("fence_timeout", "the GPU is slow"))
            case "leave" if parts := self.parts():
                self.fail(rng.choice(parts), "gave up")
            case "copies hang":
                for copying in at.arena.copies.values():
                    copying.hangs = not copying.hangs
            case "a copy fails" if copies := list(at.arena.copies.values()):
                rng.choice(copies).fails = True
            case "slots are taken":
                at.arena.take()
            case "anew" if names := [name for each in at.links.values() for name in each.announced]:
                self._anew(rng.choice(names))
            case "weights" if rng.random() < 0.2:
                self.weights = f"w{self.steps}"
                for each in self.sources:
                    self.feed(each, e.ReplaceWeights(self.weights, "replaced"))
            case _:
                pass

    def _come_late(self, name: str) -> None:
        """Engines read by an announcement of what is not there any more."""
        for engine in self.engines:
            self.receive(engine, name, lease=0).staged = True

    def _anew(self, name: str) -> None:
        """The announced lease is over, and the next one of its request waits for its fence."""
        for at in self.sources:
            self._revoke(at, name)
        prefill = self.publish(name, anew=True)
        for at in self.sources if prefill is not None else ():
            self.advance(prefill, at, fenced=True)
        self._come_late(name)

    def _break(self, link: Link) -> None:
        link.broken = True
        link.up.clear()
        link.down.clear()
        for part in self.parts():
            if part.link is link and not part.has_all:
                self.fail(part, "peer lost")

    def _crash(self, at: SourceRank) -> None:
        """The daemon; its engine attaches again, and says what it had published."""
        self.tell(f"source {at.index}: the daemon dies")
        for link in at.links.values():
            if not link.broken:
                self._break(link)
        lost = [(each.name, each.number) for each in self.prefills if each.ranks.pop(at.index, None) is not None]
        at.memory[:] = [JUNK] * BLOCKS
        at.life += 1
        at.source, at.words, at.fences, at.links, at.refused = Source(LIMIT), set(), {}, {}, Counter()
        at.arena = Arena(self.rng)
        self.feed(at, e.Lose(tuple(lost)))

    def _die(self, engine: str) -> None:
        """All ranks of a reading engine; it starts anew, in another epoch."""
        self.tell(f"{engine}: dies")
        ranks = self.engines[engine]
        for reader in ranks:
            for link in reader.links.values():
                if not link.broken:
                    self._break(link)
        for owner, receive in self.receives:
            for part in receive.parts:
                if owner == engine and not part.over:
                    part.state = "died"
        epoch = str(int(ranks[0].who.epoch) + 1)
        self.engines[engine] = [ReaderRank(replace(it.who, epoch=epoch)) for it in ranks]
        for name in NAMES:
            self.attempts[engine, name] = 0

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            timers = [(at.source.next_timer(), at) for at in self.sources]
            idle = [at.arena.next_timer() for at in self.sources]
            due = min(
                (timer for timer in (*(timer for timer, _ in timers), *idle) if timer is not None), default=until + 1
            )
            if due > until:
                break
            self.now = max(self.now, due)
            for timer, at in timers:
                if timer is not None and timer <= self.now:
                    self.feed(at, e.Tick())
                    if (again := at.source.next_timer()) is not None and again <= self.now:
                        raise Violation("a timer rings and rings")
            self._pass_in_arenas()
        self.now = until
        self._pass_in_arenas()
        for _, receive in self.receives:
            for part in receive.parts:
                if not part.over and receive.deadline <= self.now:
                    self.fail(part, "deadline")

    def _pass_in_arenas(self) -> None:
        for at in self.sources:
            at.arena.pass_time(self.now)
            self._tell_at_once(at)

    def _tell_at_once(self, at: SourceRank) -> None:
        while at.arena.at_once:
            self.feed(at, at.arena.at_once.pop())

    # ---- a run ----

    def step(self) -> bool:
        """Somebody's next step, if anybody can take one."""
        self.steps += 1
        rng = self.rng
        links = [link for at in self.sources for link in at.links.values()]
        kinds = [self._step_link, self._step_link, self._step_part, self._step_source]
        rng.shuffle(kinds)
        return any(kind(links) for kind in kinds)

    def _step_link(self, links: list[Link]) -> bool:
        self.rng.shuffle(links)
        return any(self.carry(link) for link in links)

    def _step_part(self, links: list[Link]) -> bool:
        """Of the first that can: many may wait, and one that is seldom chosen does not."""
        parts = self.parts()
        self.rng.shuffle(parts)
        for part in parts:
            before = part.progress()
            self.go_on(part)
            if part.progress() != before:
                return True
        return False

    def _step_source(self, links: list[Link]) -> bool:
        at = self.rng.choice(self.sources)
        if at.fences and self.rng.random() < 0.4:
            self.reach(at)
            return True
        if at.arena.arisen and self.rng.random() < at.arena.prompt:
            self.feed(at, at.arena.arisen.pop(0))
            return True
        if self.rng.random() < 0.6 and at.arena.copy(at.memory, self.now):
            self._tell_at_once(at)
            return True
        if at.slow and self.rng.random() < 0.9:
            return False
        going = [each for each in self.prefills if at.index in each.ranks]
        return any(self.advance(each, at) for each in self.rng.sample(going, len(going)))

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def _carry_all(self) -> None:
        """All that has been said is heard."""
        while any(self.carry(link) for at in self.sources for link in list(at.links.values())):
            pass

    def run_dry(self) -> None:
        """Until nobody can take a step, and no slot keeps its bytes for somebody who has gone."""
        idle = 0
        for _ in range(20_000):
            idle = 0 if self.step() else idle + 1
            if idle > 60:
                if not any(at.arena.keeping for at in self.sources):
                    return
                self.pass_time(KEPT_S)
                idle = 0
        raise Violation("it never comes to rest")

    def run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(4, 10)):
            acts: list[Callable[[], object]] = [self.publish, lambda: self.receive(rng.choice(list(self.engines)))]
            rng.shuffle(acts)
            for act in acts:
                act()
                self.go(rng.choice((0, 3, 10, 30)))
            self.blow()
            if rng.random() < 0.5:
                self._carry_all()
                self._check_told()
                self._check_released()
            self.go(rng.choice((0, 10, 40)))
        self.tell("blows stop")
        self.at_rest = True
        for at in self.sources:
            at.slow = False
            at.arena.come_to_rest()
        self._come_to_rest()
        self._serve_once_more()

    def _come_to_rest(self) -> None:
        self.run_dry()
        self._check_told(at_rest=True)
        self._check_released()
        self.pass_time(DEADLINE_S)
        self.run_dry()
        if self.parts():
            raise Violation("an attempt goes on after its deadline")
        self.pass_time(2 * TTL_S)
        self.run_dry()
        for at in self.sources:
            sizes = at.source.sizes()
            if sizes["live"] or at.words or any(at.index in each.ranks for each in self.prefills):
                raise Violation("a lease does not end", f"{sizes}")
            for name in ("opened", "waiting", "waiting at", "awaited", "alarms", "heap", "queued"):
                if sizes.get(name, 0):
                    raise Violation(f"something is left: {name}", f"{sizes}")
            if at.fences:
                raise Violation("a fence is waited for")
            at.arena.check_empty()
        self._say_late()

    def _say_late(self) -> None:
        """Words of leases that are over."""
        for at in self.sources:
            for name in NAMES:
                who, number = (
                    self.rng.choice(self.engines[self.rng.choice(list(self.engines))]).who,
                    at.source.leases.newest(name),
                )
                words = [e.Revoke(name, "late"), e.GiveUp(name, "late", who)]
                if number:
                    words.append(e.Refuse(name, number, Conflict("mixed_weights", "late")))
                for word in words:
                    self.feed(at, word)

    def _check_told(self, *, at_rest: bool = False) -> None:
        """Every reader has been told the latest, since nothing is on its way. at_rest: readers have gone on by it."""
        for part in self.parts():
            link, at = part.link, part.source
            goes_on = part.receive.staged and part.staging is None and (self._missing(part) or self._all_there(part))
            waits = at_rest or not (part.has_all or goes_on)
            if link is None or link.broken or not part.reading or link.life != at.life or not waits:
                continue
            lease, wanted = at.source.leases.get(part.receive.name), part.receive.lease
            reads = part.view.terms.number if part.view is not None else wanted
            if lease is not None and reads in (0, lease.number):
                seen = part.view.version if part.view is not None else 0
                if seen < lease.version or (at_rest and self._all_there(part)):
                    raise Violation("a reader of what is published waits", f"{seen} of {lease.version}")
            elif Reading(link.number, part.reading) in at.source.leases._opened:
                pass  # its announcement is over, and the lease that is there now has not been shown yet
            elif reads and reads <= max(at.source.leases.newest(part.receive.name), at.refused[part.receive.name]):
                raise Violation("a reader of what is over waits", f"lease {reads} of {part.receive.name}")

    def _check_released(self) -> None:
        """No lease waits that all have read."""
        for at in self.sources:
            for lease in at.source.leases:
                of = lease.request_id, lease.number
                for engine, attempt, _ in at.complete[of]:
                    at.newest[of][engine] = max(at.newest[of][engine], attempt)
                still = lease.version and not (lease.more or lease.readers.live)
                if still and len(self._whole(at, *of)) >= lease.terms.readers:
                    raise Violation("read by all, and not released", f"lease {lease.number}: {at.complete[of]}")

    def _whole(self, at: SourceRank, name: str, number: int) -> set[tuple[object, ...]]:
        """Engines of which all ranks have closed the lease complete, in the newest of their attempts."""
        closed, newest = at.complete[name, number], at.newest[name, number]
        return {
            engine
            for engine, attempt, _ in closed
            if attempt >= newest[engine]
            and all((engine, attempt, rank) in closed for rank in range(int(str(engine[2]))))
        }

    def _serve_once_more(self) -> None:
        """Nothing stands in the way of it."""
        engine = self.rng.choice(list(self.engines))
        first = self.rng.random() < 0.5
        self.tell(f"once more, {'publish' if first else 'receive'} first")
        name, number = self.rng.choice(NAMES), len(self.prefills) + 1
        if first:
            self.publish(name, expected=1)
            self.go(self.rng.choice((0, 5, 40)))
        receive = self.receive(engine, name, lease=number)
        self.go(self.rng.choice((0, 5, 40)))
        if not first:
            self.publish(name, expected=1)
        self.run_dry()
        for part in receive.parts:
            if part.state != "done":
                raise Violation(f"not done though nothing stands in the way: {part.state}")
        for at in self.sources:
            if at.source.leases.state_of(name) is not LeaseState.RELEASED:
                raise Violation("read by all, and not released")
