"""One whole request by the machines that daemons run: two ranks of engine d read one lease of engine p.

Messages arrive in the order in which they were sent, and every shell does at once what its machine says. The plan and
the bytes are real. docs/architecture.md shows the transcript: `python tests/simulation/whole_request.py` writes it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from reading_world import seen_of
from requests_world import Order
from staged_world import Event, fed, stand

from kvferry.manifest import Manifest
from kvferry.protocol import events as e
from kvferry.protocol import leader_events as le
from kvferry.protocol import reading as r
from kvferry.protocol import requests_events as q
from kvferry.protocol import transfer_events as t
from kvferry.protocol.attempts import Attempt, Limits, ReadingRank
from kvferry.protocol.leader import Leader
from kvferry.protocol.requests import Requests
from kvferry.protocol.source import Source
from kvferry.protocol.transfer import Progress
from kvferry.protocol.values import Publication, ReaderId, Reading, Terms
from kvferry.tables import BlockTable
from kvferryd.plan import bind, plan

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SHOWN = re.compile(r"(?<=<!-- whole request -->\n```\n).*?(?=```\n)", re.DOTALL)
HEADS, BLOCKS, SLOTS, DIM, TOKENS, FENCE, WORD = 2, 8, 4, 8, 10, 7, 0xC0FFEE
LEASE, PUBLISHED, WANTED = 1, (5, 2, 6), ((1, 2, 3), (3, 1, 2))
"""Blocks of engine p, and of each rank of engine d."""
UNTOLD = (q.Appeared, q.OneFewer)
"""Effects that only wake those who wait."""


@dataclass
class Rank:
    """One rank of engine d, as its shell has it."""

    rank: int
    requests: Requests
    memory: np.ndarray[Any, Any]
    progress: Progress = field(default_factory=Progress)
    halves: set[str] = field(default_factory=set)
    """Order and reservation, as they come."""
    part: int = 0

    @property
    def at(self) -> ReadingRank:
        return ReadingRank("d", "1", self.rank, 1)

    @property
    def reading(self) -> Reading:
        return Reading(self.rank + 1, 1)


class WholeRequest:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.source, self.leader = Source(8), Leader()
        self.manifest = _manifest("p", 0, HEADS)
        self.memory = np.random.default_rng(1).integers(0, 255, self.manifest.regions[0].nbytes, np.uint8)
        self.ranks = [
            Rank(rank, Requests(f"d/{rank}", Limits(8, 8)), np.zeros(self.memory.nbytes // HEADS, np.uint8))
            for rank in range(HEADS)
        ]
        self.words: set[int] = set()
        """Of leases that hold."""
        self._sent: deque[Callable[[], None]] = deque()

    def run(self) -> str:
        """The transcript. Raises AssertionError where the request is not done, or bytes are wrong."""
        self._order()
        for rank in self.ranks:
            self._reserve(rank)
        self._publish()
        self._deliver()
        self._serve(e.FenceOver("r", FENCE))
        self._deliver()
        assert not any(self.source.sizes()[kept] for kept in ("live", "opened")) and not self.leader.sizes()["led"]
        for rank in self.ranks:
            assert rank.progress.state.value == "done" and not rank.requests.left
        self._check_bytes()
        return "".join(f"{line.rstrip()}\n" for line in self.lines)

    def _deliver(self) -> None:
        while self._sent:
            self._sent.popleft()()

    def _tell(self, place: str, machine: str, event: str, effects: Iterable[str] = ()) -> None:
        said = ", ".join(effects)
        self.lines.append(f"{place:4}{machine:10}{event:40}{'-> ' + said if said else ''}")

    # ---- engines and router ----

    def _order(self) -> None:
        first = self.ranks[0]
        self._ask(first, q.Ordered(first.at, "r", Order()), "Ordered r")

    def _reserve(self, rank: Rank) -> None:
        blocks = WANTED[rank.rank]
        reservation = q.Reservation(blocks, {"full": BlockTable.of(blocks).block_ids})
        shown = f"Reserved r, attempt 1, blocks {', '.join(map(str, blocks))}"
        self._ask(rank, q.Reserved(rank.at, "r", Attempt(1), reservation), shown)

    def _publish(self) -> None:
        said = Publication({"full": BlockTable.of(PUBLISHED)}, TOKENS, b"", more=False)
        self._serve(e.Publish(Terms("r", LEASE, WORD, 30.0, readers=1), said, FENCE))

    # ---- rank 0 and the others ----

    def _ask(self, rank: Rank, event: q.Event, shown: str) -> None:
        effects = rank.requests.on(event)
        self._tell(
            f"d/{rank.rank}", "Requests", shown, [_words(each) for each in effects if not isinstance(each, UNTOLD)]
        )
        rank.requests.check()
        for effect in effects:
            match effect:
                case q.Begin(part):
                    rank.part = part
                case q.TakeOrder():
                    self._half(rank, "order")
                case q.TakeReservation():
                    self._half(rank, "reservation")
                case q.HandOn(part):
                    self._lead(le.Lead(part, rank.at, "r", Attempt(1), (1,), 30.0), "Lead r, attempt 1, rank 1")

    def _half(self, rank: Rank, half: str) -> None:
        rank.halves.add(half)
        if len(rank.halves) == 2:
            wanted = t.Wanted("r", rank.rank)
            self._sent.append(lambda: self._go_on(rank, t.Match(wanted), "Match: order and reservation"))

    def _lead(self, event: le.Event, shown: str) -> None:
        effects = self.leader.on(event, 0.0)
        self._tell("d/0", "Leader", shown, map(_words, effects))
        self.leader.check()
        first, other = self.ranks
        for effect in effects:
            match effect:
                case le.Gather(part):
                    self._sent.append(lambda: self._lead(le.Whole(part, {1: "d/1"}), "Whole"))
                case le.Ask():
                    handed = q.Handed(other.at, "r", Attempt(1), Order(leader="d/0"))
                    self._sent.append(partial(self._ask, other, handed, "Handed r, attempt 1"))
                case le.Finished(part):
                    self._sent.append(lambda: self._ask(first, q.Over(part), "Over"))

    # ---- a rank reads ----

    def _go_on(self, rank: Rank, event: t.TransferEvent, shown: str) -> None:
        before = rank.progress.do
        effects = rank.progress.on(event, 0.0)
        do = [] if rank.progress.do == before else [f"do {_words(rank.progress.do)}"]
        said = [f"p/{each.rank}: {_words(each.effect)}" for each in effects if isinstance(each, t.Say)]
        self._tell(f"d/{rank.rank}", "Progress", shown, said + do)
        rank.progress.check()
        for effect in effects:
            match effect:
                case t.Say(_, r.Open(_, lease)):
                    self._sent.append(lambda: self._serve(e.Ask(rank.reading, "r", lease, 1)))
                case t.Say(_, r.Close(_, lease, complete, nbytes)):
                    self._sent.append(lambda: self._serve(e.Leave(rank.reading, "r", lease, complete, nbytes, 1)))
        if do:
            self._sent.append(lambda: self._do(rank))

    def _do(self, rank: Rank) -> None:
        match rank.progress.do:
            case t.Meet():
                who = ReaderId("d", "1", rank.rank, HEADS)
                self._serve(e.Connect(rank.reading.stream, who), silent=True)
                self._go_on(rank, t.Met("1", {0: None}), "Met p/0")
            case t.Move(tokens):
                self._go_on(rank, t.Moved({0: self._read(rank, tokens)}), "Moved")
            case t.Prove():
                assert rank.progress.readings[0].seen.word in self.words
                self._go_on(rank, t.Proven(), "Proven: the word is whole")
            case t.Finish(_, lease):
                assert lease is not None
                self._end(rank, lease)

    def _read(self, rank: Rank, tokens: tuple[int, int]) -> int:
        planned = plan([self.manifest], _manifest("d", rank.rank, 1))
        tables = {"full": BlockTable.of(WANTED[rank.rank])}
        bound = bind(planned, {0: rank.progress.readings[0].seen.tables}, tables, tokens)
        for runs in bound.runs():
            for source, to, nbytes in zip(runs.source_offsets, runs.destination_offsets, runs.nbytes, strict=True):
                rank.memory[to : to + nbytes] = self.memory[source : source + nbytes]
        self._tell(
            f"d/{rank.rank}",
            "shell",
            f"plan, bind, read: head {rank.rank} of p/0",
            [f"{bound.run_count} runs, {bound.nbytes} bytes"],
        )
        return bound.nbytes

    def _end(self, rank: Rank, lease: t.LeaseId) -> None:
        self._ask(rank, q.Ended(rank.part), "Ended, done")
        self._go_on(rank, t.Quiet(), "Quiet")
        self._ask(rank, q.Quiet(rank.part), "Quiet")
        if rank.rank:
            self._ask(rank, q.Over(rank.part), "Over")
            self._sent.append(lambda: self._lead(le.Heard(self.ranks[0].part, 1, done=True), "Heard: rank 1 is done"))
        else:
            self._sent.append(lambda: self._go_on(self.ranks[1], t.Led(lease), f"Led: rank 0 read lease {lease[1]}"))

    # ---- the source ----

    def _serve(self, event: Event, *, silent: bool = False) -> None:
        effects = fed(self.source, event, 0.0)
        self.source.check()
        if not silent:
            self._tell("p/0", "Leases", _words(event), map(_words, effects))
        for effect in effects:
            match effect:
                case e.HoldWord() | e.ClearWord():
                    stand(self.words, effect)
                case e.Speak(reading):
                    self._sent.append(partial(self._hear, reading))

    def _hear(self, reading: Reading) -> None:
        rank = self.ranks[reading.stream - 1]
        while (told := self.source.take(reading)) is not None:
            if isinstance(told, e.Unpublished):
                self._go_on(rank, t.Told(0, r.Unpublished(1)), "Told by p/0: nothing to read yet")
                continue
            assert isinstance(told, e.Update)
            terms, said = told.view.terms, told.view.said
            shown = f"Told by p/0: lease {terms.number}, {said.num_tokens} tokens"
            self._go_on(rank, t.Told(0, r.Update(1, seen_of(told.view))), shown)

    def _check_bytes(self) -> None:
        cached = self.memory.reshape(BLOCKS, SLOTS, HEADS, DIM)
        for rank in self.ranks:
            own = rank.memory.reshape(BLOCKS, SLOTS, DIM)
            for token in range(TOKENS):
                at, slot = divmod(token, SLOTS)
                assert (own[WANTED[rank.rank][at], slot] == cached[PUBLISHED[at], slot, rank.rank]).all()


def _words(each: object) -> str:
    """The name, and what a reader of the transcript needs of the rest."""
    name = type(each).__name__
    match each:
        case e.Publish(terms, said, fence):
            return f"{name} r, lease {terms.number}, {said.num_tokens} tokens, fence {fence}"
        case e.FenceOver():
            return f"{name} {each.fence}"
        case e.Ask(reading):
            return f"{name} r, by d/{reading.stream - 1}"
        case e.Leave(reading):
            return f"{name}, by d/{reading.stream - 1}, complete"
        case e.Served(_, nbytes):
            return f"{name} {nbytes} bytes"
        case e.Speak(reading):
            return f"{name} to d/{reading.stream - 1}"
        case e.LeaseEnded(account):
            return f"{name}: {account.state.value}"
        case le.Ask():
            return f"{name} rank {each.rank}"
        case t.Move(tokens):
            return f"{name} tokens {tokens[0]} to {tokens[1]}"
        case t.Prove():
            return f"{name} p/0"
        case t.Finish(state):
            return f"{name}: {state.value}"
        case r.Open():
            return f"{name} r"
        case r.Close(_, lease, complete):
            return f"{name} lease {lease}{', complete' if complete else ''}"
        case _:
            return name


def _manifest(engine: str, rank: int, heads: int) -> Manifest:
    extents = {"block": BLOCKS, "slot": SLOTS, "head": heads, "dim": DIM}
    nbytes, axes = 1, []
    for name, extent in reversed(extents.items()):
        axes.append({"name": name, "extent": extent, "stride": nbytes})
        nbytes *= extent
    component = {
        "group": "full", "layer": 0, "name": "k", "dtype": "uint8", "region": 0, "offset": 0, "axes": axes[::-1],
        "encoding": "fp8_e4m3fn", "shard": {"axis": "head", "start": rank * heads, "total": HEADS},
    }  # fmt: skip
    group = {"name": "full", "kind": "paged", "block_size": SLOTS, "num_blocks": BLOCKS}
    return Manifest.from_dict({
        "engine_id": engine, "epoch": "1", "model": {"name": "m", "fingerprint": "f"}, "rank": rank,
        "world_size": HEADS // heads, "regions": [{"id": 0, "kind": "host", "nbytes": nbytes}], "groups": [group],
        "components": [component],
    })  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(SHOWN.sub(lambda _: WholeRequest().run(), PAGE.read_text()))
