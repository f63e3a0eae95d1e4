"""Which way a transfer goes: the cheapest by estimate of those that the pair can take, or the one that is forced.

Estimates are corrected by what earlier transfers from the same peer took (peers/calibration.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferryd.engine import Engine
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import Bound
from kvferryd.transfer import direct, mapped, staged
from kvferryd.transfer.flight import Flight
from kvferryd.transport import Span


@dataclass(slots=True)
class Choice:
    """`path`: the way taken. `estimate_ms`: of every way that the pair can take. `took_ms`: set by `move`."""

    path: str
    estimate_ms: dict[str, float]
    took_ms: float = 0.0


def refusals(engine: Engine, peer: PeerEngine) -> dict[str, str]:
    """Every way: empty when the pair can take it, otherwise why not."""
    hidden = [rank for rank in peer.plan.reads_from if not peer.ranks[rank].regions]
    return {
        direct.PATH: "this daemon is strict" if engine.strict else f"ranks {hidden} are strict" if hidden else "",
        mapped.PATH: "this daemon is strict" if engine.strict else mapped.refusal(peer),
        staged.PATH: staged.refusal(peer, engine.arena),
    }


def choose(way: str, bound: Bound, engine: Engine, peer: PeerEngine) -> Choice:
    """`way`: auto, or the one to take; staged falls back to the cheapest where the pair cannot and nothing is strict.

    Raises KvferryError: `way_unavailable`, and CannotStage where one side is strict and the pair cannot stage.
    """
    why = refusals(engine, peer)
    if way == mapped.PATH and why[way]:
        raise KvferryError(
            "way_unavailable",
            f"way = {way} is forced, and engine {peer.engine_id} cannot be read so: {why[way]}",
            field="way",
            value=way,
            remedy="set way = auto, or see GET /v1/peers for what each pair can do",
        )
    seconds = _estimates(why, bound, peer)
    if not seconds or (way == direct.PATH and why[way]):
        raise staged.CannotStage(
            "cannot_stage",
            f"{why[direct.PATH]}, so it must be staged: {why[staged.PATH] or 'and way = direct is forced'}",
            field="strict",
            value=engine.strict,
            remedy="set way = staged (or strict) on both sides, or strict on neither",
        )
    path = way if way in seconds else min(seconds, key=seconds.__getitem__)
    return Choice(path, {name: round(1e3 * value, 4) for name, value in seconds.items()})


def _estimates(why: Mapping[str, str], bound: Bound, peer: PeerEngine) -> dict[str, float]:
    """Seconds, of the ways that are not refused."""
    estimates = {direct.PATH: direct.estimate_s, mapped.PATH: mapped.estimate_s, staged.PATH: staged.estimate_s}
    return {
        path: estimate(bound, peer) * peer.calibration.factor(path)
        for path, estimate in estimates.items()
        if not why[path]
    }


async def move(
    choice: Choice,
    bound: Bound,
    engine: Engine,
    regions: Mapping[int, Span],
    peer: PeerEngine,
    priority: int,
    flights: list[Flight],
    terms: staged.Terms,
) -> int:
    """Move all of it; returns the number of NIXL descriptors. What it took is kept for later estimates."""
    began = time.monotonic()
    descriptors = await _move(choice.path, bound, engine, regions, peer, priority, flights, terms)
    took_s = time.monotonic() - began
    choice.took_ms = 1e3 * took_s
    peer.calibration.learn(choice.path, choice.estimate_ms[choice.path] / 1e3, took_s)
    return descriptors


async def _move(
    path: str,
    bound: Bound,
    engine: Engine,
    regions: Mapping[int, Span],
    peer: PeerEngine,
    priority: int,
    flights: list[Flight],
    terms: staged.Terms,
) -> int:
    if path == staged.PATH:
        return await staged.move(bound, engine.agent, engine.arena, regions, peer, priority, flights, terms)
    for view in terms.views:
        view.sealed = True
    if path == direct.PATH:
        return await direct.move(bound, engine.agent, regions, peer, priority, flights)
    assert engine.runner is not None
    await mapped.move(bound, engine.runner, regions, peer, priority, flights)
    return 0
