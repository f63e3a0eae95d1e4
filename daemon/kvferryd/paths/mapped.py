"""Mapped: one kernel on this GPU reads the peer's memory and writes ours, in a single pass."""

from __future__ import annotations

from kvferryd.copy import Batch, mapped, moves, zeros
from kvferryd.engine import Engine
from kvferryd.paths.move import Move, Moved, PathName
from kvferryd.peers.peer import PeerEngine


class Mapped:
    name = PathName.MAPPED

    def refusal(self, engine: Engine, peer: PeerEngine) -> str:
        if engine.strict:
            return "this daemon is strict"
        return next((f"rank {rank}: {why}" for rank, why in peer.unmapped.items()), "")

    async def move(self, move: Move) -> Moved:
        runner = move.engine.runner
        assert runner is not None
        sources = move.peer.mapped_addresses()
        own = move.engine.addresses
        bound = move.bound

        def batches() -> list[Batch]:
            return mapped(moves(bound), sources, own) + zeros(bound.left, runner.zeros, own)

        copy = runner.start(bound.nbytes + bound.left.nbytes, batches, move.priority, runner.programs)
        move.flights.append(copy)
        await copy.done
        return Moved(move.ranks)
