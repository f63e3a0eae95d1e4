"""Engines that read by the machines that daemons run, of a source of one or two ranks (source_world.py).

Each rank of an attempt has its own order, which may name the lease or not, and hears of rank 0's order whenever the
seed says so, or never. Announcements come before they are wanted, or late, or of leases that have ended since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import source_world
from promises import Promises
from source_world import BLOCKS, DEADLINE_S, NAMES, Link, ReaderRank, Receive, SourceRank
from staged_world import Sent, Staging
from violation import Violation

from kvferry.errors import Conflict, KvferryError, PeerFailed
from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol import reading as r
from kvferry.protocol import transfer_events as t
from kvferry.protocol.reading import Computed, Seen
from kvferry.protocol.states import TransferState
from kvferry.protocol.transfer import Progress
from kvferry.protocol.values import Reading, View

EPOCH = "1"


@dataclass(eq=False)
class RankPart:
    """An attempt of one rank. Its blocks keep what was written last."""

    receive: Receive
    reader: ReaderRank
    wanted: t.Wanted
    read: tuple[int, ...]
    """Source ranks of which there is something to read."""
    begins: int
    """The step from which order and reservation are there."""
    nothing: frozenset[int] = frozenset()
    """Ranks of `read` of which nothing is moved: they have the verdict only."""
    machine: Progress = field(default_factory=Progress)
    promises: Promises = field(init=False)
    links: dict[int, Link] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """Readings on their streams, by source rank."""
    due: set[int] = field(default_factory=set)
    lives: dict[int, int] = field(default_factory=dict)
    """Lives of the sources' daemons, when hands were shaken."""
    grain: int = 1
    """Blocks that are moved together, but for the last."""
    bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tags by source rank and block."""
    left: list[tuple[int, int]] | None = None
    """Blocks that the move under way has still to read."""
    packings: int = 0
    staging: dict[int, Staging] = field(default_factory=dict)
    """Of the move under way, by source rank."""
    packed: set[int] = field(default_factory=set)
    """Source ranks of which all that is moved is read and proven."""
    failed: dict[int, KvferryError] = field(default_factory=dict)
    """Source ranks that do not pack what is wanted."""
    unpublished: set[int] = field(default_factory=set)
    """Source ranks that have said so, and have told of no lease since."""
    compared: bool = False
    proofs: dict[int, set[bool]] = field(default_factory=dict)
    """Whether the moves of each source rank were proven by packing."""
    whole: frozenset[int] = frozenset()
    """Source ranks of which a pass that failed has packed all."""
    state: str = "reads"
    read_lease: t.LeaseId | None = None

    def __post_init__(self) -> None:
        self.promises = Promises(self.machine)

    @property
    def over(self) -> bool:
        return self.state != "reads"

    def tokens(self, prefill: source_world.Prefill) -> range:
        """The tokens that are wanted of this lease."""
        return range(*(self.wanted.tokens or (0, sum(prefill.parts))))

    def progress(self) -> tuple[object, ...]:
        """Equal only where nothing has been done."""
        staged = {rank: staging.progress() for rank, staging in self.staging.items()}
        left = len(self.left or ()), len(self.due), len(self.failed), len(self.packed)
        return self.machine.do, left, staged, self.state


class World(source_world.World):
    calm = False
    """Blows have stopped."""

    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, told=told)
        self.arisen: list[tuple[RankPart, t.TransferEvent]] = []
        self.known: defaultdict[ReaderRank, dict[int, int]] = defaultdict(dict)
        """Lives of the sources' daemons with which each reader's has shaken hands, by source rank."""
        self.unquiet: list[RankPart] = []
        """Parts that have their verdict, and of which reads may still be under way."""

    def blow(self) -> None:
        if self.rng.random() < 0.5:
            self.publish(anew=True)
        else:
            super().blow()

    def _come_to_rest(self) -> None:
        self.calm = True
        super()._come_to_rest()

    # ---- the machine of one part ----

    def receive(self, engine: str, name: str = "", *, lease: int | None = None) -> Receive:
        rng, name = self.rng, name or self.rng.choice(NAMES)
        self.attempts[engine, name] += 1
        last = max((each.number for each in self.prefills if each.name == name), default=0)
        staged = rng.random() < 0.5
        receive = Receive(name, self.attempts[engine, name], lease or 0, staged, self.now + DEADLINE_S)
        alike = lease is not None or rng.random() < 0.6
        named = rng.choice((0, last)) if lease is None else lease
        tokens = self._range(any_length=lease is None)
        for reader in self.engines[engine]:
            if not alike:
                named = rng.choice((0, last, max(0, last - 1)))
            # An engine that names a lease by epoch and number names the same on every rank.
            epoch = EPOCH if alike and rng.random() < (0.7 if named else 0.3) else ""
            wanted = t.Wanted(
                name, reader.who.rank, epoch, named, Computed(weights=self.weights), tokens, rng.random() < 0.6
            )
            every = tuple(at.index for at in self.sources)
            read = every if rng.random() < 0.8 else (rng.choice(every),)
            begins = self.steps + rng.choice((0, 0, 0, 40, 80))
            nothing = frozenset(rank for rank in read if rng.random() < 0.1)
            receive.parts.append(RankPart(receive, reader, wanted, read, begins, nothing))  # type: ignore[arg-type]
            self.tell(
                f"{engine}/{reader.who.rank}: receive {name}, attempt {receive.attempt}, {epoch=}, {named=}, {staged=}"
            )
        self.receives.append((engine, receive))
        return receive

    def _range(self, *, any_length: bool) -> tuple[int, int] | None:
        """One block is in every prefill."""
        if self.rng.random() < 0.7:
            return None
        first = self.rng.choice((0, 0, 1, 2)) if any_length else 0
        return first, first + (self.rng.randint(1, 3) if any_length else 1)

    @staticmethod
    def _of(parts: Iterable[Any]) -> list[RankPart]:
        return [part for part in parts if not part.over]

    def told(self, part: RankPart, event: t.TransferEvent) -> None:
        """Events that arise while something is done for one are told after it, as by the shell."""
        self.arisen.append((part, event))
        if len(self.arisen) == 1:
            while self.arisen:
                self._told_next(*self.arisen[0])
                self.arisen.pop(0)

    def _told_next(self, part: RankPart, event: t.TransferEvent) -> None:
        do = part.machine.do
        for effect in part.promises.on(event, self.now):
            match effect:
                case t.Say(rank, r.Open(opening, lease, known)):
                    self._open(part, rank, opening, lease, known)
                case t.Say(rank, r.Close() as closed):
                    self._close(part, rank, closed)
                case t.Say(rank, r.OpenLater()):
                    part.due.add(rank)
                case t.Forget():
                    self.known[part.reader].clear()
        part.machine.check()
        self._check_listening(part)
        if part.machine.do is not do:
            part.left = None
        if isinstance(part.machine.do, t.Finish) and not part.over:
            self._verdict(part, part.machine.do)

    def _check_listening(self, part: RankPart) -> None:
        machine = part.machine
        unpublished = machine.state is TransferState.READING or part.unpublished & machine._awaited
        if machine.awaits_publish != (isinstance(machine.do, t.Listen) and bool(unpublished)):
            raise Violation("its engine is told of another reason to wait", f"{machine.do}, {part.unpublished}")
        for each in machine.readings.values():
            if each.announced and not each.wanted.fits(each.seen):
                raise Violation("it goes by an announcement of something else", f"{each.seen}")

    def _open(self, part: RankPart, rank: int, opening: int, lease: int, known: tuple[int, int]) -> None:
        link, name = part.links[rank], part.receive.name
        part.due.discard(rank)
        part.unpublished.discard(rank)
        part.whole -= {rank}
        part.proofs.pop(rank, None)
        if link.broken:
            self.told(part, t.Told(rank, r.Over(opening, _lost())))
            return
        if part.lives[rank] != link.life:
            why = PeerFailed("stale_instance", "hands were shaken with the daemon before this one")
            self.told(part, t.Told(rank, r.Over(opening, why)))
            return
        if not self.calm and self.rng.random() < 0.05:
            self.told(part, t.Told(rank, r.Over(opening, Conflict("stale_epoch", "the engine was started anew"))))
            return
        part.numbers[rank] = number = next(link.readings)
        link.parts[number] = (part, rank, opening)  # type: ignore[assignment]
        link.up.append(e.Ask(Reading(link.number, number), name, lease, part.receive.attempt, known))

    def _close(self, part: RankPart, rank: int, said: r.Close) -> None:
        if said.complete and part.state != "done":
            raise Violation("closed as read, and is not")
        if rank not in part.read and (said.opening, said.complete, said.nbytes) != (0, True, 0):
            raise Violation("it says to have read that of which it has read nothing", f"{said}")
        if said.complete:
            assert part.read_lease is not None
            moved = rank in part.read and rank not in part.nothing
            count = len(part.tokens(self.prefills[part.read_lease[1] - 1])) if moved else 0
            if said.lease != part.read_lease[1] or said.nbytes < count:
                raise Violation("closed as another lease, or as fewer bytes", f"{said}, {part.read_lease}, {count}")
        link, number = part.links[rank], part.numbers.pop(rank, 0)
        link.parts.pop(number, None)
        if not link.broken:
            reading, receive = Reading(link.number, number), part.receive
            link.up.append(e.Leave(reading, receive.name, said.lease, said.complete, said.nbytes, receive.attempt))

    def stop(self, part: RankPart, why: KvferryError) -> None:
        self.told(part, t.Stop(why, self.rng.random() < 0.3))

    def fail(self, part: Any, why: str) -> None:
        self.stop(part, Conflict("aborted", why))

    def _verdict(self, part: RankPart, verdict: t.Finish) -> None:
        code = "done" if verdict.problem is None else verdict.problem.code
        who = part.reader.who
        self.tell(f"{who.engine_id}/{who.rank}: attempt {part.receive.attempt} at {part.receive.name}: {code}, "
                  f"lease {part.machine.lease}")  # fmt: skip
        part.state, part.read_lease = code, verdict.lease
        self.ends[code] += 1
        if verdict.state is TransferState.DONE:
            self._check_bytes(part, verdict)
        if self.rng.random() < 0.5:
            self.told(part, t.Quiet())
        else:
            self.unquiet.append(part)

    def _check_bytes(self, part: RankPart, verdict: t.Finish) -> None:
        assert verdict.lease is not None and verdict.tokens is not None
        prefill = self.prefills[verdict.lease[1] - 1]
        if prefill.name != part.receive.name:
            raise Violation("done with the lease of another request")
        if prefill.weights != part.wanted.computed.weights:
            raise Violation("done with what other weights computed")
        wanted, tags = part.tokens(prefill), prefill.tags(sum(prefill.parts))
        if range(*verdict.tokens) != wanted:
            raise Violation("done with a part of it", f"{verdict.tokens}")
        if wanted.stop > len(tags):
            raise Violation("done with what was never published", f"{wanted} of {len(tags)}")
        meant = {(rank, at): tags[at] for rank in part.read if rank not in part.nothing for at in wanted}
        if part.machine.nbytes != len(meant):
            raise Violation("its bytes are miscounted", f"{part.machine.nbytes} of {len(meant)}")
        if part.wanted.sums and not part.compared:
            raise Violation("done, and its sums are not compared")
        if {key: part.bytes.get(key) for key in meant} != meant:
            raise Violation("done and is not whole", f"lease {verdict.lease}: {part.bytes}")
        for other in part.receive.parts:
            if other.state == "done" and other.read_lease != verdict.lease:  # type: ignore[attr-defined]
                raise Violation("ranks are done with two leases", f"{other.read_lease} and {verdict.lease}")  # type: ignore[attr-defined]

    # ---- what is to be done ----

    def go_on(self, part: Any) -> None:
        """One step of one rank. Its next attempt ends the one before; other ranks may be late."""
        rng = self.rng
        self._lead(part)
        do = part.machine.do
        if not self.calm and rng.random() < self._lasts(part):
            self._meanwhile(part)
            return
        if part.due and rng.random() < 0.2:
            rank = part.due.pop()
            self.told(part, t.Told(rank, r.Due()))
            return
        match do:
            case t.Listen() if part.machine.wanted is None and (self.calm or self.steps >= part.begins):
                for each in self._of(self.parts()):
                    earlier = each.receive.name == part.receive.name and each.receive.attempt < part.receive.attempt
                    if each.reader is part.reader and earlier:
                        self.stop(each, Conflict("superseded", "by the next attempt"))
                self.told(part, t.Match(part.wanted))
            case t.Meet():
                self._meet(part)
            case t.Move():
                self._move(part, do)
            case t.Drain():
                part.proofs = {rank: {True} for rank in part.whole}
                self.told(part, t.Drained())
            case t.Compare() if not self.calm and rng.random() < 0.3:
                self.told(part, t.Failed(Conflict("sums_differ", "by chance")))
            case t.Compare():
                part.compared = True
                self.told(part, t.Compared())
            case t.Prove():
                self._prove(part, do)
            case _:
                pass

    @staticmethod
    def _lasts(part: RankPart) -> float:
        """Words come in what takes longer, or waits."""
        match part.machine.do:
            case t.Meet():
                return 0.9 if part.links else 0.3
            case t.Compare() | t.Drain():
                return 0.8
            case t.Prove():
                return 0.4
            case t.Listen() if part.machine.wanted is not None:
                return 0.1
            case _:
                return 0.0

    def _meanwhile(self, part: RankPart) -> None:
        if self.rng.random() < 0.06:
            self.stop(part, Conflict("aborted", "meanwhile"))
        elif part.machine.readings and self.rng.random() < 0.5:
            self.told(part, self._stale(part))
        elif part.links and isinstance(part.machine.do, t.Meet):  # a word of the streams before
            self.told(part, t.Told(self.rng.choice(part.read), r.Over(1, _lost())))
        else:
            self._lead(part)

    def _stale(self, part: RankPart) -> t.Told:
        """A source rank's stream says once more that a reading is over, or says so of the one before it."""
        rank, reading = self.rng.choice(list(part.machine.readings.items()))
        return t.Told(rank, r.Over(reading.opening - (reading.problem is None), _lost()))

    def _lead(self, part: RankPart) -> None:
        """Rank 0 hands its order on, and says which lease it has read. What it has not read it says at the end, too."""
        first: RankPart = part.receive.parts[0]  # type: ignore[assignment]
        if part is first or self.rng.random() > 0.3:
            return
        if first.wanted.epoch and first.wanted.lease:
            self.told(part, t.Led((first.wanted.epoch, first.wanted.lease)))
        elif first.state == "done":
            assert first.read_lease is not None
            self.told(part, t.Led(first.read_lease))
        elif first.over and first.state != "died":
            self.stop(part, PeerFailed("rank_failed", "rank 0 has no lease"))

    def _meet(self, part: RankPart) -> None:
        if not self.calm and self.rng.random() < 0.02:
            self.told(part, t.Failed(PeerFailed("peer_unreachable", "by chance")))
            return
        part.links = {at.index: self._link_to(part.reader, at) for at in self.sources}
        part.lives = {at.index: self.known[part.reader].setdefault(at.index, at.life) for at in self.sources}
        told = {rank: self._announced(part, part.links[rank]) for rank in part.read}
        others = [at.index for at in self.sources if at.index not in told]
        part.grain = self.rng.choice((1, 2))
        self.told(part, t.Met(EPOCH, told, others, part.grain))

    def _link_to(self, reader: ReaderRank, at: SourceRank) -> Link:
        link = reader.links.get(at.index)
        if link is None or link.broken or link.life != at.life:
            link = reader.links[at.index] = Link(next(self.streams), reader, at, at.life)
            at.links[link.number] = link
            link.up.append(e.Connect(link.number, reader.who, announcing=True))
        return link

    @staticmethod
    def _announced(part: RankPart, link: Link) -> Seen | None:
        view = link.announced.get(part.receive.name)
        met = part.lives[link.source.index] == link.life
        if not met or view is None or part.wanted.lease not in (0, view.terms.number):
            return None
        del link.announced[part.receive.name]
        return seen_of(view)

    def _move(self, part: RankPart, do: t.Move) -> None:
        if part.left is None:
            self._check_range(part, do)
            if do.without != part.whole:
                raise Violation("it is read again, or is not", f"{do.without}, {part.whole} is whole")
            part.left = [(rank, at) for rank in self._moving(part, do) for at in range(*do.tokens)]
            part.staging, part.packed, part.failed = {}, set(), {}
        if part.receive.staged:
            self._stage(part, do)
        elif part.left:
            self._read_block(part)
        else:
            counts = self._counts(part, do)
            for rank in counts:
                part.proofs.setdefault(rank, set()).add(False)
            self.told(part, t.Moved(counts))

    @staticmethod
    def _check_range(part: RankPart, do: t.Move) -> None:
        first, last = part.wanted.tokens or (0, BLOCKS)
        if not first <= do.tokens[0] <= do.tokens[1] <= last:
            raise Violation("blocks are written that were not asked for", f"{do.tokens} of {part.wanted.tokens}")
        if not do.states and do.tokens[1] % part.grain:
            raise Violation("a part of a block is moved", f"{do.tokens} by {part.grain}")

    def _counts(self, part: RankPart, do: t.Move) -> dict[int, int]:
        count = do.tokens[1] - do.tokens[0]
        return {rank: count for rank in self._moving(part, do) if rank not in part.failed and count}

    @staticmethod
    def _moving(part: RankPart, do: t.Move) -> list[int]:
        return [rank for rank in part.read if rank not in do.without and rank not in part.nothing]

    def _read_block(self, part: RankPart) -> None:
        """By NIXL, which asks nobody."""
        assert part.left is not None
        rank, at = part.left.pop(self.rng.randrange(len(part.left)))
        source, seen = self.sources[rank], part.machine.readings[rank].seen
        if source.life != part.lives[rank]:
            self.told(part, t.Failed(PeerFailed("transport_failed", "the source is gone")))
            return
        part.bytes[rank, at] = source.memory[int(seen.tables["full"].block_ids[at])]

    def _read_memory(self, at: SourceRank) -> None:
        reading = [
            part
            for part in self._of(self.parts())
            if part.left and not part.receive.staged and isinstance(part.machine.do, t.Move)
        ]
        if reading:
            self._read_block(self.rng.choice(reading))

    def _stage(self, part: RankPart, do: t.Move) -> None:
        going = [rank for rank in self._counts(part, do) if rank not in part.packed]
        confirmed = [why for rank, why in part.failed.items() if not part.machine.readings[rank].announced]
        if confirmed:
            self.told(part, t.Failed(confirmed[0]))
        elif not going:
            counts = self._counts(part, do)
            for rank in counts:
                part.proofs.setdefault(rank, set()).add(True)
            failed = next(iter(part.failed.values()), None)
            if failed is not None:
                part.whole = frozenset(rank for rank in counts if do.states and part.proofs[rank] == {True})
            self.told(part, t.Moved(counts, frozenset(counts), failed))
        else:
            self._stage_of(part, do, self.rng.choice(going))

    def _stage_of(self, part: RankPart, do: t.Move, rank: int) -> None:
        reading, link, staging = part.machine.readings[rank], part.links[rank], part.staging.get(rank)
        if part.lives[rank] != self.sources[rank].life:
            self.told(part, t.Failed(PeerFailed("transport_failed", "the source is gone")))
        elif staging is not None and staging.proven:
            part.bytes |= {(rank, place): tag for place, tag in staging.bytes.items()}
            part.packed.add(rank)
        elif reading.problem is not None and (staging is None or staging.asks or not staging.all_packed):
            part.failed[rank] = reading.problem
        elif staging is not None:
            said = staging.step(self.sources[rank].arena, self.rng, self.now)
            if said is not None and not link.broken:
                link.up.append(said)
        elif reading.due:
            self.told(part, t.Told(rank, r.Due()))
        else:
            part.packings += 1
            places, number = range(*do.tokens), Reading(link.number, part.numbers[rank])
            chunks = tuple(tuple(places[at : at + 2]) for at in range(0, len(places), 2))
            part.staging[rank] = Staging(p.At(number, part.packings), chunks, do.states)
            link.up.append(e.Pack(number, part.packings, len(chunks), do.states, (reading.seen.word, chunks)))

    def _packed(self, part: RankPart, rank: int, sent: Sent) -> None:
        staging, told = part.staging.get(rank), sent.told
        if staging is None or staging.at != told.at:
            return  # of one that was given up
        if told.problem is None:
            self.told(part, t.Told(rank, r.Gathered()))
        staging.hear(sent)
        if told.problem is not None and (staging.asks or not staging.all_packed):
            part.failed[rank] = told.problem

    def _prove(self, part: RankPart, do: t.Prove) -> None:
        """Packed bytes have held until they were read. Nothing else shows that the lease has."""
        if do.words != {rank for rank in part.read if part.proofs.get(rank, {False}) != {True}}:
            raise Violation("another rank's word is looked at than has to be", f"{do.words} by {part.proofs}")
        for rank in do.words:
            at, seen = self.sources[rank], part.machine.readings[rank].seen
            if at.life != part.lives[rank] or seen.word not in at.words:
                self.told(part, t.Failed(Conflict("torn", "it did not hold")))
                return
        self.told(part, t.Proven())

    # ---- streams ----

    def _deliver(self, link: Link, number: int, told: object) -> None:
        if number in link.ended:
            raise Violation("something is told after the end", str(told))
        if isinstance(told, e.Announcement):
            before = link.announced.get(told.view.terms.request_id)
            if before is None or before.terms.number <= told.view.terms.number:
                link.announced[told.view.terms.request_id] = told.view
            return
        found: Any = link.parts.get(number)
        if isinstance(told, e.Problem):
            link.ended.add(number)
        if found is None:
            return
        part, rank, opening = found
        match told:
            case e.Problem(why):
                self.told(part, t.Told(rank, r.Over(opening, why)))
            case e.Update(view):
                if opening == part.machine.readings[rank].opening:
                    part.unpublished.discard(rank)
                self.told(part, t.Told(rank, r.Update(opening, seen_of(view))))
            case e.Unpublished():
                if opening == part.machine.readings[rank].opening:
                    part.unpublished.add(rank)
                self.told(part, t.Told(rank, r.Unpublished(opening)))
            case Sent():
                self._packed(part, rank, told)

    def _break(self, link: Link) -> None:
        link.broken = True
        link.up.clear()
        link.down.clear()
        for found in list(link.parts.values()):
            part, rank, opening = found  # type: ignore[misc]
            self.told(part, t.Told(rank, r.Over(opening, _lost())))
            if isinstance(part.machine.do, t.Prove) or (
                isinstance(part.machine.do, t.Move) and not part.receive.staged
            ):
                self.stop(part, _lost())
        link.parts.clear()

    def _check_told(self, *, at_rest: bool = False) -> None:
        for part in self._of(self.parts()):
            if not isinstance(part.machine.do, t.Listen):
                continue
            for rank in part.machine._awaited:
                at, link, reading = self.sources[rank], part.links[rank], part.machine.readings[rank]
                if link.broken or link.life != at.life:
                    raise Violation("a reader waits on a stream that is over")
                lease = at.source.leases.get(part.receive.name)
                if lease is not None and reading.named in (0, lease.number) and lease.version:
                    if reading.seen.version < lease.version or not lease.more:
                        raise Violation("a reader of what is published waits", f"{reading.seen} of {lease.version}")
                elif Reading(link.number, part.numbers.get(rank, 0)) in at.source.leases._opened:
                    pass  # its announcement is over, and the lease that is there now has not been shown yet
                elif reading.named and reading.named <= at.source.leases.newest(part.receive.name):
                    raise Violation("a reader of what is over waits", f"lease {reading.named}")

    def _step_part(self, links: list[Link]) -> bool:
        if self.unquiet and self.rng.random() < 0.1:
            self._end_late()
            return True
        parts = self._of(self.parts())
        if not parts:
            return bool(self.unquiet)
        part = self.rng.choice(parts)
        before = part.progress()
        self.go_on(part)
        return part.progress() != before

    def _end_late(self) -> None:
        """Reads that were under way are over. An end has come before whatever was told meanwhile."""
        part = self.unquiet.pop(self.rng.randrange(len(self.unquiet)))
        late: list[t.TransferEvent] = [t.Stop(Conflict("aborted", "late"), aborted=True), t.Led((EPOCH, 1))]
        late += [self._stale(part)] if part.machine.readings else []
        if self.rng.random() < 0.8:
            self.told(part, self.rng.choice(late))
        self.told(part, t.Quiet())


def seen_of(view: View) -> Seen:
    said, terms = view.said, view.terms
    return Seen(
        terms.number, view.version, terms.word, terms.word, said.num_tokens, said.more, said.digest, said.weights,
        said.metadata, said.tables,
    )  # fmt: skip


def _lost() -> KvferryError:
    return PeerFailed("peer_lost", "the stream is over")
