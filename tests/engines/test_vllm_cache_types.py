"""vLLM engines whose caches have other types: what means the same is handed over, and nothing else is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import MODEL, Pair, complete, prompt, several, tokens_of

FLAGS = Path("/proc/cpuinfo").read_text().split()
pytestmark = [
    pytest.mark.engines, pytest.mark.timeout(600),
    pytest.mark.skipif("avx512f" not in FLAGS, reason="vLLM's fp8 caches on a CPU need AVX-512 or AMX"),
]  # fmt: skip
TYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Two names of one type and another type, all of them torch.uint8."""
LENGTHS = (5, 33, 127, 300)


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[tuple[str, str], Pair]]:
    sides = {kind: {"flags": ["--kv-cache-dtype", kind]} for kind in TYPES}
    with several(MODEL, sides) as engines:
        yield {shape: engines.pair(*shape) for shape in (("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"))}


def test_two_names_of_one_type_hand_over(pairs: dict[tuple[str, str], Pair]) -> None:
    both = pairs["fp8", "fp8_e4m3"]
    for length in LENGTHS:
        tokens = prompt(length, seed=1)
        assert both.handover(tokens, max_tokens=6) == both.alone(tokens, max_tokens=6)
    assert {one.state for one in both.transfers()} == {"done"}


def test_another_type_of_the_same_width_is_refused_by_name_and_nothing_of_it_is_kept(
    pairs: dict[tuple[str, str], Pair],
) -> None:
    both = pairs["fp8_e4m3", "fp8_e5m2"]
    for length in LENGTHS:
        tokens = prompt(length, seed=2)
        params = both.prefilled(tokens)
        assert complete(both.decode, tokens, kv_transfer_params=params).status_code == 500
        problem = next(one.error for one in reversed(both.transfers()) if one.error is not None)
        assert problem.code == "refused"
        assert "encoding" in problem.message and "fp8_e4m3fn" in problem.message and "fp8_e5m2" in problem.message
        cached = tokens_of(complete(both.decode, tokens, max_tokens=6))
        assert cached == tokens_of(complete(both.decode, tokens, max_tokens=6, cache_salt=f"{length}"))
