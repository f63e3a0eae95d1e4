"""vLLM and the reference engine: two programs, two attention implementations, two layouts, one model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engines import MODEL, START_S, Engines, Pair, complete, fleet_of, prompt, tokens_of
from kvferry.reference.config import ModelSource

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(400)]
LENGTHS = [5, 31, 33, 100, 257, 513, 1000]


@pytest.fixture(scope="module")
def both() -> Iterator[Pair]:
    """vLLM in blocks of 32, keys transposed in each; the reference engine with two ranks, in blocks of 24."""
    with fleet_of(Engines) as fleet:
        first, second = fleet.daemons("v", 1), fleet.daemons("r", 2)
        asyncio.run(fleet.ready(*first, *second, timeout_s=60))
        folder = fleet.model()
        same = {"fingerprint": ModelSource(MODEL).fingerprint()}
        vllm = fleet.vllm("v", folder, first, options=same)
        reference = fleet.engine("r", tp=2, layout="cross_layer", block_size=24, daemons=second)
        asyncio.run(fleet.ready(vllm, reference, timeout_s=START_S))
        yield Pair(fleet, vllm, reference, first, second)


@pytest.fixture(params=["vLLM to reference", "reference to vLLM"])
def way(request: pytest.FixtureRequest, both: Pair) -> Pair:
    if request.param == "vLLM to reference":
        return both
    return Pair(both.fleet, both.decode, both.prefill, both.decode_daemons, both.prefill_daemons)


def test_the_tokens_are_those_of_either_engine_alone(way: Pair) -> None:
    for length in LENGTHS:
        tokens = prompt(length, seed=len(way.prefill_daemons))
        moved = way.handover(tokens)
        assert moved == way.alone(tokens)
        assert way.transfers()[-1].state == "done"


def test_several_at_once(way: Pair) -> None:
    prompts = [prompt(40 + 90 * i, seed=7 + len(way.prefill_daemons)) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(way.handover, prompts)) == list(pool.map(way.alone, prompts))


def test_another_prompt_is_refused_and_its_own_is_not(way: Pair) -> None:
    """Both compute the same digest, of tokens that one has published and the other expects."""
    first, other = (prompt(150, seed=20 + i + len(way.prefill_daemons)) for i in range(2))
    params = way.prefilled(first)
    assert complete(way.decode, other, kv_transfer_params=params).status_code >= 400
    assert way.transfers()[-1].state == "failed"
    assert tokens_of(complete(way.decode, other)) == way.alone(other)
    assert tokens_of(complete(way.decode, first, kv_transfer_params=params)) == way.alone(first)
