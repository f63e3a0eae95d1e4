"""Faults that are planted in the machines of requests and of rank 0."""

from __future__ import annotations

from typing import Any

from planted import Planted, changed, no_effects, nothing, without

from kvferry.protocol import leader_events as le
from kvferry.protocol import requests_events as e
from kvferry.protocol.claims import Claims
from kvferry.protocol.leader import Leader
from kvferry.protocol.parts import Part, Parts
from kvferry.protocol.requests import Requests


def always_news(parts: Parts, key: Any, attempt: Any, why: Any) -> bool:
    parts._over.put(key, (attempt, why.kept()))
    return True


def waiting_first(parts: Parts, key: Any, attempt: Any, of: Any = Parts.of) -> Any:
    return parts._waiting.get(key, {}).get(attempt) or of(parts, key, attempt)


def not_waited(_: Any, *__: Any) -> bool:
    return False


def no_parts(*_: Any) -> list[Part]:
    return []


def going_on_too(parts: Parts) -> list[e.Forgotten]:
    forgotten = list(parts._ended.values())[: max(0, len(parts._ended) - parts._history)]
    for part in forgotten:
        del parts._ended[part.number], parts._by_number[part.number]
        if parts.is_newest(part):
            del parts._current[part.key]
    return [e.Forgotten(part.number) for part in forgotten]


def forgotten_whole(parts: Parts, forget: Any = Parts.forget) -> list[e.Forgotten]:
    over, keys = dict(parts._over._values), {part.number: part.key for part in parts.all()}
    forgotten: list[e.Forgotten] = forget(parts)
    for each in forgotten:
        if keys[each.part] not in over:
            parts._over.pop(keys[each.part])
    return forgotten


def whatever_drains(requests: Requests, closed: Any, check: Any = Requests._check_room) -> None:
    check(requests, None)


def however_many(requests: Requests, closed: Any) -> None:
    if closed is not None:
        raise closed


def at_its_end(effects: list[Any], requests: Requests, part: Part, problem: Any) -> list[Any]:
    requests._claims.release(part.claim)
    return effects


def of_any(effects: list[Any], requests: Requests, event: Any) -> list[Any]:
    event.order_id and requests._orders.pop(event.order_id)
    return effects


def at_once(requests: Requests, part: Part) -> list[Any]:
    return [] if part.at.rank or part.led else [e.HandOn(part.number, part.brought or {})]


def also_the_numbered(parts: Parts, key: Any) -> Part | None:
    return next((part for part in parts._waiting.get(key, {}).values() if not part.stopped), None)


def never(*_: Any, **__: Any) -> None:
    return None


def missed_nothing(parts: Parts, part: Part, end: Any = Parts.end) -> bool:
    end(parts, part)
    return False


def beside(parts: Parts, part: Part, attempt: Any, make: Any = Parts.make_newest) -> list[Part]:
    return make(parts, part, attempt)[:0]  # type: ignore[no-any-return]


def nothing_claimed(claims: Claims, life: int, blocks: Any, request_id: str, take: Any = Claims.take) -> Any:
    return take(claims, life, {}, request_id)


def no_effects_but_told(leader: Leader, led: Any, code: str, *, failed: bool) -> list[Any]:
    led.told = True
    return []


def told_once(leader: Leader, number: int, now: float, *, lost: bool) -> list[Any]:
    del leader._tells[number]
    return []


def without_refusals(effects: list[Any], leader: Leader, event: Any, now: float) -> list[Any]:
    return [] if isinstance(event, le.Refused) else effects


def led_on(leader: Leader, led: Any, effects: list[Any]) -> list[Any]:
    return effects


def a_second_later(tell: le.Tell, *_: Any, **__: Any) -> le.Tell:
    return tell._replace(seconds=1.0)


def closed(leader: Leader, led: Any) -> list[Any]:
    effects = leader._give_up(led, "deadline", failed=True)
    return leader._settled(led, effects + [each for rank in led.ranks for each in leader._close(led, rank, None)])


PLANTED: dict[str, Planted] = {
    "what is over falls": (Parts, "pass_by", always_news),
    "an order that is about to end is joined by a lower reservation": (Parts, "of", waiting_first),
    "an end is not remembered": (Parts, "pass_by", not_waited),
    "a reservation that comes after the end of its attempt has not missed it": (Parts, "end", missed_nothing),
    "orders for lower attempts wait on": (Parts, "in_vain", no_parts),
    "an attempt does not end the one before": (Parts, "make_newest", beside),
    "nothing is forgotten": (Parts, "forget", no_parts),
    "what goes on is forgotten": (Parts, "forget", going_on_too),
    "what is over is forgotten with its record": (Parts, "forget", forgotten_whole),
    "an order never meets the next reservation": (Parts, "next", never),
    "a reservation takes the order of another attempt": (Parts, "next", also_the_numbered),
    "a drain is overlooked": (Requests, "_check_room", whatever_drains),
    "any number of transfers": (Requests, "_check_room", however_many),
    "a claim is released before its transfer is quiet": changed(Requests, "_ended", at_its_end),
    "a claim is never released": (Claims, "release", nothing),
    "any blocks are claimed": (Claims, "take", nothing_claimed),
    "an order id is forgotten": changed(Requests, "_ordered", of_any),
    "an order is not handed on": (Requests, "_hand_on", no_effects),
    "an order is handed on before its reservation": (Requests, "_hand_on", at_once),
    "other ranks are not told of a refusal": changed(Requests, "_refuse", without(e.TellRefused)),
    "other ranks are not told of an end": changed(Requests, "_ended", without(e.TellEnded)),
    "a refusal is no end": (Requests, "_refuse", no_effects),
    "an end on another rank is not heard": (Requests, "_ended_elsewhere", no_effects),
    "nobody is stopped by the daemon": (Requests, "_stop_all", no_effects),
    "what is reserved for other weights is read": (Requests, "_replace_weights", no_effects),
    "rank 0 asks no rank again": changed(Leader, "_of_part", without(le.Pause)),
    "rank 0 goes on when another rank has not got its KV": changed(Leader, "_of_part", without(le.StopOwn)),
    "an end is told late": changed(Leader, "_tell", a_second_later),
    "what is late is closed, and nobody says why": (Leader, "_late", closed),
    "other ranks are not told that rank 0 has given up": (Leader, "_give_up", no_effects_but_told),
    "an end that was not heard is not told again": (Leader, "_told", told_once),
    "refusals are told to nobody": changed(Leader, "on", without_refusals),
    "rank 0 gathers ends for ever": (Leader, "_late", no_effects),
    "an order that is over is led on": (Leader, "_settled", led_on),
    "one fewer is not counted": (Requests, "_quiet", no_effects),
}
