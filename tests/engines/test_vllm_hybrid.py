"""vLLM engines of a model that is half Mamba2, half attention: states move with the KV, whatever the TP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines import (
    LENGTHS,
    Pair,
    cache_usage,
    checkpoint,
    complete,
    eventually,
    handed_over,
    prompt,
    several,
    tokens_of,
)  # fmt: skip

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def side(ranks: int, convolution: str = "SD") -> dict[str, object]:
    """convolution: how it lays out what it remembers, channels outermost (DS) or innermost."""
    # With prefix caching vLLM 0.32's Mamba2 layers fail on a CPU, without any connector: docs/vllm.md.
    environment = {"VLLM_SSM_CONV_STATE_LAYOUT": convolution}
    return {"ranks": ranks, "flags": ["--no-enable-prefix-caching"], "environment": environment}


Shape = tuple[str, str]
FLEETS: dict[str, tuple[int, dict[str, dict[str, object]], list[Shape]]] = {
    "6 groups": (6, {"TP1": side(1), "TP2": side(2, "DS")}, [("TP2", "TP1"), ("TP1", "TP2")]),
    "1 group": (1, {"TP1": side(1), "TP3": side(3, "DS")}, [("TP1", "TP3"), ("TP3", "TP1")]),
    "6 groups, TP2 and 3": (6, {"TP2": side(2, "DS"), "TP3": side(3)}, [("TP2", "TP3"), ("TP3", "TP2")]),
    "1 group, two layouts": (1, {"TP1": side(1), "TP1-DS": side(1, "DS")}, [("TP1", "TP1-DS")]),
}
"""Groups of the Mamba layers' B and C (one group is copied to every rank), the engines, and which of them are pairs."""
IN_THE_GATE = "6 groups"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == IN_THE_GATE else pytest.mark.long) for name in FLEETS],
)
def pairs(request: pytest.FixtureRequest) -> Iterator[dict[Shape, Pair]]:
    groups, sides, shapes = FLEETS[request.param]
    with several(checkpoint("granite-4", mamba_n_groups=groups), sides) as engines:
        yield {shape: engines.pair(*shape) for shape in shapes}


@pytest.fixture
def engines(pairs: dict[Shape, Pair]) -> Pair:
    return next(iter(pairs.values()))


def test_the_tokens_depend_on_the_whole_prompt(engines: Pair) -> None:
    tokens = prompt(300, vocabulary=576)
    assert engines.alone(tokens) != engines.alone([tokens[0] ^ 1, *tokens[1:]])


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_tokens_are_those_of_one_engine(pairs: dict[Shape, Pair], at_once: int) -> None:
    for shape, both in pairs.items():
        before = len(both.transfers())
        # vLLM's all-reduce on a CPU spins: with three ranks on two cores a step takes 0.1 s.
        lengths = LENGTHS[::4] if "TP3" in shape or at_once == 1 else LENGTHS
        handed_over(both, [prompt(length, at_once, vocabulary=576) for length in lengths], at_once, max_tokens=4)
        moved = both.transfers()[before:]
        assert {one.state for one in moved} == {"done"}, shape
        if at_once == 1:
            assert [one.tokens for one in moved] == [(0, length - 1) for length in lengths], shape


def test_prompts_that_leave_nothing_to_read(engines: Pair) -> None:
    handed_over(engines, [prompt(length, vocabulary=576) for length in (1, 2)], max_tokens=8)


def test_a_state_that_is_too_far_is_not_used(engines: Pair) -> None:
    """The source has the state after all of the prompt: it does not go back by a token, so all is computed here."""
    tokens = prompt(150, 3, vocabulary=576)
    params = engines.prefilled(tokens)
    assert params["remote_num_tokens"] == 149
    done = complete(engines.decode, tokens[:149], kv_transfer_params=params)
    assert tokens_of(done) == engines.alone(tokens[:149])


def test_nothing_is_left(pairs: dict[Shape, Pair]) -> None:
    for both in pairs.values():
        assert eventually(lambda both=both: not both.leases())
        assert eventually(lambda both=both: cache_usage(both.prefill) == 0 == cache_usage(both.decode))
