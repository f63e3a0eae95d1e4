"""Which way is taken: the one of which the least is expected."""

from __future__ import annotations

import pytest

from kvferryd.plan.cost import COSTS, IMPORTED, Cost, cheapest

BOTH = ("staged", "direct")


@pytest.mark.parametrize(
    ("kind", "runs", "nbytes", "way"),
    [
        ("host", 262_144, 1 << 19, "staged"), ("host", 256, 1 << 9, "direct"), ("host", 1, 1 << 26, "direct"),
        ("host", 1 << 14, 1 << 26, "direct"), ("cuda", 81_920, 671_000_000, "staged"), ("cuda", 32, 2 << 20, "direct"),
        ("cuda", 1, 671_000_000, "direct"),
    ],
)  # fmt: skip
def test_many_short_runs_are_staged_and_others_read_one_by_one(kind: str, runs: int, nbytes: int, way: str) -> None:
    assert cheapest(COSTS[kind], BOTH, runs, nbytes) == way


@pytest.mark.parametrize("costs", [COSTS["cuda"], IMPORTED])
def test_nothing_is_ever_cheaper_than_mapped(costs: dict[str, Cost]) -> None:
    """So it is taken without counting runs."""
    mapped = costs["mapped"]
    for other in costs.values():
        assert mapped.fixed <= other.fixed
        assert mapped.per_1000_runs <= other.per_1000_runs
        assert mapped.per_1000_blocks <= other.per_1000_blocks
        assert mapped.per_mb <= other.per_mb


def test_memory_that_another_process_allocated_is_staged_however_long_its_runs() -> None:
    assert cheapest(IMPORTED, BOTH, 1, 8 << 20) == "staged"
    assert cheapest(COSTS["cuda"], BOTH, 1, 8 << 20) == "direct"
