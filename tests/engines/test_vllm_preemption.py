"""Two vLLM engines with too few blocks for what they are asked: requests are preempted on either side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engines import Pair, cache_usage, complete, eventually, metric, pair, prompt, tokens_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
FEW = ("--num-gpu-blocks-override", "44", "--max-model-len", "1024", "--max-num-batched-tokens", "128")


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    with pair(prefill={"flags": FEW, "options": {"progressive": True}}, decode={"flags": FEW}) as both:
        yield both


def test_requests_that_are_preempted_end_with_the_same_tokens(engines: Pair) -> None:
    prompts = [prompt(250 + i, seed=i) for i in range(8)]
    alone = [engines.alone(tokens, max_tokens=120) for tokens in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda tokens: engines.handover(tokens, max_tokens=120), prompts)) == alone
    assert metric(engines.decode, "num_preemptions_total") > 0


def test_a_prefill_that_is_preempted_between_its_chunks(engines: Pair) -> None:
    """Others decode beside it and take its blocks; what it had published of them is withdrawn."""
    before = metric(engines.prefill, "num_preemptions_total")
    others = [prompt(150, seed=20 + i) for i in range(4)]
    prompts = [prompt(700, seed=30 + i) for i in range(12)]
    with ThreadPoolExecutor(8) as pool:
        decoding = [pool.submit(complete, engines.prefill, tokens, max_tokens=500) for tokens in others]
        moved = [pool.submit(engines.handover, tokens) for tokens in prompts]
        tokens_moved = [one.result() for one in moved]
        assert all(tokens_of(one.result()) for one in decoding)
    assert tokens_moved == [engines.alone(tokens) for tokens in prompts]
    assert metric(engines.prefill, "num_preemptions_total") > before


def test_nothing_is_left(engines: Pair) -> None:
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert eventually(lambda: cache_usage(engines.decode) == 0)
