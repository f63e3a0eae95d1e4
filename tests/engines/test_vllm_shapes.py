"""vLLM engines that differ: in block size, in tensor parallelism, in both; and layers with a sliding window."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from engines import LENGTHS, MODEL, Pair, Several, cache_usage, eventually, handed_over, of_workers, prompt, several

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
DIVISIBLE = dataclasses.replace(MODEL, intermediate_size=960, vocab_size=576)
"""A model that 2 and 3 divide, as vLLM wants of every dimension that it splits."""
SLIDING = dataclasses.replace(DIVISIBLE, window=100, sliding=(True, False, True, False))
SIDES = {"TP1-32": {"block_size": 32}, "TP2-64": {"block_size": 64, "ranks": 2}}
"""Keyed by TP and block size."""
MORE_SIDES = SIDES | {"TP1-96": {"block_size": 96}, "TP3-32": {"block_size": 32, "ranks": 3}}
SHAPES = [("TP2-64", "TP1-32"), ("TP1-32", "TP2-64")]
MORE_SHAPES = [("TP1-32", "TP1-96"), ("TP1-96", "TP1-32"), ("TP2-64", "TP3-32")]
PIPELINED = {"TP1-32": {"block_size": 32}, "PP2-64": {"block_size": 64, "ranks": 2, "stages": 2}}


def named(shape: tuple[str, str]) -> str:
    return " to ".join(shape)


@pytest.fixture(scope="module")
def plain() -> Iterator[Several]:
    with several(DIVISIBLE, SIDES) as engines:
        yield engines


@pytest.fixture(scope="module")
def more() -> Iterator[Several]:
    with several(DIVISIBLE, MORE_SIDES) as engines:
        yield engines


@pytest.fixture(scope="module")
def windowed() -> Iterator[Several]:
    with several(SLIDING, SIDES) as engines:
        yield engines


@pytest.fixture(params=[*SHAPES, *(pytest.param(shape, marks=pytest.mark.long) for shape in MORE_SHAPES)], ids=named)
def engines(request: pytest.FixtureRequest) -> Pair:
    several: Several = request.getfixturevalue("plain" if request.param in SHAPES else "more")
    return several.pair(*request.param)


@pytest.fixture(params=SHAPES, ids=named)
def sliding(request: pytest.FixtureRequest, windowed: Several) -> Pair:
    return windowed.pair(*request.param)


def read_whole(engines: Pair, prompts: list[list[int]], at_once: int) -> None:
    before = len(engines.transfers())
    handed_over(engines, prompts, at_once, max_tokens=6)
    moved = engines.transfers()[before:]
    assert [one.state for one in moved] == ["done"] * len(prompts)
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert eventually(lambda: cache_usage(engines.decode) == 0)


@pytest.mark.long
def test_every_prompt_alone(engines: Pair, request: pytest.FixtureRequest) -> None:
    read_whole(engines, fresh(request), at_once=1)


def test_eight_at_once(engines: Pair, request: pytest.FixtureRequest) -> None:
    read_whole(engines, fresh(request), at_once=8)


@pytest.mark.long
def test_a_sliding_window_alone(sliding: Pair, request: pytest.FixtureRequest) -> None:
    read_whole(sliding, fresh(request), at_once=1)


@pytest.mark.long
def test_a_sliding_window_eight_at_once(sliding: Pair, request: pytest.FixtureRequest) -> None:
    read_whole(sliding, fresh(request), at_once=8)


@pytest.mark.long
def test_a_pipeline_of_two_stages_hands_over_to_one_rank_and_back(request: pytest.FixtureRequest) -> None:
    """Each stage publishes its own layers when they are computed; the other way each reads its own."""
    with several(DIVISIBLE, PIPELINED) as both:
        of_workers(both.engines["PP2-64"], "make_room_between_stages")
        for at, (prefill, decode) in enumerate((("PP2-64", "TP1-32"), ("TP1-32", "PP2-64"))):
            prompts = [prompt(length, seed=hash_of(request.node.name) + at) for length in LENGTHS]
            read_whole(both.pair(prefill, decode), prompts, at_once=8)


def fresh(request: pytest.FixtureRequest) -> list[list[int]]:
    """32 prompts that no engine has seen: the tests share engines, and what prefix caches hold is not moved."""
    return [prompt(length, seed=hash_of(request.node.name)) for length in LENGTHS]


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()) % 1_000_003


def test_a_shared_prefix_is_moved_once(plain: Several) -> None:
    engines = plain.pair("TP2-64", "TP1-32")
    shared = prompt(200, seed=1)
    handed_over(engines, [shared])
    handed_over(engines, [shared + prompt(10 + 70 * i, seed=2) for i in range(6)], at_once=6)
    assert all(moved.tokens is not None and moved.tokens[0] >= 192 for moved in engines.transfers()[-6:])


@pytest.mark.long
@pytest.mark.parametrize("shape", [("TP1-32", "TP3-32"), ("TP3-32", "TP1-32")], ids=named)
def test_decode_holds_what_prefill_computed_bit_for_bit(more: Several, shape: tuple[str, str]) -> None:
    """In whole blocks, whose slots vLLM's CPU backend mixes."""
    size, length = 32, 1000
    tokens = prompt(length, seed=hash_of(named(shape)))
    computed, moved = more.pair(*shape).rows_of_handover(tokens, size)
    assert len(computed) == -(-length // size)
    assert len(computed & moved) >= length // size  # decode computes the last token anew
