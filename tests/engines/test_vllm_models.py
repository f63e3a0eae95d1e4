"""vLLM engines of many architectures. NaN lies in the blocks of every load before it begins: none of it may be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines import Pair, checkpoint, pair, prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
VOCABULARY = 576
LENGTHS = [5, 33, 63, 100, 127, 129, 200, 300, 500, 513, 700, 1025]
HYBRID = ["--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32", "--no-enable-prefix-caching"]


@dataclass(frozen=True)
class Model:
    """A checkpoint of tests/engines/checkpoints.py on two engines. flags: of both. blocks: their sizes, in tokens."""

    name: str
    flags: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    blocks: tuple[int, int] = (32, 32)


MODELS = {"hybrid": Model("granite-4", HYBRID)}
IN_THE_GATE = ["hybrid"]


def side(model: Model, block_size: int) -> dict[str, Any]:
    poisoned = {"kv_connector": "PoisonedConnector", "kv_connector_module_path": "poisoned"}
    flags = ["--logits-processors", "forced:Forced", *model.flags]
    return {"flags": flags, "block_size": block_size, "transfer": poisoned}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_THE_GATE else pytest.mark.long) for name in MODELS],
)
def engines(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model = MODELS[request.param]
    prefill, decode = (side(model, size) for size in model.blocks)
    with pair(checkpoint(model.name, **model.changes), prefill=prefill, decode=decode) as both:
        yield both


def test_the_tokens_depend_on_the_whole_prompt(engines: Pair) -> None:
    tokens = prompt(300, vocabulary=VOCABULARY)
    assert engines.split(tokens) != engines.split([tokens[0] ^ 1, *tokens[1:]])


def test_the_tokens_are_those_of_one_engine(engines: Pair) -> None:
    """Prompt after prompt: sums of bfloat16 depend on what is computed beside them."""
    before, prompts = len(engines.transfers()), [prompt(length, seed=3, vocabulary=VOCABULARY) for length in LENGTHS]
    moved = [engines.handover(tokens, max_tokens=6) for tokens in prompts]
    alone = [engines.split(tokens, max_tokens=6) for tokens in prompts]
    different = [len(tokens) for tokens, one, other in zip(prompts, moved, alone, strict=True) if one != other]
    assert not different, f"prompts of {different} tokens have other tokens: {moved}, alone {alone}"
    assert [one.state for one in engines.transfers()[before:]] == ["done"] * len(prompts)
