"""Two vLLM engines with too few blocks for what they are asked: requests are preempted on either side.

Both have the connector in vLLM's MultiConnector, beside vLLM's OffloadingConnector, which keeps what leaves the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engines import Pair, cache_usage, complete, eventually, metric, missed, pair, prompt, tokens_of
from kvferryd.demo.fleet import Service

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(400)]
FEW = ("--num-gpu-blocks-override", "44", "--max-model-len", "1024", "--max-num-batched-tokens", "128")


OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec", "spec_module_path": "host_offloading", "cpu_bytes_to_use": 256 << 20,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    side: dict[str, Any] = {"flags": FEW, "beside": [OFFLOADING]}
    with pair(prefill=side | {"options": {"progressive": True}}, decode=side) as both:
        yield both


def pushed_out(engine: Service, seed: int) -> None:
    """Earlier prompts leave the cache."""
    for i in range(3):
        complete(engine, prompt(900, seed=seed + i))


def test_what_the_other_connector_may_have_kept_is_read_all_the_same(engines: Pair) -> None:
    """Ours is asked first, and reads all that decode's own cache has not."""
    first = prompt(320, seed=70)
    engines.handover(first)
    pushed_out(engines.decode, seed=71)
    longer = first + prompt(300, seed=74)
    assert engines.handover(longer) == engines.alone(longer)
    assert engines.transfers()[-1].tokens == (0, 640)


def test_what_the_other_connector_has_kept_is_loaded_again(engines: Pair) -> None:
    """KV was read from the other engine, has left the cache since, and is asked for without kv_transfer_params."""
    tokens = prompt(320, seed=90)
    alone = engines.handover(tokens)
    pushed_out(engines.decode, seed=91)
    loaded, moved = metric(engines.decode, "external_prefix_cache_hits_total"), len(engines.transfers())
    assert tokens_of(complete(engines.decode, tokens)) == alone == engines.alone(tokens)
    assert metric(engines.decode, "external_prefix_cache_hits_total") - loaded >= 288, "whole blocks but the last"
    assert len(engines.transfers()) == moved


def test_a_request_that_is_refused_fails_alone(engines: Pair) -> None:
    tokens = prompt(300, seed=80)
    assert complete(engines.decode, tokens, kv_transfer_params={"do_remote_prefill": True}).status_code >= 400
    assert engines.handover(tokens) == engines.alone(tokens)
    assert eventually(lambda: missed(engines.decode, "refused") == 1)


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
