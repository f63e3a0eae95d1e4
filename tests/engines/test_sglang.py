"""Real SGLang engines hand over to each other: through SGLang's router, between shapes, and past troubles.

Engines take minutes to start on a small machine, so each lives for several parts of this file; its order matters.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_engines import (
    START_S,
    SglangEngine,
    SglangFleet,
    SglangPair,
    generate,
    leaving,
    revoke,
    room,
    sglang_fleet,
    streamed,
    tokens_of,
)

from engines import HOST, MODEL, eventually, prompt
from kvferry.schemas import TransferState
from kvferryd.demo.fleet import Service

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]
LENGTHS = [5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 500, 512, 513, 1025, 1300]
"""16 prompts: every side of a page (16, 32) and of a chunk (512)."""
SEVERAL = [5, 33, 64, 100, 300, 513, 700, 1024]
RADIX = "--disaggregation-decode-enable-radix-cache"


@pytest.fixture(scope="module")
def fleet() -> Iterator[SglangFleet]:
    with sglang_fleet(MODEL) as started:
        yield started


@pytest.fixture(scope="module")
def single(fleet: SglangFleet) -> Service:
    """The reference engine, alone: its own code and its own attention, the same weights."""
    return _up(fleet, fleet.engine("single"))[0]


@pytest.fixture(scope="module")
def engines(fleet: SglangFleet, single: Service) -> dict[str, SglangEngine]:
    """All that start at the beginning, beside each other. dd keeps in a prefix cache what it has received."""
    prefill = fleet.sglang("p", mode="prefill", page_size=16)
    decode = fleet.sglang("d", mode="decode", page_size=32)
    ranks = fleet.sglang("dd", mode="decode", page_size=32, ranks=2, flags=[RADIX])
    _up(fleet, prefill, decode, ranks)
    return {"p": prefill, "d": decode, "dd": ranks}


@pytest.fixture(scope="module")
def router(fleet: SglangFleet, engines: dict[str, SglangEngine]) -> Service:
    return _up(fleet, fleet.sglang_router(engines["p"], engines["d"]))[0]


@pytest.fixture
def pair(engines: dict[str, SglangEngine], single: Service) -> SglangPair:
    """Pages of 16 to pages of 32, which SGLang's own backends refuse."""
    return SglangPair(engines["p"], engines["d"], single)


@pytest.fixture
def one_to_two(engines: dict[str, SglangEngine], single: Service) -> SglangPair:
    return SglangPair(engines["p"], engines["dd"], single)


@pytest.fixture(scope="module")
def two_to_one(fleet: SglangFleet, engines: dict[str, SglangEngine], single: Service) -> SglangPair:
    """Two ranks, at the bootstrap address of the engine that has died."""
    assert engines["p"].process.poll() is not None
    ranks = fleet.sglang("pp", mode="prefill", page_size=16, ranks=2, bootstrap=engines["p"].bootstrap)
    _up(fleet, ranks)
    return SglangPair(ranks, engines["d"], single)


@pytest.fixture(scope="module")
def stages_to_one(fleet: SglangFleet, two_to_one: SglangPair) -> SglangPair:
    """Two stages of a pipeline, behind the router, at the bootstrap address of the two ranks that have died."""
    assert two_to_one.prefill.process.poll() is not None
    stages = fleet.sglang("ps", mode="prefill", page_size=16, stages=2, bootstrap=two_to_one.prefill.bootstrap)
    router = fleet.sglang_router(stages, two_to_one.decode)
    _up(fleet, stages, router)
    return SglangPair(stages, two_to_one.decode, two_to_one.single, router)


def _up(fleet: SglangFleet, *services: Service) -> tuple[Service, ...]:
    asyncio.run(fleet.ready(*services, timeout_s=START_S))
    return services


def test_prompts_of_every_length_get_a_single_engines_tokens(pair: SglangPair, router: Service) -> None:
    pair.same([prompt(length) for length in LENGTHS], router=router)
    assert len(pair.decode.transfers()) == len(LENGTHS)
    assert {transfer.state for transfer in pair.decode.transfers()} == {TransferState.DONE}


def test_eight_at_once_get_a_single_engines_tokens(pair: SglangPair, router: Service) -> None:
    pair.same([prompt(length, seed=1) for length in SEVERAL], at_once=8, router=router)


def test_a_streamed_answer_has_a_single_engines_tokens(pair: SglangPair, router: Service) -> None:
    for length in (31, 600):
        tokens = prompt(length, seed=2)
        assert streamed(router, tokens) == pair.alone(tokens)


