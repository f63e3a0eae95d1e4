"""The ranks of one engine and the seed of its roster, drawn from one seed: daemons that start anew, before or after the
seed hears of it; a seed that starts anew, or takes joinings and says nothing; renewals on top of one another.

The machines are those that daemons run. Around them everything takes its step when the seed says so: each joining
calls, is let in, is told, and ends, and a stream that is over is heard of later.

A run has two parts: blows, then none until all has come to rest.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from violation import Violation

from kvferry.errors import KvferryError, PeerFailed
from kvferry.protocol import roster_events as e
from kvferry.protocol.roster import Joinings, Rosters
from kvferry.protocol.session_events import Rank

WITHIN_S, SILENT_S, SLACK_S = 5.0, 10.0, 1e-6
NOTHING = e.Tell((), {})
BLOWS = ("start anew", "start anew", "seed anew", "silence", "silence", "renew", "renew", "drain", "drain", "leave",
         "stranger", "time", "time", "long time")  # fmt: skip


@dataclass(eq=False)
class Stream:
    """One joining's, from its call on. said: as its daemon has said when it called."""

    number: int
    joining: int
    daemon: Daemon
    said: e.Member
    until: float
    joined: bool = False
    broken: bool = False
    """The member hears nothing more; the seed has not heard of that yet."""
    told: e.Members | None = None
    """Under way."""
    heard: bool = False


def _holds(stream: Stream) -> bool:
    """It has told its daemon who is there."""
    return stream.joined and stream.heard


@dataclass(eq=False)
class Daemon:
    """One start of a rank's daemon."""

    rank: Rank
    instance: str
    joinings: Joinings = field(default_factory=lambda: Joinings(WITHIN_S))
    draining: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)
    """By joining."""
    knows: e.Members = field(default_factory=dict)
    unseeded: str = ""
    renewed: list[tuple[float, set[int]]] = field(default_factory=list)
    """When it was to join anew, and the joinings that it had."""

    @property
    def member(self) -> e.Member:
        return e.Member(f"host-{self.rank.rank}", self.draining, "", self.instance)


