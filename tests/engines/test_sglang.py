"""A real SGLang prefill engine hands over to a real SGLang decode engine, behind SGLang's router."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from sglang_engines import SglangPair, generate, same, sglang_pair, streamed, tokens_of

from engines import HOST, MODEL, eventually, prompt
from kvferry.schemas import TransferState

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
LENGTHS = [5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 500, 512, 513, 1025, 1300]
"""16 prompts: every side of a page (16, 32) and of a chunk (512)."""


@pytest.fixture(scope="module")
def pair() -> Iterator[SglangPair]:
    """Pages of 16 to pages of 32, which SGLang's own backends refuse."""
    with sglang_pair(MODEL, prefill={"page_size": 16}) as started:
        yield started


def test_prompts_of_every_length_get_a_single_engines_tokens(pair: SglangPair) -> None:
    same(pair, [prompt(length) for length in LENGTHS])
    assert len(pair.transfers()) == len(LENGTHS)
    assert {transfer.state for transfer in pair.transfers()} == {TransferState.DONE}


def test_eight_at_once_get_a_single_engines_tokens(pair: SglangPair) -> None:
    same(pair, [prompt(length, seed=1) for length in (5, 33, 64, 100, 300, 513, 700, 1024)], at_once=8)


def test_a_streamed_answer_has_a_single_engines_tokens(pair: SglangPair) -> None:
    for length in (31, 600):
        tokens = prompt(length, seed=2)
        assert streamed(pair.router, tokens) == tokens_of(generate(pair.engines["alone"], tokens))


def test_a_prefix_that_prefill_has_cached_is_handed_over_with_the_rest(pair: SglangPair) -> None:
    begin = prompt(200, seed=3)
    same(pair, [begin, begin + prompt(50, seed=4), begin + prompt(350, seed=5)])


def test_a_chunked_prefill_is_published_chunk_by_chunk(pair: SglangPair) -> None:
    tokens, room = prompt(1500, seed=6), pair.room()
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, pair.engines["p"], tokens, **room)
        seen = set[int]()  # nobody reads it yet, so that its last publish stays to be seen
        while 1500 not in seen:
            assert not prefilled.done(), prefilled.result().text
            seen |= {lease.num_tokens for lease in pair.leases()}
        moved = tokens_of(generate(pair.engines["d"], tokens, **room))
        assert prefilled.result().status_code == 200
    assert seen == {512, 1024, 1500}
    assert moved == tokens_of(generate(pair.engines["alone"], tokens))


def test_another_prompts_room_is_refused(pair: SglangPair) -> None:
    """The router gave decode the room of another prompt of the same length."""
    room = pair.room()
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(generate, pair.engines["p"], prompt(40, seed=7), **room)
        decoded = generate(pair.engines["d"], prompt(40, seed=8), **room)
        assert decoded.status_code == 500
        assert "other_prompt" in decoded.text
        assert prefilled.result().status_code == 500
    same(pair, [prompt(40, seed=9)])


def test_a_client_that_leaves_costs_nobody_else(pair: SglangPair) -> None:
    """Decode waits for KV that never comes, and its client has gone: its pages come back."""
    with pytest.raises(httpx.ReadTimeout):
        generate(pair.engines["d"], prompt(300, seed=10), timeout_s=1.0, **pair.room())
    assert eventually(lambda: all(transfer.state.ended for transfer in pair.transfers()))
    same(pair, [prompt(300, seed=11)])


def test_every_lease_ends(pair: SglangPair) -> None:
    assert eventually(lambda: not pair.leases())


def test_a_prefill_engine_that_dies_fails_its_own_requests_and_decode_lives(pair: SglangPair) -> None:
    """The last test of the module: nothing prefills any more."""
    dead, decode = pair.engines["p"], pair.engines["d"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, decode, prompt(100, seed=12), **pair.room())
        assert eventually(lambda: not all(transfer.state.ended for transfer in pair.transfers()))
        dead.signal(signal.SIGKILL)
        dead.process.wait()
        assert waiting.result().status_code == 500
    refused = generate(decode, prompt(100, seed=13), **pair.room())
    assert refused.status_code == 500
    assert decode.process.poll() is None
    assert f"no prefill engine answers at {HOST}:{dead.bootstrap}" in refused.text
