"""Which way a transfer goes: the cheapest by estimate of those that the pair can take, or the one that is forced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import KvferryError
from kvferryd.engines import Engine
from kvferryd.peers.peers import PeerEngine
from kvferryd.plan import Bound
from kvferryd.transfer import direct, mapped, staged
from kvferryd.transfer.flight import Flight
from kvferryd.transport import Span


@dataclass(frozen=True, slots=True)
class Choice:
    """`path`: the way taken. `estimate_ms`: of every way that the pair can take."""

    path: str
    estimate_ms: dict[str, float]


def refusals(engine: Engine, peer: PeerEngine) -> dict[str, str]:
    """Every way: empty when the pair can take it, otherwise why not."""
    hidden = [rank for rank in peer.plan.reads_from if not peer.ranks[rank].regions]
    return {
        direct.PATH: "this daemon is strict" if engine.strict else f"ranks {hidden} are strict" if hidden else "",
        mapped.PATH: mapped.refusal(peer),
        staged.PATH: staged.refusal(peer, engine.arena),
    }


def choose(way: str, bound: Bound, engine: Engine, peer: PeerEngine) -> Choice:
    """`way`: auto, or the one to take; staged falls back where the peer cannot and nothing is strict.

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
    if engine.arena is not None and not why[staged.PATH]:  # way = staged, or strict: nothing else is wanted
        return Choice(staged.PATH, {})
    if why[direct.PATH] and (way == direct.PATH or why[mapped.PATH]):
        raise staged.CannotStage(
            "cannot_stage",
            f"{why[direct.PATH]}, so it must be staged: {why[staged.PATH]}",
            field="strict",
            value=engine.strict,
            remedy="set way = staged (or strict) on both sides, or strict on neither",
        )
    seconds = {}
    if not why[direct.PATH]:
        seconds[direct.PATH] = direct.estimate_s(bound, peer)
    if not why[mapped.PATH]:
        seconds[mapped.PATH] = mapped.estimate_s(bound, peer)
    path = min(seconds, key=seconds.__getitem__) if way in ("auto", staged.PATH) else way
    return Choice(path, {name: round(1e3 * value, 4) for name, value in seconds.items()})


async def move(
    path: str,
    bound: Bound,
    engine: Engine,
    regions: Mapping[int, Span],
    peer: PeerEngine,
    priority: int,
    flights: list[Flight],
    terms: staged.Terms,
) -> int:
    """Move all of it; returns the number of NIXL descriptors."""
    if path == mapped.PATH:
        assert engine.runner is not None
        await mapped.move(bound, engine.runner, regions, peer, priority, flights)
        return 0
    assert engine.agent is not None
    if path == staged.PATH:
        return await staged.move(bound, engine.agent, engine.arena, regions, peer, priority, flights, terms)
    return await direct.move(bound, engine.agent, regions, peer, priority, flights)
