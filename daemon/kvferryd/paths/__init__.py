"""The three ways of moving runs, and the rule by which one is chosen."""

from __future__ import annotations

from kvferry.errors import Conflict
from kvferryd.engine import Engine
from kvferryd.paths.direct import Direct
from kvferryd.paths.mapped import Mapped
from kvferryd.paths.move import Flight, Move, Moved, Path, PathName, packed_whole
from kvferryd.paths.staged import Staged
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import Bound
from kvferryd.plan.crossover import direct_is_best

__all__ = ["Flight", "Move", "Moved", "PathName", "choose", "packed_whole", "refusals"]

PATHS: dict[PathName, Path] = {path.name: path for path in (Mapped(), Staged(), Direct())}
"""In the order in which `auto` prefers them."""


def refusals(engine: Engine, peer: PeerEngine) -> dict[str, str]:
    """Every path: empty when the pair can take it, otherwise why not."""
    return {path.name.value: path.refusal(engine, peer) for path in PATHS.values()}


def choose(way: str, bound: Bound, engine: Engine, peer: PeerEngine) -> Path:
    """The path for these bytes. `way`: auto, or the path to take.

    auto: mapped where it can be had; otherwise staged for many short runs, and from memory that is slow to read
    directly, and direct for others. A forced staged falls back to the others where the pair cannot stage and nothing is
    strict. Raises KvferryError: `way_unavailable`; `cannot_stage` where one side is strict and the pair cannot stage.
    """
    if way == "auto" and not PATHS[PathName.MAPPED].refusal(engine, peer):
        return PATHS[PathName.MAPPED]
    why = {name: path.refusal(engine, peer) for name, path in PATHS.items()}
    able = [name for name in PATHS if not why[name]]
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
    if able == [PathName.STAGED, PathName.DIRECT] and not any(peer.ranks[rank].slow for rank in peer.plan.reads_from):
        best = direct_is_best(engine.kind, _runs(bound), bound.nbytes)
        return PATHS[PathName.DIRECT if best else PathName.STAGED]
    return PATHS[able[0]]


def _runs(bound: Bound) -> int:
    """How many, as if all segments were as long as the longest."""
    runs = 0
    for copy, segments in bound.pairs:
        if number := len(segments.tokens):
            runs += number * sum(len(each.source_offsets) for each in copy.patterns(int(segments.tokens.max())))
    return runs
