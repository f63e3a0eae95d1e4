"""The client's half: what an engine rank has published and receives in one session, and what of it is in doubt.

A call is told one end: taken, refused, doubtful or, for a receive, ended. After a doubtful or ended one, and after one
that nobody waits for any more, it is quiet once. A lease is told one end, too. Until then its blocks are in use.
"""

from __future__ import annotations

import itertools
from typing import assert_never

from kvferry.errors import KvferryError
from kvferry.protocol import book_events as e
from kvferry.protocol import book_values as values
from kvferry.protocol.book_values import Call, Lease, Receive, Start
from kvferry.protocol.values import Sizes

Effects = list[e.Effect]


class Book:
    def __init__(self, ranks: int = 1, before: Book | None = None) -> None:
        """ranks: of the engine. before: that of a session which this one resumes."""
        self.start: Start = Start() if before is None else before.start
        self._ranks, self._ids = ranks, itertools.count(1)
        self._calls: dict[e.Call, Call] = {}
        """All that have not been told their end, or are not quiet."""
        self._waiting: dict[Call, None] = {}
        """Not sent: for the registration, or for the receive before. In their order."""
        self._sent: dict[int, Call] = {}
        """Calls that are not answered, by command."""
        self._settling: dict[int, Call] = {}
        """Publishes that are settled when an abort of the book's own is answered, by that."""
        self._leases: dict[tuple[str, int], Lease] = {}
        self._counted: dict[str, Lease] = {}
        """Leases that the book has numbered and that take more, by request."""
        self._receives: dict[str, Receive] = {}
        self._unquiet: dict[str, Receive] = {}
        """Receives that have ended and still write, by transfer."""
        self._registering = False
        self.ended: KvferryError | None = None
        """Why the session has ended."""
        self._over = False
        self.unknown: KvferryError | None = None

    def on(self, event: e.Event) -> Effects:
        """Raises KvferryError (`number_required`, `mixed_weights`); then nothing has changed."""
        match event:
            case e.Publish() | e.Receive() | e.Abort() | e.ReplaceWeights() | e.Probe():
                return self._begin(event)
            case e.Leave(call):
                return self._leave(self._calls.get(call))
            case e.Answered():
                return self._answered(event)
            case e.LeaseOver(request_id, number, end):
                if (lease := self._leases.get((request_id, number))) is None:
                    return []
                lease.over = True
                self._forget(request_id, lease)
                return [e.LeaseEnded(lease.held, end)]
            case e.TransferOver() | e.BlocksSafe():
                receive = self._unquiet.get(event.transfer_id) or self._receives.get(event.request_id)
                return [] if receive is None else self._heard(receive, event)
            case e.Register():
                self._registering = True
                return []
            case e.Registered(lost):
                self._registering = False
                for key in lost:
                    if key in self.start.lost:
                        self.start.lost.remove(key)
                return self._go_on()
            case e.SessionLost(why):
                return self._lose(why)
            case e.SessionOver(unknown):
                return self._settle(unknown)
            case _:
                assert_never(event)

    def left(self, name: str) -> list[e.Call]:
        """Calls of the request that nobody waits for any more, and that are not quiet."""
        return [call for call, of in self._calls.items() if of.told and of.request_id == name]

    # The engine speaks.

    def _begin(self, said: e.Said) -> Effects:
        assert said.call not in self._calls
        call, effects, start = Call(said, weights=self.start.weights), Effects(), self.start
        match said:
            case e.Publish():
                if said.current and said.request_id in start.cut:
                    raise values.mixed_weights(said.request_id, start.weights)
                if not said.number and self._ranks > 1:
                    raise values.number_required("lease", said.request_id, self._ranks)
            case e.Receive():
                if not said.attempt and self._ranks > 1:
                    raise values.number_required("attempt", said.request_id, self._ranks)
                call = Receive(said, said.attempt or next(start.attempts), weights=start.weights)
            case e.Abort(_, request_id):
                start.cut.pop(request_id)
                effects += self._drop(request_id)
            case e.ReplaceWeights(_, weights):
                if weights != start.weights:
                    start.cut_all(values.in_part(self._leases, self._waiting, self._settling.values()))
                start.weights = weights
            case e.Probe():
                pass
        self._calls[said.call] = call
        return effects + self._go(call)

    def _drop(self, request_id: str) -> Effects:
        """Nothing more is sent of the request, nor added to its lease."""
        self._counted.pop(request_id, None)
        of = [each for each in self._calls.values() if each.request_id == request_id]
        for each in of:
            each.aborted = True
        why, unsent = values.aborted(request_id), [each for each in of if each in self._waiting]
        return [effect for each in unsent for effect in self._tell(each, e.Refused(each.said.call, why))]

    def _go(self, call: Call) -> Effects:
        """Send it, as soon as that may be."""
        if self.ended is not None:
            return self._too_late(call)
        if self._registering and not isinstance(call.said, e.Abort | e.Probe):
            self._waiting[call] = None
            return []
        if isinstance(call, Receive):
            request_id = call.request_id
            before = self._receives.get(request_id)
            if before is not None and (before.given_up or before.aborted):
                self._waiting[call] = None
                return []
            if before is not None:
                return self._tell(call, e.Refused(call.said.call, values.pending(request_id)))
            self._receives[request_id] = call
        self._waiting.pop(call, None)
        return [self._send(call)]

    def _send(self, call: Call) -> e.Effect:
        id, said = next(self._ids), call.said
        self._sent[id] = call
        if not isinstance(said, e.Publish):
            return e.Send(said.call, id, call.number)
        lease = self._lease_of(said)
        lease.calls, lease.more, call.lease = lease.calls + 1, said.more, lease
        return e.Send(said.call, id, lease.number, lease.held)

    def _lease_of(self, said: e.Publish) -> Lease:
        name, number = said.request_id, said.number
        if (known := self._leases.get((name, number)) if number else self._counted.get(name)) is not None:
            return known
        lease = Lease(said.lease, number or next(self.start.leases))
        if not number:
            self._counted[name] = lease
        self._leases[name, lease.number] = lease
        return lease

    def _go_on(self) -> Effects:
        return [effect for call in list(self._waiting) for effect in self._go(call)]

    def _leave(self, call: Call | None) -> Effects:
        if call is None or call.told:
            return []
        if call in self._waiting and not isinstance(call.said, e.ReplaceWeights):  # a new name goes out anyway
            why = values.registering() if self._registering else values.pending(call.request_id)
            return self._tell(call, e.Refused(call.said.call, why))
        call.told = True
        if isinstance(call, Receive):
            call.given_up = True
            return self._given_up(call)
        going = isinstance(call.said, e.Publish) and call.why is None
        return [self._withdraw(call, values.aborted(call.request_id))] if going else []

    def _withdraw(self, call: Call, why: KvferryError) -> e.Effect:
        """Abort the request, behind its publish on the stream: that settles the call."""
        request_id, id, call.why = call.request_id, next(self._ids), why
        self._counted.pop(request_id, None)
        self._settling[id] = call
        return e.SendAbort(id, request_id)

    def _tell(self, call: Call, end: e.Taken | e.Refused) -> Effects:
        """Its end, unless nobody waits for it: then it is quiet now. It is over with this."""
        del self._calls[call.said.call]
        self._waiting.pop(call, None)
        return [e.Quiet(call.said.call)] if call.told else [end]

    # The daemon speaks.

    def _answered(self, answer: e.Answered) -> Effects:
        if (settled := self._settling.pop(answer.id, None)) is not None:
            assert settled.why is not None
            return self._tell(settled, e.Refused(settled.said.call, settled.why))
        if (call := self._sent.pop(answer.id, None)) is None:
            return []
        if isinstance(call, Receive):
            return self._receive_answered(call, answer)
        if isinstance(call.said, e.Publish):
            return self._publish_answered(call, call.said, answer.problem)
        owner = call.said.call
        return self._tell(call, e.Taken(owner) if answer.problem is None else e.Refused(owner, answer.problem))

    def _publish_answered(self, call: Call, said: e.Publish, problem: KvferryError | None) -> Effects:
        lease = call.lease
        assert lease is not None
        lease.calls -= 1
        lease.taken = lease.taken or problem is None
        if not (lease.taken or lease.calls):
            self._forget(said.request_id, lease)
        if call.told:  # it is quiet when the abort behind it is answered
            return []
        if problem is None:
            return self._tell(call, e.Taken(said.call))
        if problem.code == "lease_ended" and lease.over and not (said.number or call.aborted):
            if call.weights == self.start.weights:
                return [self._send(call)]  # its lease ended while this was on its way: this is another
            problem = values.mixed_weights(said.request_id, self.start.weights)
        if said.withdraw and (said.request_id, lease.number) in self._leases:
            return [self._withdraw(call, problem)]
        return self._tell(call, e.Refused(said.call, problem))

    def _forget(self, request_id: str, lease: Lease) -> None:
        self._leases.pop((request_id, lease.number), None)
        if self._counted.get(request_id) is lease:
            del self._counted[request_id]

    def _receive_answered(self, receive: Receive, answer: e.Answered) -> Effects:
        owner = receive.said.call
        if answer.problem is not None:
            return self._tell(receive, e.Refused(owner, answer.problem)) + self._free(receive)
        receive.transfer_id = answer.transfer_id
        effects: Effects = [] if receive.told else [e.Named(owner)]
        effects += [effect for event in receive.early for effect in self._heard(receive, event)]
        receive.early.clear()
        return effects + self._given_up(receive)

    def _given_up(self, receive: Receive) -> Effects:
        """Abort it, once the daemon has something to abort."""
        if not receive.given_up or receive.over or not receive.transfer_id:
            return []
        return [e.SendAbort(next(self._ids), receive.request_id)]

    def _heard(self, receive: Receive, event: e.TransferOver | e.BlocksSafe) -> Effects:
        """Only events of its own transfer count: an earlier one of the same request may end late."""
        if not receive.transfer_id:
            receive.early.append(event)
            return []
        effects, owner = Effects(), receive.said.call
        if event.transfer_id != receive.transfer_id or owner not in self._calls:
            return []
        receive.safe = receive.safe or isinstance(event, e.BlocksSafe) or event.safe
        if isinstance(event, e.TransferOver):
            receive.over = True
            if not receive.told:
                receive.told, problem = True, None
                if event.done and receive.weights != self.start.weights:  # replaced while its end was on its way here
                    problem = values.other_weights(event.request_id, receive.weights)
                effects.append(e.Ended(owner, event.end, problem))
        if receive.told and receive.safe:
            self._unquiet.pop(receive.transfer_id, None)
            del self._calls[owner]
            return [*effects, e.Quiet(owner), *self._free(receive)]
        if receive.over and not receive.given_up:
            self._unquiet[receive.transfer_id] = receive
            return effects + self._free(receive)
        return effects

    def _free(self, receive: Receive) -> Effects:
        """The request may be received again."""
        request_id = receive.request_id
        if self._receives.get(request_id) is not receive:
            return []
        del self._receives[request_id]
        return self._go_on()

    # The session's end.

    def _lose(self, why: KvferryError) -> Effects:
        assert self.ended is None
        self.ended = why
        self.start.lost.extend(self._leases)
        for kept in (self._waiting, self._sent, self._settling, self._counted, self._receives, self._unquiet):
            kept.clear()
        effects: Effects = [e.Doubtful(owner, why) for owner, call in self._calls.items() if not call.told]
        for call in self._calls.values():
            call.told = True
        return effects

    def _too_late(self, call: Call) -> Effects:
        """The session has ended: earlier calls may still have an effect."""
        assert self.ended is not None
        if isinstance(call.said, e.Publish):
            self.start.lost.append((call.said.request_id, call.said.number or next(self.start.leases)))
        call.told, owner = True, call.said.call
        if not self._over:
            return [e.Doubtful(owner, self.ended)]
        del self._calls[owner]
        return [e.Doubtful(owner, self.ended), e.Quiet(owner, self.unknown)]

    def _settle(self, unknown: KvferryError | None) -> Effects:
        assert self.ended is not None and not self._over
        self._over, self.unknown = True, unknown
        effects: Effects = [e.Quiet(owner, unknown) for owner in self._calls]
        effects += [e.LeaseEnded(lease.held, unknown or values.daemon_gone()) for lease in self._leases.values()]
        self._calls.clear()
        self._leases.clear()
        return effects

    def check(self) -> None:
        live = set(map(id, self._calls.values()))
        for of in (self._waiting, self._settling.values(), self._receives.values(), self._unquiet.values()):
            assert set(map(id, of)) <= live, "over, and still kept"
        for (request_id, number), lease in self._leases.items():
            assert lease.number == number and not lease.over
            assert lease.taken or lease.calls or self.ended, f"nobody publishes lease {number} of {request_id}"
        for request_id, lease in self._counted.items():
            assert self._leases[request_id, lease.number] is lease
        for transfer_id, receive in self._unquiet.items():
            assert receive.transfer_id == transfer_id and receive.told and receive.over and not receive.safe
        for request_id, receive in self._receives.items():
            assert isinstance(receive.said, e.Receive) and receive.said.request_id == request_id
            assert receive.given_up or not receive.told, "it has ended, and keeps its request"
        assert not self._over or not (self._calls or self._leases)
        assert self.ended is None or not (self._waiting or self._sent or self._receives or self._unquiet)

    def sizes(self) -> Sizes:
        names = "calls", "waiting", "sent", "settling", "leases", "counted", "receives", "unquiet"
        early = sum(len(each.early) for each in self._receives.values())
        kept = {name: len(getattr(self, f"_{name}")) for name in names}
        return kept | {"early": early, "lost": len(self.start.lost), "cut": len(self.start.cut)}
