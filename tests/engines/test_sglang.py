"""A real SGLang prefill engine hands over to a real SGLang decode engine, behind SGLang's router."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_engines import SglangPair, generate, same, sglang_pair, streamed, tokens_of

from engines import MODEL, eventually, prompt
from kvferry.schemas import LeaseState, TransferState

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
    same(pair, [prompt(1500, seed=6)])
    lease = next(lease for lease in pair.leases() if lease.num_tokens == 1500)
    assert lease.version >= 3


def test_another_prompts_room_is_refused(pair: SglangPair) -> None:
    """The router gave decode the room of another prompt of the same length."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.engines["p"].bootstrap, "bootstrap_room": 77}
    with ThreadPoolExecutor(2) as pool:
        prefilled = pool.submit(generate, pair.engines["p"], prompt(40, seed=7), **room)
        decoded = generate(pair.engines["d"], prompt(40, seed=8), **room)
        assert decoded.status_code == 500
        assert "other_prompt" in decoded.text
        assert prefilled.result().status_code == 500
    same(pair, [prompt(40, seed=9)])


def test_every_lease_ends(pair: SglangPair) -> None:
    assert eventually(lambda: all(lease.state in (LeaseState.RELEASED, LeaseState.REVOKED) for lease in pair.leases()))
