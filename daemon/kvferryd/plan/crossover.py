"""From where on reading run by run beats packing, by kind of the destination's memory (docs/benchmarks.md)."""

from __future__ import annotations

DIRECT_FROM = {"host": 4 << 10, "cuda": 1 << 20}
"""Mean bytes of a run: over cuda_ipc a descriptor costs 4 to 8 us, in which staging moves about a megabyte; on host
memory 4 KiB runs take the same time both ways, 1 KiB runs take four times as long direct."""
FEW_RUNS = {"host": 512, "cuda": 0}
"""Fewer runs than these are read one by one sooner than a slot is asked for, however short they are."""


def direct_is_best(kind: str, runs: int, nbytes: int) -> bool:
    return runs < FEW_RUNS[kind] or nbytes >= runs * DIRECT_FROM[kind]
