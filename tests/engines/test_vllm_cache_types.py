"""vLLM engines whose caches have other types: what means the same is handed over, and nothing else is read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from engines import MODEL, Pair, complete, prompt, several, tokens_of
from kvferry.manifest import encoding_of

FLAGS = Path("/proc/cpuinfo").read_text().split()
pytestmark = [
    pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(600),
    pytest.mark.skipif("avx512f" not in FLAGS, reason="vLLM's fp8 caches on a CPU need AVX-512 or AMX"),
]  # fmt: skip
TYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Two names of one type and another type, all of them torch.uint8."""
ALIKE, UNLIKE = list(permutations(TYPES[:2])), [*permutations(TYPES[1:]), (TYPES[2], TYPES[0])]
LENGTHS = (5, 33, 127, 300)


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[tuple[str, str], Pair]]:
    sides = {kind: {"flags": ["--kv-cache-dtype", kind]} for kind in TYPES}
    with several(MODEL, sides) as engines:
        yield {shape: engines.pair(*shape) for shape in (*ALIKE, *UNLIKE)}


@pytest.mark.parametrize("kinds", ALIKE, ids=" to ".join)
def test_two_names_of_one_type_hand_over(pairs: dict[tuple[str, str], Pair], kinds: tuple[str, str]) -> None:
    both = pairs[kinds]
    before = len(both.transfers())
    for length in LENGTHS:
        tokens = prompt(length, seed=20 + ALIKE.index(kinds))
        assert both.handover(tokens, max_tokens=6) == both.alone(tokens, max_tokens=6)
    assert [one.state for one in both.transfers()[before:]] == ["done"] * len(LENGTHS)


@pytest.mark.parametrize("kinds", UNLIKE, ids=" to ".join)
def test_another_type_of_the_same_width_is_refused_by_name_and_nothing_of_it_is_kept(
    pairs: dict[tuple[str, str], Pair], kinds: tuple[str, str]
) -> None:
    both, seed = pairs[kinds], 2 + UNLIKE.index(kinds)
    for length in LENGTHS:
        tokens = prompt(length, seed=seed)
        params = both.prefilled(tokens)
        assert complete(both.decode, tokens, kv_transfer_params=params).status_code == 500
        problem = next(one.error for one in reversed(both.transfers()) if one.error is not None)
        assert problem.code == "refused"
        theirs, ours = (encoding_of(kind, "vllm") for kind in kinds)
        assert f"encoding: source has {theirs}, destination has {ours}" in problem.message
        cached = tokens_of(complete(both.decode, tokens, max_tokens=6))
        assert cached == tokens_of(complete(both.decode, tokens, max_tokens=6, cache_salt=f"{length}"))
