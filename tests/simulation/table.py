"""The table of machine state x event: how often each event meets each state of what it is about.

Words come from other processes, whenever they say them. Answers come of what a machine has asked its shell, and names
are given once: where no run brings one of those to a state, it must raise there.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from kvferry.errors import KvferryError
from kvferry.protocol import book_events as be
from kvferry.protocol import events as e
from kvferry.protocol import keeper_events as ke
from kvferry.protocol import leader_events as le
from kvferry.protocol import packing_events as pk
from kvferry.protocol import peers_events as pe
from kvferry.protocol import reading as rd
from kvferry.protocol import requests_events as re
from kvferry.protocol import roster_events as ro
from kvferry.protocol import session_events as se
from kvferry.protocol import transfer_events as t
from kvferry.protocol.book import Book
from kvferry.protocol.keeper import Keeper
from kvferry.protocol.leader import Leader
from kvferry.protocol.packing import Packing
from kvferry.protocol.peers import Peers
from kvferry.protocol.reading import Following
from kvferry.protocol.requests import Requests
from kvferry.protocol.roster import Joinings
from kvferry.protocol.sessions import Sessions
from kvferry.protocol.source import Source
from kvferry.protocol.transfer import Progress

Pair = tuple[str, str, str]
"""The thing that an event is about, its state, and the event's kind."""
UNBEGUN = "not begun"
"""In this state a machine waits for one event, and no other comes."""
OFTEN = 1_000
TRIES = 3
"""Machines on which a pair is tried that no run brings about."""


# ---- states, by a machine and an event ----


def _attempt(it: Progress, _: object) -> str:
    return it.state.value if it.state.ended else f"{it.state.value}, {type(it.do).__name__}"


def _followed(it: Following, _: object) -> str:
    how = "over" if it.problem else "seen" if it.seen.lease else "asked" if it.opening else "new"
    return f"{how}, announced" if it.announced else how


def _packing(it: Packing, _: object) -> str:
    return it._stage


def _stream(it: Source, event: Any) -> str:
    return "open" if event.stream in it.streams else "none"


def _opened(it: Source, event: Any) -> str:
    stream = it.streams.get(event.reading.stream)
    opened = stream._opened.get(event.reading.number) if stream is not None else None
    if opened is None:
        return "none" if stream is not None else "no stream"
    return "over" if opened.problem or opened.over else "shown" if opened.view else "asked"


def _lease(it: Source, event: Any) -> str:
    state = it.leases.state_of(event.terms.request_id if isinstance(event, e.Publish) else event.request_id)
    return "none" if state is None else state.value


def _part(it: Requests, event: Any) -> str:
    if event.part not in it.parts:
        return "none"
    part = it.parts[event.part]
    how = "ended" if part.ended else "stopped" if part.stopped else "reserved" if part.reserved else "waits"
    return ", ".join([how, *(["over"] if part.over else []), *(["quiet"] if part.quiet else [])])


def _request(it: Requests, event: Any) -> str:
    found = [part for part in it.parts.of_request(event.at.key(event.request_id)) if not part.ended]
    return "none" if not found else "reserved" if any(part.reserved for part in found) else "waits"


def _led(it: Leader, event: Any) -> str:
    led = it._led.get(event.part)
    how = "none" if led is None else "asked" if led.asked else "gathers"
    return f"{how}, given up" if led is not None and led.given_up else how


def _rank(it: Leader, event: Any) -> str:
    led = it._led.get(event.part)
    known = led.ranks.get(event.rank) if led is not None and led.asked else None
    return _led(it, event) if known is None else "over" if known.over else "lost" if known.lost else "followed"


def _tell(it: Leader, event: Any) -> str:
    return "told" if event.tell in it._tells else "none"


def _session(it: Sessions, event: Any) -> str:
    session = it.sessions.get(event.session)
    waits = "attaches" if event.session in it._attaching else "none"
    return waits if session is None else session.state.value


def _daemon(it: Keeper, event: Any) -> str:
    daemon = it.daemons.get(event.daemon)
    turn = ", its turn" if event.daemon == it.current else ""
    return "the end" if it.ended else "none" if daemon is None else daemon.state.value + turn


def _keeper(it: Keeper, _: object) -> str:
    current = it.daemons.get(it.current)
    state = "nobody" if current is None else current.state.value
    return "the end" if it.ended else UNBEGUN if not it.started else f"{state}, to stop" if it.wishes.stop else state


