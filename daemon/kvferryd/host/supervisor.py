"""`kvferry host`: the daemons; a keeper that ends is followed by another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferryd.run.children import FAILED, Children
from kvferryd.run.daemons import Daemon

HOST = "host"
LASTED_S = 60.0
"""A keeper that has lived for so long does not count as one that ends at once."""
PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Before the next keeper, by how many of the same daemon have ended in a row before LASTED_S."""


@dataclass
class Place:
    """A daemon's place: when its last keeper was started, how many have ended early, and when the next one is to come;
    the loop's clock. due: None while a keeper lives."""

    daemon: Daemon
    began: float
    early: int = 0
    due: float | None = None

    def ended(self, now: float) -> float:
        """Its keeper has; returns the pause."""
        self.early = 0 if now - self.began >= LASTED_S else self.early + 1
        pause_s = PAUSES_S[min(self.early, len(PAUSES_S) - 1)]
        self.due = now + pause_s
        return pause_s


async def _hosted(daemons: Sequence[Daemon], folder: Path, environment: Mapping[str, str]) -> int:
    as_json = daemons[0].config.log_format == "json"
    names = [daemon.name for daemon in daemons]
    async with Children(HOST, names, folder, environment, as_json=as_json) as children:
        if not await children.serve(daemons):
            return 0 if children.told.done() and not children.lost else FAILED
        children.say("all daemons serve")
        now = asyncio.get_running_loop().time
        places = {daemon.name: Place(daemon, now()) for daemon in daemons}
        while not children.told.done():
            for kept in children.lost:
                pause_s = places[kept.name].ended(now())
                when = f"in {pause_s:g} s" if pause_s else "now"
                children.say(f"the keeper of {kept.name} {kept.how}: another one is started {when}", "error")
                children.forget(kept)
                await children.end_left(0.0)  # its daemons: the kernel kills them, too, once they have loaded
            for place in places.values():
                if place.due is not None and place.due <= now():
                    _begin(children, place, now())
            left_s = [max(0.0, place.due - now()) for place in places.values() if place.due is not None]
            await children.first(min(left_s, default=None), children.told, *children.endings)
        return 0


def _begin(children: Children, place: Place, now: float) -> None:
    try:
        children.keep(place.daemon)
        place.began, place.due = now, None
    except OSError as error:  # no process or descriptor is left
        children.say(f"no keeper of {place.daemon.name} can be started: {error}", "error")
        place.due = now + PAUSES_S[-1]


def hosted(daemons: Sequence[Daemon], folder: Path, environment: Mapping[str, str]) -> int:
    """Run them until a signal; returns the status."""
    return asyncio.run(_hosted(daemons, folder, environment))
