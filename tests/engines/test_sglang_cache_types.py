"""Cache types between real SGLang engines: equal ones are moved as any other, another one is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sglang_engines import START_S, SglangEngine, SglangPair, generate, leaving, room, sglang_fleet

from engines import MODEL, eventually, prompt
from kvferry.schemas import TransferState

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(3000)]
LENGTHS = [5, 31, 33, 64, 129, 513]
"""Both sides of a page (16, 32) and of a chunk (512)."""
BF16 = ("--kv-cache-dtype", "bf16")
"""The model computes in float32. SGLang has fp8 caches on CPUs with AMX only."""


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, SglangEngine]]:
    """plain: its cache is of the model's own dtype."""
    with sglang_fleet(MODEL) as fleet:
        started = {
            "prefill": fleet.sglang("p", mode="prefill", page_size=16, flags=BF16),
            "plain": fleet.sglang("plain", mode="prefill", page_size=16),
            "decode": fleet.sglang("d", mode="decode", page_size=32, flags=BF16),
            "single": fleet.sglang("single", mode="null", flags=BF16),
        }
        asyncio.run(fleet.ready(*started.values(), timeout_s=START_S))
        yield started


def test_a_type_that_is_not_the_models_is_handed_over_with_a_single_engines_tokens(
    engines: dict[str, SglangEngine],
) -> None:
    pair = SglangPair(engines["prefill"], engines["decode"], engines["single"])
    pair.same([prompt(length) for length in LENGTHS])
    assert [transfer.state for transfer in pair.decode.transfers()] == [TransferState.DONE] * len(LENGTHS)


def test_another_cache_type_is_refused_by_name_and_decode_goes_on(engines: dict[str, SglangEngine]) -> None:
    """Before a daemon is asked: rank 0 of prefill says at its bootstrap address what its cache holds."""
    plain, decode = engines["plain"], engines["decode"]
    before, where = len(decode.transfers()), room(plain)
    with leaving(plain, prompt(64), **where):
        refused = generate(decode, prompt(64), **where)
    assert refused.status_code == 500
    for said in ("other_cache_type", "auto (fp32)", "bf16 (bf16)"):
        assert said in refused.text
    assert len(decode.transfers()) == before
    SglangPair(engines["prefill"], decode, engines["single"]).same([prompt(100, seed=1)])
    assert eventually(lambda: not engines["prefill"].leases())
