"""An attempt of one rank of the engine that reads, from its rendezvous to the verdict.

`do` says what is to be done now. The shell does it, tells how it went, and finds the next; readings are heard
meanwhile.
`Finish` is all that makes an attempt done, and only `_verdict` makes that.

    Listen (until order and reservation match) -> Meet
        -> Listen (until every source rank has told of the lease; those behind are asked for the newest)
        -> Move, Listen, Move ... (tokens as they are published) -> Prove
        -> Listen (until rank 0 says which lease it has read) -> Compare -> Finish
    what fails while it goes by an announcement, once:  -> Drain -> Listen ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from kvferry.errors import KvferryError
from kvferry.protocol import reading as r
from kvferry.protocol import transfer_events as t
from kvferry.protocol.one_lease import check_first, check_one_prompt, check_ordered, check_published
from kvferry.protocol.reading import Following
from kvferry.protocol.states import TransferState, moved
from kvferry.protocol.values import Sizes

Effects = list[t.TransferEffect]
ANSWERS: dict[type, type | tuple[type, ...]] = {
    t.Met: t.Meet, t.Moved: t.Move, t.Drained: t.Drain, t.Proven: t.Prove, t.Compared: t.Compare,
    t.Failed: (t.Meet, t.Move, t.Prove, t.Compare), t.Quiet: t.Finish,
}  # fmt: skip
"""The shell's answers, and the step that each of them ends."""