class World:
    def __init__(self, seed: int, *, told: Callable[[str], None] | None = None) -> None:
        """told: each line of the transcript."""
        self.seed, self.rng, self.now, self.steps = seed, random.Random(seed), 0.0, 0
        self._told = told
        self.size = self.rng.choice((2, 2, 3, 4))
        self.numbers = itertools.count(1)
        self.rosters, self.silent = Rosters(), False
        self.streams: dict[int, Stream] = {}
        self.daemons: dict[int, Daemon] = {}
        self.kept_out: set[int] = set()
        """Ranks by whose numbers strangers have called since they joined."""
        self.ends: Counter[str] = Counter()

    def tell(self, line: str) -> None:
        if self._told is not None:
            self._told(f"{self.steps:5} {self.now:6.1f} s  {line}")

    # ---- the machines ----

    def at_seed(self, said: e.Tell = NOTHING) -> None:
        for number in said.streams:
            self.streams[number].told = said.members
        self.rosters.check()

    def at(self, daemon: Daemon, event: e.MemberEvent) -> None:
        for effect in daemon.joinings.on(event, self.now):
            match effect:
                case e.Begin(joining):
                    self._begin(daemon, joining)
                case e.End(joining):
                    if (stream := daemon.streams.pop(joining, None)) is not None:
                        self._break(stream)
                case e.Know(members):
                    daemon.knows, daemon.unseeded = members, ""
                case e.Alone(why):
                    if any(map(_holds, daemon.streams.values())):
                        raise Violation("a rank that has joined is said to be alone", daemon.instance)
                    daemon.unseeded = why.message
        daemon.joinings.check()

    def _begin(self, daemon: Daemon, joining: int) -> None:
        if joining in daemon.streams:
            raise Violation("a joining has two streams", f"{joining} of {daemon.instance}")
        stream = Stream(next(self.numbers), joining, daemon, daemon.member, self.now + SILENT_S)
        self.streams[stream.number] = daemon.streams[joining] = stream
        self.tell(f"{daemon.instance}: joining {joining} calls")

    def _break(self, stream: Stream) -> None:
        """The member's end is over; the seed hears of it later, if it has heard of the stream at all."""
        stream.broken = True
        if not stream.joined:
            del self.streams[stream.number]

    def _over(self, stream: Stream, why: KvferryError | None) -> None:
        daemon = stream.daemon
        del daemon.streams[stream.joining]
        self.at(daemon, e.Ended(stream.joining, why))
        if why is not None and daemon.unseeded != why.message and not any(map(_holds, daemon.streams.values())):
            raise Violation("a rank that is alone does not say so", daemon.instance)

    # ---- steps ----

    def _step(self, stream: Stream) -> None:
        if stream.broken:
            del self.streams[stream.number]
            self.at_seed(self.rosters.leave(stream.number))
        elif not stream.joined and self.silent:
            if self.now >= stream.until:
                del self.streams[stream.number]
                self._over(stream, PeerFailed("peer_unreachable", "the seed has not answered"))
        elif not stream.joined:
            if (why := self.rosters.refusal(stream.daemon.rank, stream.said.address)) is not None:
                del self.streams[stream.number]
                self.rosters.keep_out("e", stream.daemon.rank.rank, why)
                self.at_seed()
                self._over(stream, why)
                return
            stream.joined = True
            self.kept_out.discard(stream.daemon.rank.rank)
            said = self.rosters.join(stream.number, stream.daemon.rank, stream.said)
            if said.members[stream.daemon.rank.rank] != stream.said:
                raise Violation("the last word of a rank does not hold", f"{stream.said}")
            self.at_seed(said)
            self.tell(f"{stream.daemon.instance}: joining {stream.joining} is let in")
        elif stream.told is not None:
            members, stream.told, stream.heard = stream.told, None, True
            self.at(stream.daemon, e.Told(stream.joining, members))

    def _pending(self) -> list[Stream]:
        def can(stream: Stream) -> bool:
            if stream.broken or stream.told is not None:
                return True
            return not stream.joined and (not self.silent or self.now >= stream.until)

        return [stream for stream in self.streams.values() if can(stream)]

    def _pass(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            alarms = [at for it in self.daemons.values() if (at := it.joinings.next_timer()) is not None]
            if not alarms or min(alarms) > until:
                break
            self.now = max(self.now, min(alarms))
            for daemon in self.daemons.values():
                at = daemon.joinings.next_timer()
                if at is not None and at <= self.now:
                    self.at(daemon, e.Tick())
        self.now = until

    # ---- blows ----

    def _start(self, rank: int, epoch: str = "1") -> None:
        daemon = Daemon(Rank("e", epoch, rank, self.size), f"{rank}.{next(self.numbers)}")
        self.daemons[rank] = daemon
        self.at(daemon, e.Renew())

    def _leave(self, daemon: Daemon) -> None:
        for stream in daemon.streams.values():
            self._break(stream)
        del self.daemons[daemon.rank.rank]

    def _renew(self, daemon: Daemon) -> None:
        members = set(self._members())
        daemon.renewed.append((self.now, set(daemon.streams)))
        self.at(daemon, e.Renew())
        if members - set(self._members()):
            raise Violation("a renewal takes a rank away", daemon.instance)

    def _members(self) -> e.Members:
        """Ranks with an open stream."""
        told = [stream for stream in self.streams.values() if stream.joined and not stream.broken]
        return {stream.daemon.rank.rank: stream.said for stream in told}

    def _blow(self) -> None:
        blow = self.rng.choice(BLOWS)
        there = list(self.daemons.values())
        daemon = self.rng.choice(there) if there else None
        self.tell(f"* {blow} {daemon.instance if daemon else ''}")
        if blow == "seed anew":
            self.rosters = Rosters()
            for stream in list(self.streams.values()):
                del self.streams[stream.number]
                if not stream.broken:
                    self._over(stream, None if stream.joined else PeerFailed("peer_lost", "the seed has gone"))
        elif blow == "silence":
            self.silent = not self.silent
        elif blow == "stranger":
            rank = Rank("e", "1", self.rng.randrange(self.size + 1), self.size)
            if (why := self.rosters.refusal(rank, "elsewhere")) is not None:
                self.rosters.keep_out("e", rank.rank, why)
                self.at_seed()
                self.kept_out.add(rank.rank)
            elif rank.rank in self._members() or rank.rank == self.size:
                raise Violation("a stranger may join", f"{rank}")
        elif blow == "time":
            self._pass(self.rng.uniform(0.0, 1.0))
        elif blow == "long time":
            self._pass(self.rng.uniform(0.0, 3 * WITHIN_S))
        elif daemon is None:
            self._start(self.rng.randrange(self.size))
        elif blow == "start anew":
            self._leave(daemon)
            self._start(daemon.rank.rank)
        elif blow == "leave":
            self._leave(daemon)
        elif blow == "drain":
            daemon.draining = not daemon.draining
            self._renew(daemon)
        elif blow == "renew":
            self._renew(daemon)

    # ---- what must hold ----

    def _check(self) -> None:
        for daemon in self.daemons.values():
            for since, before in daemon.renewed:
                if self.now > since + WITHIN_S + SLACK_S and before & set(daemon.streams):
                    raise Violation("a joining outlives its renewal", f"{daemon.instance}: {before}")
            if len(daemon.streams) > daemon.joinings.sizes()["joinings"]:
                raise Violation("a stream has no joining", daemon.instance)
        if self.rosters.sizes()["streams"] != sum(stream.joined for stream in self.streams.values()):
            raise Violation("the seed counts other streams than there are", f"{self.rosters.sizes()}")

    def _rest(self) -> None:
        everyone = {rank: daemon.member for rank, daemon in self.daemons.items()}
        for rank, daemon in self.daemons.items():
            if dict(daemon.knows) != everyone:
                raise Violation("a rank does not know who is there", f"{rank} knows {daemon.knows}, not {everyone}")
            if daemon.unseeded:
                raise Violation("a rank that has joined is said to be alone", daemon.instance)
            sizes = daemon.joinings.sizes()
            if (len(daemon.streams), sizes["joinings"]) != (1, 1):
                raise Violation("more than the last joining is left", f"{daemon.instance}: {daemon.streams}, {sizes}")
            if rank not in self.kept_out and "not let in" in self.rosters.why_missing("e", "1", rank):
                raise Violation("a rank that has joined was not let in", f"{rank}")
        if not self.daemons and any(self.rosters.sizes()[name] for name in ("rosters", "streams")):
            raise Violation("a roster outlives its ranks", f"{self.rosters.sizes()}")

    def run(self) -> None:
        for rank in self.rng.sample(range(self.size), self.size):
            self._start(rank)
        for _ in range(self.rng.randrange(50, 400)):
            self.steps += 1
            pending = self._pending()
            if pending and self.rng.random() < 0.8:
                self._step(self.rng.choice(pending))
            else:
                self._blow()
            self._check()
        self.silent = False
        self.tell("all goes well from here on")
        for rank in range(self.size):
            if rank not in self.daemons and self.rng.random() < 0.7:
                self._start(rank)
        quiet = 0
        for _ in range(5_000):
            self.steps += 1
            if pending := self._pending():
                quiet = 0
                self._step(self.rng.choice(pending))
            elif quiet == 3:
                break
            else:
                quiet += 1
                self._pass(WITHIN_S)
            self._check()
        else:
            raise Violation("it never comes to rest")
        self._rest()
        self.ends["done"] += 1