def test_a_prefix_that_prefill_has_cached_is_handed_over_with_the_rest(pair: SglangPair) -> None:
    begin = prompt(200, seed=3)
    pair.same([begin, begin + prompt(50, seed=4), begin + prompt(350, seed=5)])


def test_a_chunked_prefill_is_published_chunk_by_chunk(pair: SglangPair) -> None:
    for seed in range(60, 70):  # all of it may be there before this asks for the first time
        tokens, where = prompt(1500, seed=seed), room(pair.prefill)
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(generate, pair.prefill, tokens, **where)
            seen = set[int]()  # its last publish stays to be seen, as nobody reads it yet
            while 1500 not in seen:
                assert not prefilled.done(), prefilled.result().text
                seen |= {lease.num_tokens for lease in pair.prefill.leases()}
            moved = tokens_of(generate(pair.decode, tokens, **where))
            assert prefilled.result().status_code == 200
        if seen > {1500}:
            break
    assert seen > {1500}
    assert seen <= {512, 1024, 1500}
    assert moved == pair.alone(tokens)


@pytest.mark.long
def test_another_prompts_room_is_refused(pair: SglangPair) -> None:
    """The router gave decode the room of another prompt of the same length."""
    where = room(pair.prefill)
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, pair.prefill, prompt(40, seed=7), **where)
        decoded = generate(pair.decode, prompt(40, seed=8), **where)
        assert decoded.status_code == 500
        assert "other_prompt" in decoded.text
        assert prefilled.result().status_code == 500
    pair.same([prompt(40, seed=9)])


def test_a_room_that_is_sent_twice_is_the_first_ones(pair: SglangPair) -> None:
    _sent_twice(pair)


@pytest.mark.parametrize("decode", ["d", "dd"], ids=["one rank", "two ranks"])
def test_a_room_that_is_sent_to_decode_twice_is_the_first_ones(
    engines: dict[str, SglangEngine], single: Service, decode: str
) -> None:
    """Two answers to one prompt, one of which comes while the other waits for its KV."""
    pair = SglangPair(engines["p"], engines[decode], single)
    tokens, where, before = prompt(100, seed=42), room(pair.prefill), len(pair.decode.transfers())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(generate, pair.decode, tokens, **where)
        assert eventually(lambda: len(pair.decode.transfers()) > before)
        refused = generate(pair.decode, tokens, **where)
        assert refused.status_code == 500
        assert "receive_pending" in refused.text
        assert generate(pair.prefill, tokens, **where).status_code == 200
        assert tokens_of(first.result()) == pair.alone(tokens)
    pair.same([prompt(40, seed=43)])


def test_one_rank_hands_over_to_two(one_to_two: SglangPair) -> None:
    one_to_two.same([prompt(length, seed=20) for length in LENGTHS[::2]])
    assert {transfer.state for transfer in one_to_two.decode.transfers()} == {TransferState.DONE}


def test_one_rank_hands_over_eight_at_once_to_two(one_to_two: SglangPair) -> None:
    one_to_two.same([prompt(length, seed=21) for length in SEVERAL], at_once=8)


def test_a_prefix_that_decode_has_is_not_moved_again(one_to_two: SglangPair) -> None:
    begin = prompt(320, seed=22)
    for tokens, moved in ((begin, (0, 320)), (begin + prompt(70, seed=23), (320, 390))):
        one_to_two.same([tokens])
        assert one_to_two.decode.transfers()[-1].tokens == moved


def test_a_client_that_leaves_costs_nobody_else(pair: SglangPair, one_to_two: SglangPair) -> None:
    """Decode waits for KV that never comes, and prefill for a reader. Their pages come back."""
    for each in (pair, one_to_two):
        with leaving(each.decode, prompt(300, seed=10), **room(each.prefill)):
            assert eventually(lambda each=each: not _all_ended(each.decode))
        assert eventually(lambda each=each: _all_ended(each.decode))
        each.same([prompt(300, seed=11)])
    assert eventually(lambda: not pair.prefill.leases())
    _leaves_prefill(pair)


def test_a_prefill_engine_that_dies_fails_its_own_requests_and_decode_lives(
    pair: SglangPair, one_to_two: SglangPair
) -> None:
    _dies(pair, one_to_two)
    refused = generate(pair.decode, prompt(100, seed=14), **room(pair.prefill))
    assert refused.status_code == 500
    assert f"no prefill engine answers at {HOST}:{pair.prefill.bootstrap}" in refused.text


@pytest.mark.long
def test_two_ranks_at_its_address_hand_over_to_one(two_to_one: SglangPair) -> None:
    before = len(two_to_one.decode.transfers())
    two_to_one.same([prompt(length, seed=30) for length in LENGTHS[::2]])
    assert {transfer.state for transfer in two_to_one.decode.transfers()[before:]} == {TransferState.DONE}