class Progress:
    """How one rank's part of an attempt goes."""

    def __init__(self) -> None:
        self.wanted: t.Wanted | None = None
        """None until the two halves match."""
        self.state = TransferState.WAITING
        self.do: t.Do = t.Listen()
        self.readings: dict[int, Following] = {}
        """Source ranks that are read."""
        self.lease: t.LeaseId | None = None
        """The one that is read, once it is known."""
        self.announced = False
        """Its pass began by what sources had announced, without waiting for them."""
        self._peer: t.Met | None = None
        self._met = 0
        """How often hands were shaken."""
        self._opened = False
        """Every source rank has told of its lease."""
        self._first: t.LeaseId | None = None
        """The lease that rank 0 has read, once it says so."""
        self._awaited: set[int] = set()
        """Source ranks of which an update is awaited."""
        self._whole: dict[int, int] = {}
        """Bytes of each source rank that was read to its end, and proven by that."""
        self._pass = r.Pass(0, 0)

    # ---- events ----

    def on(self, event: t.TransferEvent, now: float) -> Effects:
        asked = ANSWERS.get(type(event))
        assert asked is None or isinstance(self.do, asked), f"{type(event).__name__} answers nothing: {self.do}"
        assert not isinstance(event, t.Match) or self.state is TransferState.WAITING, "it has matched, or ended"
        if isinstance(event, t.Quiet):
            effects = self._leave(now) if self.state is TransferState.DONE else []
            self.readings = {}
            return effects
        if self.state.ended:
            return []
        try:
            match event:
                case t.Match(wanted):
                    self.wanted, self.do = wanted, t.Meet()
                    self._move(TransferState.CONNECTING)
                case t.Told(rank, told):
                    if rank not in self.readings:
                        return []
                    effects = self._say(rank, told, now)
                    listens = isinstance(self.do, t.Listen) and self.state is not TransferState.VERIFYING
                    return effects + (self._look(now) if listens else [])
                case t.Led(first):
                    self._first = first
                    return self._proven(now) if self.awaits_first else []
                case t.Stop(why, aborted):
                    return self._finish(why, now, aborted=aborted)
                case t.Failed(why):
                    raise why
                case t.Met():
                    return self._meet(event, now)
                case t.Drained():
                    self._awaited = {rank for rank, each in self.readings.items() if each.announced}
                    return self._say_all(self._awaited, r.AskAgain(), now) + self._look(now)
                case t.Moved():
                    return self._moved(event, now)
                case t.Proven():
                    return self._proven(now)
                case t.Compared():
                    self.do = self._verdict()
                case _:
                    assert_never(event)
        except KvferryError as why:
            return self._fail(why, now)
        return []

    @property
    def nbytes(self) -> int:
        read = self._pass.read
        return sum(read.values()) + sum(nbytes for rank, nbytes in self._whole.items() if rank not in read)

    @property
    def metadata(self) -> bytes:
        """The metadata of the lease, while it is read."""
        return next((each.seen.metadata for each in self.readings.values() if each.seen.metadata), b"")

    @property
    def tokens(self) -> t.Range | None:
        """The tokens that were read, once it is done."""
        return self.do.tokens if isinstance(self.do, t.Finish) else None

    @property
    def past(self) -> t.Past:
        return t.Past(self.lease, self.nbytes, self.tokens, self.announced)

    @property
    def awaits_publish(self) -> bool:
        """The source has nothing, or nothing more, to read."""
        reading = self.state is TransferState.READING
        listens = isinstance(self.do, t.Listen)
        return listens and (reading or any(self.readings[rank].awaits_publish for rank in self._awaited))

    def _move(self, to: TransferState) -> None:
        self.state = moved(self.state, to)

    def _say(self, rank: int, event: r.ReadingEvent, now: float) -> Effects:
        return [t.Say(rank, effect) for effect in self.readings[rank].on(event, now)]

    def _say_all(self, ranks: Iterable[int], event: r.ReadingEvent, now: float) -> Effects:
        return [effect for rank in sorted(ranks) for effect in self._say(rank, event, now)]

    # ---- one lease ----

    @property
    def _wanted(self) -> t.Wanted:
        assert self.wanted is not None
        return self.wanted

    def _meet(self, met: t.Met, now: float) -> Effects:
        wanted = self._wanted
        self._peer, self._met = replace(met, read={}), self._met + 1
        self.readings = {rank: Following(rank, wanted.request_id, wanted.lease, wanted.computed) for rank in met.read}
        said = [effect for rank, announced in met.read.items() for effect in self._say(rank, r.Begin(announced), now)]
        self._awaited = {rank for rank, each in self.readings.items() if not each.announced}
        return said + self._look(now)

    def _look(self, now: float) -> Effects:
        """Whether all that is awaited has come."""
        try:
            self._awaited = {rank for rank in self._awaited if not self.readings[rank].take()}
            if self.state is TransferState.READING:
                self._check_goes_on()
            if self._awaited:
                self.do = t.Listen()
                return []
            return self._go_on(now) if self.state is TransferState.READING else self._agree(now)
        except KvferryError as why:
            return self._fail(why, now)

    def _agree(self, now: float) -> Effects:
        """On the newest lease that any source rank has told of: the engine publishes it on all of them. Ranks that have
        told of an older one are asked for it, and their bytes are dropped."""
        self._opened = True
        newest = max(each.seen.lease for each in self.readings.values())
        behind = {rank for rank, each in self.readings.items() if each.seen.lease < newest}
        if behind:
            for rank in behind:
                self._whole.pop(rank, None)
            self._awaited, self.do = behind, t.Listen()
            return self._say_all(behind, r.AskFor(newest), now)
        first = self._wanted.tokens[0] if self._wanted.tokens else 0
        assert self._peer is not None
        lease = self._peer.epoch, newest
        check_ordered(self._wanted, lease)
        self.lease = lease
        self._pass = r.Pass(first, first)
        self.announced = any(each.announced for each in self.readings.values())
        self._move(TransferState.READING)
        check_one_prompt(self.readings)
        self._check_goes_on()
        return self._go_on(now)

    def _check_goes_on(self) -> None:
        """Raises KvferryError where a source rank has ended its reading, or is lost."""
        for each in self.readings.values():
            each.check_goes_on()

    # ---- bytes, and their proof ----

    def _go_on(self, now: float) -> Effects:
        """t.Move what is published by now, or await more."""
        wanted, going, every = self._wanted.tokens, self._pass, self.readings.values()
        published, last = min(each.seen.num_tokens for each in every), not any(each.seen.more for each in every)
        if last:
            check_published(self.readings, wanted)
        until = published if wanted is None else min(wanted[1], published)
        if not last:
            assert self._peer is not None
            until -= until % self._peer.grain
        if last or until > going.at:
            self.do = t.Move((going.at, max(going.at, until)), last, frozenset(self._whole))
            return []
        return self._await_more(now)

    def _await_more(self, now: float) -> Effects:
        """Listen to the ranks that hold the others up. Other ranks can only say that their reading is over."""
        unfinished = {rank: each.seen.num_tokens for rank, each in self.readings.items() if each.seen.more}
        published = min(each.seen.num_tokens for each in self.readings.values())
        self._awaited = {rank for rank, tokens in unfinished.items() if tokens <= published} or set(unfinished)
        return self._look(now)

    def _moved(self, moved: t.Moved, now: float) -> Effects:
        going, move = self._pass, self.do
        assert isinstance(move, t.Move)  # by ANSWERS
        for rank, nbytes in moved.nbytes.items():
            self._say(rank, r.Read(nbytes), now)
        going.read.update(moved.nbytes)
        going.unpacked |= set(moved.nbytes) - moved.packed
        if moved.failed is not None:
            if move.states:
                self._whole |= {rank: going.read[rank] for rank in moved.nbytes if rank not in going.unpacked}
            raise moved.failed
        going.at = move.tokens[1]
        if not move.states:
            return self._await_more(now)
        self._move(TransferState.VERIFYING)
        words = {rank for rank in self.readings if rank in going.unpacked or rank not in going.read}
        self.do = t.Prove(frozenset(words - set(self._whole)))
        return []

    @property
    def _needs_first(self) -> bool:
        """Rank 0 may read another lease. It may not where this rank's own engine names one by epoch and number, as it
        does on every rank."""
        wanted = self._wanted
        return wanted.rank > 0 and self._first is None and not (wanted.epoch and wanted.lease)

    @property
    def awaits_first(self) -> bool:
        """All is proven, and rank 0 may read another lease."""
        return self.state is TransferState.VERIFYING and isinstance(self.do, t.Listen)

    def _proven(self, now: float) -> Effects:
        """Raises KvferryError (`lease_changed`)."""
        wanted, first = self._wanted, self._first
        if self._needs_first:
            self.do = t.Listen()
            return []
        assert self.lease is not None
        if first is not None:
            check_first(wanted, first, self.lease)
        self.do = t.Compare((self._pass.first, self._pass.at)) if wanted.sums else self._verdict()
        return []

    # ---- the end ----

    def _verdict(self) -> t.Finish:
        """Done: all is moved, and proven to be of one lease."""
        self._move(TransferState.DONE)
        return t.Finish(self.state, self.lease, (self._pass.first, self._pass.at))

    def _fail(self, why: KvferryError, now: float) -> Effects:
        """Ask where an announcement may be the reason, or shake hands again where the peer is another one by now: each
        once."""
        announced = any(each.announced for each in self.readings.values())
        if self._opened and announced:
            self.do, self._pass = t.Drain(), r.Pass(0, 0)
            if self.state is not TransferState.CONNECTING:
                self._move(TransferState.CONNECTING)
            return []
        over = why.code == "stale_epoch" and self._wanted.epoch
        if self.readings and not self._opened and why.code in t.STALE and self._met == 1 and not over:
            effects = self._give_up(why, now)
            self.readings, self.do = {}, t.Meet()
            return effects
        return self._finish(why, now)

    def _finish(self, why: KvferryError, now: float, *, aborted: bool = False) -> Effects:
        effects = self._give_up(why, now)
        self._move(TransferState.ABORTED if aborted else TransferState.FAILED)
        self.do = t.Finish(self.state, problem=why)
        return effects

    def _give_up(self, why: KvferryError, now: float) -> Effects:
        """Close what is read, unread."""
        self._awaited = set()
        forget: Effects = [t.Forget()] if self.readings and why.code in t.STALE else []
        return self._say_all(self.readings, r.Leave(complete=False), now) + forget

    def _leave(self, now: float) -> Effects:
        """Ranks with nothing to read count this one as a reader that has finished, of the lease that was read."""
        assert self.lease is not None and self._peer is not None
        number = self.lease[1]
        closed: Effects = [t.Say(rank, r.Close(0, number, complete=True, nbytes=0)) for rank in self._peer.others]
        return self._say_all(self.readings, r.Leave(complete=True), now) + closed

    def check(self) -> None:
        for each in self.readings.values():
            each.check()
        assert self.state.ended is isinstance(self.do, t.Finish)
        assert self._awaited <= set(self.readings)
        assert self.lease is not None or self._pass == r.Pass(0, 0)
        if isinstance(self.do, t.Move | t.Prove | t.Compare):
            assert self.lease is not None and {each.seen.lease for each in self.readings.values()} == {self.lease[1]}
        if isinstance(self.do, t.Listen) and self.wanted is not None:
            assert self._awaited or self.awaits_first, "it waits for nothing"

    def sizes(self) -> Sizes:
        return {"readings": len(self.readings), "awaited": len(self._awaited), "whole": len(self._whole)}
