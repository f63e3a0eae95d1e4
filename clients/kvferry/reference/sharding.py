"""Which heads and columns a tensor-parallel rank holds. Nothing has to divide evenly."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import Malformed
from kvferry.reference.config import ModelConfig


def share(total: int, rank: int, size: int) -> range:
    """The rank's part of `total` positions; the first ranks take one more where it does not divide."""
    whole, extra = divmod(total, size)
    start = rank * whole + min(rank, extra)
    return range(start, start + whole + (rank < extra))


@dataclass(frozen=True, slots=True)
class RankShard:
    """Global ranges of one rank."""

    kv_heads: range
    heads: range
    columns: range
    """Of the MLP's intermediate size."""

    @classmethod
    def of(cls, config: ModelConfig, rank: int, tp: int) -> RankShard:
        """6 KV heads over 4 ranks: 2, 2, 1, 1. With more ranks than KV heads, each rank holds one KV head and the
        ranks that hold the same one share out its query heads. Raises KvferryError for more ranks than query heads."""
        per_kv = config.num_heads // config.num_kv_heads
        if tp > min(config.num_heads, config.intermediate_size):
            raise Malformed(
                "bad_option", f"{tp} ranks for {config.num_heads} query heads leave a rank without work",
                field="tp", value=tp, remedy=f"use at most {config.num_heads} ranks",
            )  # fmt: skip
        columns = share(config.intermediate_size, rank, tp)
        if tp <= config.num_kv_heads:
            kv = share(config.num_kv_heads, rank, tp)
            return cls(kv, range(kv.start * per_kv, kv.stop * per_kv), columns)
        kv_head = rank * config.num_kv_heads // tp
        holders = [other for other in range(tp) if other * config.num_kv_heads // tp == kv_head]
        queries = share(per_kv, rank - holders[0], len(holders))
        first = kv_head * per_kv
        return cls(range(kv_head, kv_head + 1), range(first + queries.start, first + queries.stop), columns)
