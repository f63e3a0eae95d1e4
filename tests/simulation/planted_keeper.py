"""Faults that are planted in the keeper."""

from __future__ import annotations

from typing import Any

from planted import Planted, changed, no_effects, without

from kvferry.protocol import keeper as k
from kvferry.protocol import keeper_events as e


def forgotten_while_loading(effects: Any, keeper: k.Keeper, now: float) -> Any:
    """As a request that is a transition of the present state would be."""
    current = keeper.daemons.get(keeper.current)
    if current is not None and current.state is not k.State.SERVING:
        keeper.wishes.upgrade = 0
    return effects


def any_that_is_loaded(keeper: k.Keeper, now: float, upgrade: Any = k.Keeper._upgrade) -> Any:
    effects = upgrade(keeper, now)
    keeper.wishes.upgrade = min(keeper.wishes.upgrade, keeper.current + 1)
    return effects


def both(effects: Any, keeper: k.Keeper, now: float) -> Any:
    """The next one takes over while the one before drains."""
    told = [each for each in effects if isinstance(each, e.Signal) and each.number == e.TERM]
    return [*effects, *(e.Turn(max(keeper.daemons), "it is upgraded") for _ in told)]


def no_time(effects: Any, keeper: k.Keeper, *_: Any) -> Any:
    for daemon in keeper.daemons.values():
        daemon.due = None if daemon.state is k.State.KILLED else daemon.due
    return effects


def drains_for_ever(keeper: k.Keeper, daemon: Any, signal: int, due: float, told: Any = k.Keeper._told) -> Any:
    return told(keeper, daemon, signal, 1e12)


def at_once(keeper: k.Keeper, daemon: Any, signal: int, due: float, told: Any = k.Keeper._told) -> Any:
    return told(keeper, daemon, signal, due - k.BEYOND_DRAIN_S - daemon.drain_s)


def the_latest(keeper: k.Keeper, now: float, follow: Any = k.Keeper._follow) -> Any:
    """Whether it is loaded or not."""
    for daemon in keeper._others():
        if daemon.state is k.State.LOADED and daemon.number < max(keeper.daemons):
            daemon.state = k.State.KILLED
    return follow(keeper, now)


def hurries(keeper: k.Keeper, signal: int, now: float, stop: Any = k.Keeper._stop) -> Any:
    keeper.wishes.stop += 1
    return stop(keeper, signal, now)


def answered_by_any(keeper: k.Keeper, daemon: Any) -> bool:
    return keeper.wishes.upgrade > 0


def kept_on(effects: Any, keeper: k.Keeper, *_: Any) -> Any:
    """A wish that is fulfilled goes on."""
    keeper.wishes.upgrade = keeper.started + 1
    return effects


PLANTED: dict[str, Planted] = {
    "a wish is forgotten while another daemon loads": changed(k.Keeper, "_upgrade", forgotten_while_loading),
    "a wish is fulfilled by a daemon of before": (k.Keeper, "_upgrade", any_that_is_loaded),
    "a failure of before answers a wish": (k.Keeper, "_answers", answered_by_any),
    "a wish is answered in silence": changed(k.Keeper, "_stays", without(e.Stays)),
    "a wish that is fulfilled goes on": changed(k.Keeper, "_serves", kept_on),
    "the next one takes over from one that drains": changed(k.Keeper, "_settle", both),
    "an upgrade has no end": (k.Keeper, "_told", drains_for_ever),
    "a drain is cut off": (k.Keeper, "_told", at_once),
    "a stop hurries": (k.Keeper, "_stop", hurries),
    "a killed daemon is waited for without end": changed(k.Keeper, "_kill", no_time),
    "a daemon that hangs is left": (k.Keeper, "_late", no_effects),
    "nobody stands by": (k.Keeper, "_wants_another", lambda _: False),
    "daemons that die at once have no pause": (k.Deaths, "pause_s", lambda *_: 0.0),
    "a daemon that never serves is started again": (k.Keeper, "_end", no_effects),
    "those that stand by are left": (k.Keeper, "_drop", no_effects),
    "the first one's word is lost": changed(k.Keeper, "_serves", without(e.Ready)),
    "a daemon that could not be started is waited for": (k.Keeper, "_not_started", no_effects),
    "who loads has the turn": (k.Keeper, "_follow", the_latest),
}
