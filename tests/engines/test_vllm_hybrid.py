"""Two vLLM engines of a model that is half Mamba2, half attention: states move with the KV, whatever the TP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from engines import PATIENT, Pair, cache_usage, complete, eventually, hybrid, pair, prompt, tokens_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
LENGTHS = [1, 2, 5, 33, 128, 129, 300, 513, 1100]


@dataclass(frozen=True)
class Case:
    """(prefill, decode). `groups`: of the Mamba layers' B and C; one group is copied to every rank."""

    tp: tuple[int, int]
    groups: int
    convolution: tuple[str, str] = ("SD", "SD")
    """How the engines lay out what a convolution remembers: channels outermost (DS) or innermost."""

    def __str__(self) -> str:
        return f"TP{self.tp[0]} to TP{self.tp[1]}, {self.groups} groups"

    def engine(self, side: int) -> dict[str, object]:
        # With prefix caching vLLM 0.32's Mamba2 layers fail on a CPU, without any connector: docs/vllm.md.
        return {
            "flags": ["--no-enable-prefix-caching"],
            "environment": {"VLLM_SSM_CONV_STATE_LAYOUT": self.convolution[side]},
        }


CASES = [Case((1, 1), 2), Case((2, 1), 2, convolution=("DS", "SD")), Case((1, 2), 1, convolution=("SD", "DS"))]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


@pytest.fixture(scope="module")
def engines(case: Case) -> Iterator[Pair]:
    with pair(
        lambda folder: hybrid(folder, case.groups),
        prefill=case.engine(0),
        decode=case.engine(1),
        tp=case.tp,
        daemon_flags=PATIENT,
    ) as both:
        yield both


def test_the_tokens_depend_on_the_whole_prompt(engines: Pair) -> None:
    tokens = prompt(300, vocabulary=512)
    assert engines.alone(tokens) != engines.alone([tokens[0] ^ 1, *tokens[1:]])


def test_the_tokens_are_those_of_one_engine(engines: Pair) -> None:
    for length in LENGTHS:
        tokens = prompt(length, vocabulary=512)
        assert engines.handover(tokens, max_tokens=8) == engines.alone(tokens, max_tokens=8), f"{length} tokens"
        if length > 2:
            moved = engines.transfers()[-1]
            assert (moved.state, moved.tokens[1]) == ("done", length - 1)


def test_several_at_once_with_a_shared_prefix(engines: Pair) -> None:
    prompts = [prompt(200, 1, vocabulary=512) + prompt(10 + 70 * i, 2, vocabulary=512) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        moved = list(pool.map(lambda tokens: engines.handover(tokens, max_tokens=4), prompts))
        assert moved == list(pool.map(lambda tokens: engines.alone(tokens, max_tokens=4), prompts))


def test_a_state_that_is_too_far_is_not_used(engines: Pair) -> None:
    """The source has more tokens than the request: no state goes back, so everything is computed here."""
    tokens = prompt(150, 3, vocabulary=512)
    params = engines.prefilled(tokens)
    done = complete(engines.decode, tokens[:100], kv_transfer_params=params)
    assert tokens_of(done) == engines.alone(tokens[:100])


def test_nothing_is_left(engines: Pair) -> None:
    assert eventually(lambda: not engines.leases())
    assert eventually(lambda: cache_usage(engines.prefill) == 0)
    assert eventually(lambda: cache_usage(engines.decode) == 0)
