"""The longest wait of a transfer, in a sentence, and the requests that waited for the same."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.schemas import Awaited, RankTransfer, Wait
from kvferryd.paths.move import LEAST_S

HELPS = {
    Awaited.SLOT: "raise arena_mb, or order fewer transfers at once",
    Awaited.PACK: "see whether its arena is full (raise arena_mb there) or its GPU or CPU busy",
}
"""The remedy for a wait that was long, and for one that a deadline has ended."""


def longest(slowest: RankTransfer, own: RankTransfer, created_at: float) -> Wait | None:
    """The longest wait of a request, by the share of its slowest rank and that of the rank which leads. The wait for a
    rank is named where that rank's own waits do not explain it. An order is late where it comes late to the leader."""
    if slowest.rank == own.rank:
        return next(iter(own.waits), None)
    waits = [each for each in slowest.waits if each.what is not Awaited.ORDER]
    waits += [each for each in own.waits if each.what is Awaited.ORDER]
    if slowest.took_ms is not None and own.took_ms is not None:
        ms, began_at = slowest.took_ms - own.took_ms, created_at + own.phases_ms.get("total", 0.0) / 1e3
        if ms >= 1e3 * LEAST_S and ms > 2 * max((each.ms for each in waits), default=0.0):
            return Wait(what=Awaited.RANK, on=f"rank {slowest.rank}", began_at=round(began_at, 3), ms=round(ms, 3))
    return max(waits, key=lambda wait: wait.ms, default=None)


def sentence(wait: Wait, source: str, engine: str, rank: int | None = None) -> str:
    """A wait in one sentence, with what helps. source, engine: ids of the engine that publishes and of the one that
    receives. rank: that waited, of an engine of several."""
    took, at = _span(wait.ms), f" on rank {rank}" if rank is not None else ""
    part = f", most of it `{wait.part}`" if wait.part else ""
    match wait.what:
        case Awaited.ORDER:
            said = f"waited {took} for the router's order"
            helps = "let the router order at this engine's daemon when prefill begins"
        case Awaited.RESERVATION:
            said = f"waited {took} for engine {engine} to reserve blocks"
            helps = "see that engine's queue and its free blocks"
        case Awaited.HANDSHAKE:
            said = f"waited {took} for the handshake with engine {source} at {wait.on}{part}"
            helps = "name it in known_peers, so that no request waits for that"
        case Awaited.LEASE:
            said = f"waited {took} for the daemon at {wait.on} to answer"
            helps = "see whether that daemon stood still (its CPU limit, a pause of the machine), and the network"
        case Awaited.PUBLISH:
            said = f"waited {took} for engine {source} at {wait.on} to publish"
            helps = "see that prefill's queue and speed"
        case Awaited.FENCE:
            said = f"waited {took} for the fence of engine {source} at {wait.on}"
            helps = (
                "it had published, and its GPU had not written the blocks: see the length of its steps, and that GPU"
            )
        case Awaited.SLOT:
            said = f"waited {took} for a slot of its staging arena"
            helps = HELPS[Awaited.SLOT]
        case Awaited.PACK:
            said = f"waited {took} for the daemon at {wait.on} to pack"
            helps = HELPS[Awaited.PACK]
        case Awaited.RANK:
            said = f"waited {took} for {wait.on} of engine {engine}"
            helps = "see whether that rank's daemon stood still, and its share of the record"
    return f"{said}{at} -> {helps}"


def others(wait: Wait, records: Iterable[tuple[str, Wait | None]]) -> list[str]:
    """Requests that waited longest for the same thing while this one did, or within a second of it. records: request
    ids with the longest wait of each."""
    end = wait.began_at + wait.ms / 1e3
    return [
        request_id
        for request_id, other in records
        if other is not None and (other.what, other.on) == (wait.what, wait.on)
        and other.began_at <= end + 1 and wait.began_at <= other.began_at + other.ms / 1e3 + 1
    ]  # fmt: skip


def _span(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1e3 else f"{ms:.0f} ms"
