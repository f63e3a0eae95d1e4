"""Real SGLang servers of several DP ranks, each an engine of its own with a daemon of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_engines import START_S, SglangEngine, SglangFleet, SglangPair, generate, room, sglang_fleet, tokens_of

from engines import MODEL, prompt
from kvferry.schemas import TransferState
from kvferryd.demo.fleet import Service

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(3000)]
LENGTHS = [5, 33, 64, 300, 513, 700]


@pytest.fixture(scope="module")
def fleet() -> Iterator[SglangFleet]:
    with sglang_fleet(MODEL) as started:
        yield started


@pytest.fixture(scope="module")
def two_to_two(fleet: SglangFleet) -> SglangPair:
    """Two DP ranks to two."""
    prefill = fleet.sglang("p", mode="prefill", page_size=16, dp=2)
    decode = fleet.sglang("d", mode="decode", page_size=32, dp=2)
    single = fleet.engine("single")
    asyncio.run(fleet.ready(single, prefill, decode, timeout_s=START_S))
    return SglangPair(prefill, decode, single)


@pytest.fixture(scope="module")
def router(fleet: SglangFleet, two_to_two: SglangPair) -> Service:
    started = fleet.sglang_router(two_to_two.prefill, two_to_two.decode)
    asyncio.run(fleet.ready(started, timeout_s=START_S))
    return started


@pytest.fixture(scope="module")
def others(fleet: SglangFleet, two_to_two: SglangPair) -> tuple[SglangPair, SglangPair]:
    """One DP rank to two, and two DP ranks to one, of two ranks."""
    prefill = fleet.sglang("p1", mode="prefill", page_size=16)
    decode = fleet.sglang("d1", mode="decode", page_size=32, ranks=2)
    asyncio.run(fleet.ready(prefill, decode, timeout_s=START_S))
    single = two_to_two.single
    return SglangPair(prefill, two_to_two.decode, single), SglangPair(two_to_two.prefill, decode, single)


def test_a_router_that_chooses_no_dp_rank_gets_a_single_engines_tokens(two_to_two: SglangPair, router: Service) -> None:
    """Prefill takes a room by its number, decode one request after another."""
    two_to_two.same([prompt(length) for length in LENGTHS], router=router)
    two_to_two.same([prompt(length, seed=1) for length in LENGTHS], router=router, at_once=6)
    assert all(sources(two_to_two.decode, dp_rank) for dp_rank in (0, 1))


def test_decode_reads_at_the_dp_rank_that_is_named(two_to_two: SglangPair) -> None:
    for prefill, decode in ((0, 0), (0, 1), (1, 0), (1, 1)):
        tokens, where = prompt(100, seed=2 + prefill), room(two_to_two.prefill) | {"disagg_prefill_dp_rank": prefill}
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(generate, two_to_two.prefill, tokens, routed_dp_rank=prefill, **where)
            moved = generate(two_to_two.decode, tokens, routed_dp_rank=decode, **where)
            assert prefilled.result().status_code == 200, prefilled.result().text
        assert tokens_of(moved) == two_to_two.alone(tokens)
        assert sources(two_to_two.decode, decode)[-1] == f"p-dp{prefill}"


def test_a_dp_rank_that_decode_would_not_find_is_refused(two_to_two: SglangPair) -> None:
    """On prefill, one that is not told to decode; on decode, one that there is not."""
    where = room(two_to_two.prefill)
    other = 1 - where["bootstrap_room"] % 2
    refused = generate(two_to_two.prefill, prompt(40, seed=4), routed_dp_rank=other, **where)
    assert refused.status_code == 500
    assert "other_dp_rank" in refused.text
    refused = generate(two_to_two.decode, prompt(40, seed=4), disagg_prefill_dp_rank=2, **where)
    assert refused.status_code == 500
    assert "unknown_dp_rank" in refused.text


def test_numbers_of_dp_ranks_may_differ(others: tuple[SglangPair, SglangPair]) -> None:
    for pair in others:
        pair.same([prompt(length, seed=5) for length in LENGTHS])
        pair.same([prompt(length, seed=6) for length in LENGTHS], at_once=6)
    assert {"p-dp0", "p-dp1"} == set(sources(others[1].decode, 0))


def sources(decode: SglangEngine, dp_rank: int) -> list[str]:
    """The engines from which a DP rank of decode has read, the last one last."""
    transfers = decode.transfers(dp_rank)
    assert {each.state for each in transfers} <= {TransferState.DONE}
    return [each.source.engine_id for each in transfers if each.source]
