"""Faults that are planted in the machines of the source side, one line each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planted import Planted, changed, no_effects, nothing, without

from kvferry.protocol import events as e
from kvferry.protocol import packing_events as p
from kvferry.protocol.kept import Alarms
from kvferry.protocol.lease import Lease
from kvferry.protocol.leases import Leases
from kvferry.protocol.packing import Packing
from kvferry.protocol.readers import Readers
from kvferry.protocol.serving import Serving
from kvferry.protocol.values import ReaderId
from kvferry.protocol.waits import Waits


def word_last(effects: list[Any], *_: Any) -> list[Any]:
    return [*effects[1:], effects[0]]


def twice(effects: list[Any], *_: Any) -> list[Any]:
    ended = [each for each in effects if isinstance(each, e.LeaseEnded)]
    return [*effects, *ended]


def at_once(lease: Lease, said: Any, fence: int | None, now: float, queue: Any = Lease.queue) -> None:
    queue(lease, said, None, now)


def kept(told: Any, serving: Serving, number: int) -> Any:
    if isinstance(told, e.Problem):
        serving.on(e.Ask(e.Reading(serving.stream, number), "", refused=told.why), 0.0)
    return told


def first_set_counts(alarms: Alarms[Any], key: Any, at: float, set: Any = Alarms.set) -> None:
    if key not in alarms._at:
        set(alarms, key, at)


def by_one_rank(lease: Lease) -> bool:
    return not (lease.more or lease.readers.live) and lease.readers.closed > 0


def under_readers(lease: Lease) -> bool:
    return not lease.more and lease.readers.whole >= lease.terms.readers


def incomplete(readers: Readers, who: Any, left: Any, *more: Any, close: Any = Readers.close) -> None:
    close(readers, who, left._replace(complete=True), *more)


def forgotten_with_the_lease(leases: Leases, event: Any, now: float, publish: Any = Leases._publish) -> Any:
    effects = publish(leases, event, now)
    for name, number in [*leases._early._values]:
        if name == event.terms.request_id:
            leases._early.pop((name, number))
    return effects


def as_if_last(packing: Packing, said: Any, init: Any = Packing.__init__) -> None:
    init(packing, said._replace(last=True))


def and_given_back(effects: list[Any], packing: Packing, chunk: int, *_: Any) -> list[Any]:
    return [*effects, p.GiveBack(packing.at, chunk)]


def told_already(effects: list[Any], packing: Packing, *_: Any, **__: Any) -> list[Any]:
    packing._untold += [each.chunk for each in effects if isinstance(each, p.Gather)]
    return effects


def cut_anew(packing: Packing, view: Any, begin: Any = Packing.begin) -> Any:
    packing._stage = "opened" if packing._stage == "cut" else packing._stage
    return begin(packing, view)


def as_if_whole(packing: Packing, event: Any, now: float, on: Any = Packing.on) -> Any:
    return on(packing, event._replace(problem=None) if isinstance(event, p.Gathered) else event, now)


def without_vouching(packing: Packing, event: Any, now: float, on: Any = Packing.on) -> Any:
    return on(packing, event._replace(vouch=False) if isinstance(event, p.Want) else event, now)


def no_tombstone(held: Any, leases: Leases, name: str, number: int) -> Any:
    return None if isinstance(held, Exception) and leases.get(name) is None else held


def of_any_place(waits: Waits, request_id: str, who: ReaderId, refusal: Any = Waits.refusal) -> Any:
    return refusal(waits, request_id, replace(who, host=""))


def place_kept(waited: Any, waits: Waits, *_: Any) -> Any:
    if waited is not None:
        waits._at[waited[1].host] += 0
    return waited


PLANTED: dict[str, Planted] = {
    "what has ended is announced": (Serving, "withdraw", nothing),
    "the word is cleared after the engine is told": changed(Leases, "_end", word_last),
    "the word is never cleared": changed(Leases, "_end", without(e.ClearWord)),
    "an engine is told twice": changed(Leases, "_end", twice),
    "an engine is not told": changed(Leases, "_end", without(e.LeaseEnded)),
    "readers see a publish before its fence is reached": (Lease, "queue", at_once),
    "a lease is released when one rank has read it": (Lease, "all_read", property(by_one_rank)),  # type: ignore[dict-item]
    "a lease is released under its readers": (Lease, "all_read", property(under_readers)),  # type: ignore[dict-item]
    "ranks are counted across attempts": (Readers, "_go_by", nothing),
    "a reader that gave up has read": (Readers, "close", incomplete),
    "a second update is lost": changed(Serving, "show", without(e.Speak)),
    "an end is told twice": changed(Serving, "take", kept),
    "a time to live that begins anew is forgotten": (Alarms, "set", first_set_counts),
    "nothing expires": (Leases, "_settle", no_effects),
    "readers that wait are not told of the publish": (Waits, "up_to", no_effects),
    "one place takes all the waits": (Waits, "refusal", of_any_place),
    "a place that waits no more is remembered": changed(Waits, "pop", place_kept),
    "it is forgotten that a lease has ended": changed(Leases, "_held", no_tombstone),
    "readers are not told of an end": (Leases, "_over", no_effects),
    "a publish drops what ranks have closed of later leases": (Leases, "_publish", forgotten_with_the_lease),
    "a reader that wants more is not told of an end": (Packing, "__init__", as_if_last),
    "packing goes on when the lease has ended": (Packing, "whole", property(lambda _: True)),  # type: ignore[dict-item]
    "a packing that is over keeps its slots": changed(Packing, "end", without(p.Forget)),
    "a chunk is told before it is packed": changed(Packing, "_go_on", told_already),
    "a packing is cut anew by a later publish": (Packing, "begin", cut_anew),
    "slots that were read stay": changed(Packing, "_want", without(p.GiveBack)),
    "a slot is given back when its chunk is packed": changed(Packing, "_gathered", and_given_back),
    "a reader is not told what is packed": changed(Packing, "_gathered", without(e.Speak)),
    "a reader is not told why nothing is packed": changed(Packing, "end", without(e.Speak)),
    "a copy that failed counts": (Packing, "on", as_if_whole),
    "nobody watches a reader that holds slots": (Packing, "_wait_until", nothing),
    "a reader that was late is not answered": (Packing, "on", without_vouching),
    "a packing goes on beside the one that follows it": changed(Serving, "_pack", without(p.Forget)),
    "a stream that ends leaves its readings open": (Leases, "close", no_effects),
}