def _call(it: Book, event: Any) -> str:
    call = it._calls.get(event.call)
    return "none" if call is None else "told" if call.told else "waits" if call in it._waiting else "sent"


def _book(it: Book, _: object) -> str:
    return "over" if it._over else "lost" if it.ended else "registering" if it._registering else "open"


def _command(it: Book, event: Any) -> str:
    return "settles" if event.id in it._settling else "sent" if event.id in it._sent else "none"


def _handshake(it: Peers, event: Any) -> str:
    return "asked" if it._askings.get(event.number) is not None else "none"


def _peer(it: Peers, event: Any) -> str:
    peer = it._loaded.get(event.number)
    return "none" if peer is None else "stale" if peer.stale else "lost" if peer.lost else "known"


def _engine(it: Peers, event: Any) -> str:
    known = it.known(event.engine_id)
    owned = "owned" if event.engine_id in it._homes else "none"
    return "shut" if it.over is not None else owned if known is None else "lost" if known.lost else "known"


def _joining(it: Joinings, event: Any) -> str:
    joining = it._joinings.get(event.joining)
    return "none" if joining is None else "holds" if joining.holds else "begun"


@dataclass(frozen=True)
class Row:
    """about: what the events of it are about, which these fields of theirs name."""

    about: str
    machine: type
    state: Callable[[Any, Any], str]
    words: tuple[type, ...] = ()
    answers: tuple[type, ...] = ()
    names: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """States in which an answer comes alone where a step of the shell's has failed: it is taken, and `check` may not
    hold."""

    def must_raise(self, state: str, kind: type) -> bool:
        """The pair is impossible, unless a run brings it about."""
        return (kind in self.answers and state not in self.failed) or state == UNBEGUN

    @property
    def events(self) -> tuple[type, ...]:
        return self.words + self.answers


ROWS = (
    Row("attempt", Progress, _attempt, (t.Told, t.Led, t.Stop),
        (t.Match, t.Met, t.Moved, t.Drained, t.Proven, t.Compared, t.Failed, t.Quiet)),
    Row("reading", Following, _followed, (rd.Due, rd.Update, rd.Unpublished, rd.Over, rd.Gathered)),
    Row("packing", Packing, _packing, (pk.Want, pk.Idle), (pk.WasCut, pk.Gathered)),
    Row("stream", Source, _stream, (), (e.Connect, e.Disconnect), ("stream",)),
    Row("opened lease", Source, _opened, (e.Ask, e.Pack, e.Leave), (), ("reading",)),
    Row("lease", Source, _lease, (e.Publish, e.FenceOver, e.Refuse, e.Revoke, e.GiveUp), (), ("request_id",)),
    Row("part", Requests, _part, (re.AbortPart,), (re.Ended, re.Over, re.Quiet), ("part",),
        ("waits", "reserved", "stopped")),
    Row("request", Requests, _request,
        (re.Ordered, re.Reserved, re.Handed, re.Unfit, re.EndedElsewhere, re.Abort), (), ("at", "request_id")),
    Row("led order", Leader, _led, (le.GaveUp,), (le.Lead, le.Whole, le.Incomplete), ("part",)),
    Row("led rank", Leader, _rank, (), (le.Heard, le.Unheard, le.Again), ("part", "rank")),
    Row("told end", Leader, _tell, (), (le.Told,), ("tell",)),
    Row("session", Sessions, _session,
        (se.GiveUp, se.Introduced, se.Allocated, se.RegistrationBegun, se.RegistrationOver, se.StreamEnded, se.Died,
         se.Leave, se.Withdraw, se.LeasesOver, se.StepOver), (se.Attach,), ("session",)),
    Row("daemon", Keeper, _daemon, (ke.Loaded, ke.Serves, ke.Died), (ke.NotStarted,), ("daemon",)),
    Row("keeper", Keeper, _keeper, (ke.Upgrade, ke.Stop, ke.Tick), (ke.Begin,)),
    Row("call", Book, _call, (be.Leave,), get_args(be.Said), ("call",)),
    Row("command", Book, _command, (be.Answered,), (), ("id",)),
    Row("book", Book, _book, (be.Register, be.Registered, be.LeaseOver, be.TransferOver, be.BlocksSafe),
        (be.SessionLost, be.SessionOver)),
    Row("handshake", Peers, _handshake, (pe.Met, pe.Unmet), (), ("number",)),
    Row("peer", Peers, _peer, (pe.Leave, pe.Forget, pe.Lost, pe.Renew), (pe.Use,), ("number",)),
    Row("engine", Peers, _engine, (pe.Get, pe.Unbind, pe.Over, pe.Named), (), ("engine_id",)),
    Row("joining", Joinings, _joining, (), (ro.Told, ro.Ended), ("joining",)),
)  # fmt: skip


