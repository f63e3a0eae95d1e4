"""Faults that are planted in the machine of peers."""

from __future__ import annotations

from typing import Any

from planted import Planted, changed, no_effects, nothing, without

from kvferry.protocol import peers_events as e
from kvferry.protocol.peers import Peers
from kvferry.protocol.peers_asked import Asking, Askings, Waiting
from kvferry.protocol.peers_homes import Homes
from kvferry.protocol.peers_wanted import Wanted


def asked_each_time(askings: Askings, waiting: Waiting, now: float, join: Any = Askings.join) -> Any:
    askings._at.pop((waiting.wanted.engine_id, waiting.wanted.address), None)
    return join(askings, waiting, now)


def one_by_one(effects: Any, peers: Peers, *_: Any) -> Any:
    """A handshake is begun when no other is under way."""
    return effects if len(peers._askings._at) == 1 else []


def always_first(askings: Askings, waiting: Waiting, now: float, join: Any = Askings.join) -> Any:
    return join(askings, waiting._replace(first=True), now)


def in_any_epoch(peers: Peers, wanted: e.Get, now: float, get: Any = Peers._get) -> Any:
    known = peers.known(wanted.engine_id)
    if known is not None and not known.lost and wanted.address in known.addresses:
        return [peers._find(wanted, known, now)]
    return get(peers, wanted, now)


def at_any_address(peers: Peers, wanted: e.Get, now: float, get: Any = Peers._get) -> Any:
    known = peers.known(wanted.engine_id)
    if known is not None and not known.lost and wanted.epoch in ("", known.home.epoch):
        return [peers._find(wanted, known, now)]
    return get(peers, wanted, now)


def whoever_uses_it(peers: Peers, peer: Any) -> Any:
    if not peer.stale:
        return []
    peers._loaded.pop(peer.number, None)
    return [e.Unload(peer.number)]


def as_any_order(peers: Peers, asker: int, number: int, now: float) -> Any:
    peer = peers.get(number)
    assert peer is not None
    return peers._ask(Waiting(e.Get(asker, peer.engine_id, peer.home.addresses[0], ordered=False)), now)


def with_what_it_joined(peers: Peers, asking: Asking, why: Any, now: float, fail: Any = Peers._fail) -> Any:
    asking.ordered = True
    return fail(peers, asking, why, now)


def kept_all_the_same(peers: Peers, number: int, home: Any, now: float, met: Any = Peers._met) -> Any:
    return [] if peers._askings.get(number) is None else met(peers, number, home, now)


def never_again(wanted: Wanted, place: e.Place, why: Any, now: float, failed: Any = Wanted.failed) -> Any:
    return failed(wanted, place, why, 1e12)


def asked_and_asked(wanted: Wanted, now: float) -> Any:
    wanted._asked.clear()
    wanted._asked.update(dict.fromkeys(wanted, False))
    return list(wanted)


def awaited_for_ever(wanted: Wanted, place: e.Place, why: Any, now: float, failed: Any = Wanted.failed) -> Any:
    awaited = set(wanted._awaited)
    try:
        return failed(wanted, place, why, now)
    finally:
        wanted._awaited = awaited


def only_listed(peers: Peers, number: int, now: float) -> Any:
    """It is forgotten, and whoever reads from it goes on being counted."""
    peer = peers.get(number)
    if peer is not None:
        peer.stale = True
    return []


PLANTED: dict[str, Planted] = {
    "a place is asked by each caller": (Askings, "join", asked_each_time),
    "one daemon is asked after another": changed(Peers, "_ask", one_by_one),
    "a handshake has no end": (Askings, "end_late", no_effects),
    "a peer that is lost is used": (Peers, "_lose", no_effects),
    "a peer is used in any epoch": (Peers, "_get", in_any_epoch),
    "a peer is used at any address": (Peers, "_get", at_any_address),
    "an order goes by what was heard before it came": (Askings, "join", always_first),
    "a peer is unloaded under its users": (Peers, "_unload_unused", whoever_uses_it),
    "a peer stays loaded": (Peers, "_unload_unused", no_effects),
    "a peer is forgotten by halves": (Peers, "_forget", only_listed),
    "whoever answers has the engine's id": (Homes, "in_the_way", nothing),
    "an id that an order named is presumed all the same": (Homes, "ordered", nothing),
    "an owner that is over stays in the way": (Homes, "over", nothing),
    "a caller that gave up is answered": (Askings, "give_up", nothing),
    "a peer is renewed by what is under way": (Peers, "_renew", as_any_order),
    "an order fails with what nobody ordered": (Peers, "_fail", with_what_it_joined),
    "callers that are to ask again are lost": (Peers, "_again", no_effects),
    "callers are not told of a failure": changed(Peers, "_fail", without(e.Refused)),
    "callers are not told that their engine ends": changed(Peers, "_shut", without(e.Refused)),
    "handshakes outlive their engine": changed(Peers, "_shut", without(e.Stop)),
    "what a handshake made that was stopped stays": (Peers, "_met", kept_all_the_same),
    "an address of the settings is tried once": (Wanted, "failed", never_again),
    "an address of the settings is asked again and again": (Wanted, "next", asked_and_asked),
    "a peer that the settings name is not missed": (Wanted, "drop", nothing),
    "engines of the daemon before are not met": (Wanted, "take_over", nothing),
    "an engine that was met is met once": (Wanted, "_have", nothing),
    "an engine of the daemon before is awaited for ever": (Wanted, "failed", awaited_for_ever),
}
