"""The three ways of moving runs, and the rule by which one is chosen.

A path holds no state. `move` moves everything, or raises KvferryError: what may still write is among the flights then,
and the transfer abandons it.
"""

from __future__ import annotations

from kvferry.errors import Conflict
from kvferryd.aio import beside
from kvferryd.engine import Engine
from kvferryd.paths.direct import Direct, Mapped, zero
from kvferryd.paths.move import Flight, Move, Moved, PathName
from kvferryd.paths.staged import Staged
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import Bound
from kvferryd.plan.cost import COSTS, IMPORTED, cheapest

__all__ = ["Flight", "Move", "Moved", "PathName", "choose", "refusals", "zero"]

Path = Mapped | Staged | Direct
PATHS: dict[PathName, Path] = {path.name: path for path in (Mapped(), Staged(), Direct())}
"""In the order in which `auto` prefers them."""


def refusals(engine: Engine, peer: PeerEngine) -> dict[PathName, str]:
    """Every path, in the order of PATHS: empty when the pair can take it, otherwise why not."""
    read = {rank: peer.ranks[rank] for rank in peer.plan.reads_from}
    strict = "this daemon is strict" if engine.strict else ""
    unmapped = next((f"rank {rank}: {why}" for rank, why in peer.unmapped.items()), "")
    unstaged = [rank for rank, each in read.items() if each.staging is None]
    bare = f"the daemons of ranks {unstaged} of engine {peer.engine_id} have no staging arena" if unstaged else ""
    hidden = [rank for rank, each in read.items() if not each.regions]
    return {
        PathName.MAPPED: strict or unmapped,
        PathName.STAGED: bare if engine.arena is not None else "this daemon has no staging arena",
        PathName.DIRECT: strict or (f"ranks {hidden} are strict" if hidden else ""),
    }


async def choose(way: str, bound: Bound, engine: Engine, peer: PeerEngine) -> Path:
    """The path for these bytes. `way`: auto, or the path to take.

    auto: the one of those that the pair can take that is expected to take the least time (`plan.cost`). A forced
    staged falls back to the others where the pair cannot stage and nothing is strict. Raises KvferryError:
    `way_unavailable`; `cannot_stage` where one side is strict and the pair cannot stage.
    """
    why = refusals(engine, peer)
    able = [name for name in why if not why[name]]
    if way == "auto" and PathName.MAPPED in able:
        return PATHS[PathName.MAPPED]  # nothing is ever cheaper: that runs are counted can be spared
    if way in able:
        return PATHS[PathName(way)]
    if way == PathName.MAPPED:
        message = f"way = mapped is forced, and engine {peer.engine_id} cannot be read so: {why[PathName.MAPPED]}"
        remedy = "set way = auto, or see GET /v1/peers for what each pair can do"
        raise Conflict("way_unavailable", message, field="way", value=way, remedy=remedy)
    if not able or way == PathName.DIRECT:
        reason = why[PathName.STAGED] or f"way = {way} was requested"
        message = f"strict requires staging ({why[PathName.DIRECT]}), but {reason}"
        remedy = "set way = staged (or strict) on both sides, or strict on neither"
        raise Conflict("cannot_stage", message, field="strict", value=engine.strict, remedy=remedy)
    if len(able) == 1:
        return PATHS[able[0]]
    imported = any(peer.ranks[rank].slow for rank in peer.plan.reads_from)
    runs = await beside(bound.segment_count, lambda: bound.run_count)
    costs = IMPORTED if imported else COSTS[engine.kind]
    return PATHS[cheapest(costs, able, runs, bound.nbytes, bound.segment_count)]