@dataclass
class Tried:
    """Pairs that no run brings about, tried on copies of machines in such states. hit: the others."""

    hit: Counter[Pair]
    tried: Counter[Pair] = field(default_factory=Counter)
    raised: dict[Pair, str] = field(default_factory=dict)
    last: dict[type, Any] = field(default_factory=dict)
    """The last event of each kind."""
    trying: bool = False
    """Not while the runs say which events there are."""

    def all(self, row: Row, machine: Any, like: Any, now: tuple[float, ...]) -> None:
        """Each event of the row, about what this one is about."""
        for kind in row.events:
            if kind not in self.last:
                continue
            event = _named(self.last[kind], like, row.names)
            pair = row.about, row.state(machine, event), kind.__name__
            if not self.hit[pair] and self.tried[pair] < TRIES:
                checked = kind in row.words or not (row.must_raise(pair[1], kind) or pair[1] in row.failed)
                self._one(pair, *copy.deepcopy((machine, event)), now, checked=checked)

    def _one(self, pair: Pair, machine: Any, event: Any, now: tuple[float, ...], *, checked: bool) -> None:
        self.tried[pair] += 1
        try:
            ON[type(machine)](machine, event, *now)
            if checked:
                machine.check()
        except KvferryError:
            pass  # so it is refused
        except Exception as error:  # noqa: BLE001
            self.raised[pair] = repr(error)


def _named(event: Any, like: Any, names: tuple[str, ...]) -> Any:
    """This event, about what the other is about."""
    about = {name: getattr(like, name) for name in names if hasattr(like, name) and hasattr(event, name)}
    return event._replace(**about) if hasattr(event, "_replace") else replace(event, **about)


ON: dict[type, Any] = {row.machine: row.machine.on for row in ROWS}  # type: ignore[attr-defined]


@contextmanager
def watched(pairs: Counter[Pair], tried: Tried | None = None) -> Iterator[None]:
    """Count the pairs of all machines."""
    for machine, on in ON.items():
        machine.on = _watched(on, _by_kind(machine), pairs, tried)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for machine, on in ON.items():
            machine.on = on  # type: ignore[attr-defined]


def _by_kind(machine: type) -> dict[type, Row]:
    return {kind: row for row in ROWS if row.machine is machine for kind in row.events}


def _watched(on: Any, rows: dict[type, Row], pairs: Counter[Pair], tried: Tried | None) -> Any:
    def watch(machine: Any, event: Any, *now: float) -> Any:
        row = rows.get(type(event))
        if row is None:
            return on(machine, event, *now)
        pairs[row.about, row.state(machine, event), type(event).__name__] += 1
        if tried is not None:
            tried.last[type(event)] = event
        if tried is None or not tried.trying:
            return on(machine, event, *now)
        tried.all(row, machine, event, now)
        effects = on(machine, event, *now)
        tried.all(row, machine, event, now)
        return effects

    return watch


def rarest(pairs: Counter[Pair]) -> str:
    """How many pairs came about OFTEN, and the others."""
    rare = sorted((count, pair) for pair, count in pairs.items() if count < OFTEN)
    lines = [f"{len(pairs) - len(rare)} of {len(pairs)} pairs came about {OFTEN:,} times or more"]
    return "\n".join(lines + [f"{count:>6}  {', '.join(pair)}" for count, pair in rare])


def printed(pairs: Counter[Pair]) -> str:
    """A table for each kind of thing: its states, and how often each event has met them."""
    lines: list[str] = []
    for row in ROWS:
        states = sorted({state for about, state, _ in pairs if about == row.about})
        if states:
            width = max(map(len, states)) + 2
            names = [kind.__name__ for kind in row.events]
            lines.append(f"{row.about:<{width}}" + "".join(f"{name:>{len(name) + 2}}" for name in names))
            lines += [
                f"{state:<{width}}"
                + "".join(f"{pairs[row.about, state, name] or '-':>{len(name) + 2}}" for name in names)
                for state in states
            ]
    return "\n".join(lines)
