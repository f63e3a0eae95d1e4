"""The promises of the machine of an attempt at each event, whatever the world around it does."""

from __future__ import annotations

from violation import Violation

from kvferry.protocol import reading as r
from kvferry.protocol import transfer_events as t
from kvferry.protocol.states import TransferState
from kvferry.protocol.transfer import Progress

ANSWERS = t.Met | t.Moved | t.Drained | t.Proven | t.Compared | t.Failed


def asks_for(effect: t.TransferEffect) -> bool:
    """It asks for a lease that another source rank has told of."""
    return isinstance(effect, t.Say) and isinstance(effect.effect, r.Open) and effect.effect.lease > 0


class Promises:
    """The promises of one machine, beside which this looks on."""

    def __init__(self, machine: Progress) -> None:
        self.machine = machine
        self.wanted: t.Wanted | None = None
        self.met = 0
        """How often hands were shaken."""
        self.drained = self.led = self.agreed = False
        """Its announcements were asked; rank 0's lease is known; all source ranks have told of theirs."""

    def on(self, event: t.TransferEvent, now: float) -> list[t.TransferEffect]:
        """The machine's effects."""
        it = self.machine
        do, state = it.do, it.state
        wanted = self.wanted = event.wanted if isinstance(event, t.Match) and not state.ended else self.wanted
        effects = it.on(event, now)
        if state.ended:
            if it.do is not do or it.state is not state or (effects and not isinstance(event, t.Quiet)):
                raise Violation("it goes on after its end", f"{event}: {effects}")
            return effects
        self.met += isinstance(event, t.Met)
        self.led |= isinstance(event, t.Led)
        if isinstance(event, ANSWERS) and it.do is do:
            raise Violation("it is to do again what it has done", f"{do}")
        self.agreed |= self._all_told() or (wanted is not None and not wanted.lease and any(map(asks_for, effects)))
        if it.announced and not self.agreed:
            raise Violation("it says to go by announcements, and does not yet")
        if it.do is not do:
            self._next(event, state, t.Forget() in effects)
        if wanted is not None:
            self._check_bytes()
            self._check_listens(wanted)
        return effects

    def _all_told(self) -> bool:
        return bool(self.machine.readings) and all(each.seen.lease for each in self.machine.readings.values())

    def _next(self, event: t.TransferEvent, before: TransferState, forgets: bool) -> None:
        """The machine says now what has to be done next."""
        it, announced = self.machine, any(each.announced for each in self.machine.readings.values())
        match it.do:
            case t.Meet() if not isinstance(event, t.Match):
                if not forgets or self.agreed or self.met > 1 or self._epoch_is_over(event):
                    raise Violation("hands are shaken again, and need not be", f"{event}")
            case t.Move(tokens, states):
                if any(each.problem for each in it.readings.values()):
                    raise Violation("what is over is moved", f"{it.do}")
                if not states and tokens[0] == tokens[1]:
                    raise Violation("nothing is moved", f"{it.do}")
                if before is TransferState.CONNECTING and it.announced is not announced:
                    raise Violation("it says another way of beginning", f"{it.announced}")
            case t.Drain():
                if self.drained or not announced or not self.agreed:
                    raise Violation("it asks again, and need not", f"{event}")
                self.drained = True
            case t.Compare() if self.wanted is not None and not self.wanted.sums:
                raise Violation("it compares what nobody asked for")
            case t.Finish(state, problem=problem):
                self._finished(event, before, state)
                stale = problem is not None and problem.code in t.STALE
                if forgets is not (stale and bool(it.readings)):
                    raise Violation("it forgets a peer that is known, or does not", f"{problem}")
            case _:
                pass

    def _epoch_is_over(self, event: t.TransferEvent) -> bool:
        wanted, problems = self.wanted, [each.problem for each in self.machine.readings.values()]
        told = event.event.why if isinstance(event, t.Told) and hasattr(event.event, "why") else None
        assert wanted is not None
        return bool(wanted.epoch) and any(each.code == "stale_epoch" for each in (told, *problems) if each is not None)

    def _finished(self, event: t.TransferEvent, before: TransferState, state: TransferState) -> None:
        it, problem = self.machine, self.machine.do.problem  # type: ignore[union-attr]
        if isinstance(event, t.Stop):
            if problem is not event.why or state is not (
                TransferState.ABORTED if event.aborted else TransferState.FAILED
            ):
                raise Violation("it is stopped, and says something else", f"{event}: {it.do}")
            return
        if (state is TransferState.DONE) is not (problem is None) or state is TransferState.ABORTED:
            raise Violation("its end is another one than it says", f"{it.do}")
        if problem is None:
            return
        wanted, readings = self.wanted, it.readings.values()
        assert wanted is not None
        announced = [each for each in readings if each.announced]
        early = [each for each in announced if each.problem is not None and each.problem.code == problem.code]
        late = [each for each in readings if not each.announced and each.problem is not None]
        if not self.drained and ((announced and self.agreed) or (early and not late)):
            raise Violation("it fails by an announcement, and has not asked", f"{problem}")
        if problem.code == "lease_changed" and before is TransferState.CONNECTING and not wanted.lease:
            raise Violation("a source rank that is behind is not asked", f"{problem}")
        asks_anew = readings and not self.agreed and self.met == 1
        if asks_anew and problem.code in t.STALE and not (wanted.epoch and problem.code == "stale_epoch"):
            raise Violation("hands are not shaken again", f"{problem}")

    def _check_bytes(self) -> None:
        it = self.machine
        if it.state is TransferState.CONNECTING and it.nbytes and not it._whole:
            raise Violation("it counts bytes of what it does not read", f"{it.nbytes}")

    def _check_listens(self, wanted: t.Wanted) -> None:
        """It waits only for what stands in its way."""
        it = self.machine
        if not isinstance(it.do, t.Listen):
            return
        if it.state is TransferState.VERIFYING and (not wanted.rank or self.led or (wanted.epoch and wanted.lease)):
            raise Violation("it waits for rank 0, and need not")
        if it.state is not TransferState.READING:
            return
        assert it._peer is not None
        seen = {rank: each.seen for rank, each in it.readings.items()}
        published = min(each.num_tokens for each in seen.values())
        until = min(published, wanted.tokens[1] if wanted.tokens else published)
        if any(each.problem for each in it.readings.values()):
            raise Violation("it waits for more of what is over")
        if not any(each.more for each in seen.values()) or until - until % it._peer.grain > it._pass.at:
            raise Violation("it waits, and more could be moved", f"{until} after {it._pass.at}")
        behind = {rank for rank, each in seen.items() if each.more and each.num_tokens == published}
        if behind and not it._awaited <= behind:
            raise Violation("it waits for a source rank that is not behind", f"{it._awaited}")