@pytest.mark.long
def test_two_ranks_hand_over_eight_at_once_to_one(two_to_one: SglangPair) -> None:
    two_to_one.same([prompt(length, seed=31) for length in SEVERAL], at_once=8)
    assert eventually(lambda: not two_to_one.prefill.leases())


@pytest.mark.long
def test_a_room_that_is_sent_twice_to_two_ranks_is_the_first_ones(two_to_one: SglangPair) -> None:
    _sent_twice(two_to_one)


@pytest.mark.long
def test_two_ranks_that_die_fail_what_waited_for_them(two_to_one: SglangPair) -> None:
    _dies(two_to_one)


@pytest.mark.long
def test_two_stages_hand_over_to_one(stages_to_one: SglangPair) -> None:
    stages_to_one.same([prompt(length, seed=50) for length in LENGTHS[::2]])


@pytest.mark.long
def test_two_stages_hand_over_eight_at_once_to_one(stages_to_one: SglangPair) -> None:
    stages_to_one.same([prompt(length, seed=51) for length in SEVERAL], at_once=8)
    assert eventually(lambda: not stages_to_one.prefill.leases())


@pytest.mark.long
def test_a_room_that_is_sent_twice_to_two_stages_is_the_first_ones(stages_to_one: SglangPair) -> None:
    _sent_twice(stages_to_one)


@pytest.mark.long
def test_a_room_whose_lease_has_ended_at_one_stage_is_taken_at_all(stages_to_one: SglangPair) -> None:
    """The next request there is refused at once, and nobody waits for a stage that refuses alone."""
    prefill, tokens, where = stages_to_one.prefill, prompt(100, seed=52), room(stages_to_one.prefill)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(generate, prefill, tokens, **where)
        assert eventually(lambda: len(prefill.leases()) == len(prefill.daemons))
        for left, daemon in enumerate(prefill.daemons):
            refused = generate(prefill, tokens, **where)
            assert refused.status_code == 500
            assert "room_taken" in refused.text
            revoke(daemon, f"room-{where['bootstrap_room']}")
            assert eventually(lambda left=left: len(prefill.leases()) == 1 - left)
        assert first.result().status_code == 500
    stages_to_one.same([tokens])


@pytest.mark.long
def test_a_client_that_leaves_costs_a_pipeline_nothing(stages_to_one: SglangPair) -> None:
    with leaving(stages_to_one.decode, prompt(300, seed=53), **room(stages_to_one.prefill)):
        assert eventually(lambda: not _all_ended(stages_to_one.decode))
    assert eventually(lambda: _all_ended(stages_to_one.decode))
    _leaves_prefill(stages_to_one)
    stages_to_one.same([prompt(300, seed=54)])


@pytest.mark.long
def test_a_pipeline_that_dies_fails_what_waited_for_it(stages_to_one: SglangPair) -> None:
    _dies(stages_to_one)


def _leaves_prefill(pair: SglangPair) -> None:
    """A client, while prefill waits for a reader."""
    with leaving(pair.prefill, prompt(300, seed=12), **room(pair.prefill)):
        assert eventually(lambda: len(pair.prefill.leases()) == len(pair.prefill.daemons))
    assert eventually(lambda: not pair.prefill.leases())


def _dies(*pairs: SglangPair) -> None:
    """Their prefill engine, for which a request waits at each decode engine."""
    dead = pairs[0].prefill
    with ThreadPoolExecutor(len(pairs)) as pool:
        waiting = []
        for each in pairs:
            waiting.append(pool.submit(generate, each.decode, prompt(100, seed=13), **room(dead)))
            assert eventually(lambda each=each: not _all_ended(each.decode))
        dead.signal(signal.SIGKILL)
        dead.process.wait()
        assert {answer.result().status_code for answer in waiting} == {500}


def _sent_twice(pair: SglangPair) -> None:
    """Neither another prompt nor the same one takes the room or ends it; when it is free it can be sent again."""
    tokens, where = prompt(100, seed=40), room(pair.prefill)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(generate, pair.prefill, tokens, **where)
            assert eventually(lambda: len(pair.prefill.leases()) == len(pair.prefill.daemons))
            for other in (prompt(100, seed=41), tokens):
                refused = generate(pair.prefill, other, **where)
                assert refused.status_code == 500
                assert "room_taken" in refused.text
            assert tokens_of(generate(pair.decode, tokens, **where)) == pair.alone(tokens)
            assert first.result().status_code == 200


def _all_ended(engine: SglangEngine) -> bool:
    return all(transfer.state.ended for transfer in engine.transfers())
