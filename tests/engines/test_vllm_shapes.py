"""Two vLLM engines that differ: in block size, in tensor parallelism, in both; and layers with a sliding window."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from engines import MODEL, PATIENT, Pair, pair, prompt
from kvferry.reference.config import ModelConfig

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
LENGTHS = [513, 5, 33, 96, 100, 1100]
DIVISIBLE = dataclasses.replace(MODEL, intermediate_size=960, vocab_size=576)
"""By 2 and by 3, as vLLM wants every dimension that it splits."""
SLIDING = dataclasses.replace(MODEL, window=100, sliding=(True, False, True, False))


@dataclass(frozen=True)
class Shape:
    """(prefill, decode) of everything."""

    block_sizes: tuple[int, int] = (32, 32)
    tp: tuple[int, int] = (1, 1)
    model: ModelConfig = DIVISIBLE

    @property
    def size(self) -> tuple[int, int]:
        """(prompts, tokens to decode). vLLM's ranks on a CPU wait for each other in a loop: on few cores a step of
        several ranks takes a second."""
        return (len(LENGTHS), 16) if self.tp == (1, 1) else (3, 4)

    def __str__(self) -> str:
        window = f" window {self.model.window}" if self.model.window else ""
        return f"blocks {self.block_sizes[0]} to {self.block_sizes[1]}, TP{self.tp[0]} to TP{self.tp[1]}{window}"


SHAPES = [
    Shape((32, 96)),
    Shape((96, 64)),
    Shape((32, 64), tp=(2, 1)),
    Shape((64, 32), tp=(1, 2)),
    Shape(tp=(2, 3)),
    Shape((32, 32), model=SLIDING),
    Shape((64, 32), model=SLIDING),
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    assert isinstance(request.param, Shape)
    return request.param


@pytest.fixture(scope="module")
def engines(shape: Shape) -> Iterator[Pair]:
    first, second = ({"block_size": size} for size in shape.block_sizes)
    with pair(shape.model, prefill=first, decode=second, tp=shape.tp, daemon_flags=PATIENT) as both:
        yield both


def test_the_tokens_are_those_of_one_engine(engines: Pair, shape: Shape) -> None:
    count, length = shape.size
    for tokens in [prompt(length) for length in LENGTHS[:count]]:
        assert engines.handover(tokens, max_tokens=length) == engines.alone(tokens, max_tokens=length)


def test_several_at_once_with_a_shared_prefix(engines: Pair, shape: Shape) -> None:
    count, length = shape.size
    prompts = [prompt(200, seed=1) + prompt(10 + 70 * i, seed=2) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        moved = list(pool.map(partial(engines.handover, max_tokens=length), prompts))
        assert moved == list(pool.map(partial(engines.alone, max_tokens=length), prompts))
