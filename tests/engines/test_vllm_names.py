"""Components are named by what they are: the order in which vLLM lists layers and groups changes none of the names.
Models are named by what they compute."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines import told_by

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(400)]
ATTENTION, DRAFT = "model.layers.1.self_attn.attn", "draft_model.layers.1.self_attn.attn"
FIRST, SECOND = "model.layers.1.self_attn.0.attn", "model.layers.1.self_attn.1.attn"
NAMES = {
    "a sparse indexer": {"1.kv": ATTENTION, "1.indexer.kv": "model.layers.1.self_attn.indexer.k_cache"},
    "two attentions in a layer": {"1.0.kv": FIRST, "1.1.kv": SECOND},
    "a draft model": {"1.kv": ATTENTION, "1.draft.kv": DRAFT},
}
REFUSED = {"nobody knows": "both hold kv of layer 1", "a ring": "has a CircularBufferSpec"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    told: dict[str, Any] = told_by("component_names.py")
    return told


@pytest.mark.parametrize("what", NAMES)
def test_a_name_says_what_it_is_in_either_order(found: dict[str, Any], what: str) -> None:
    assert found[what] == [NAMES[what]] * 2


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_name_is_refused(found: dict[str, Any], what: str) -> None:
    for outcome in found[what]:
        assert isinstance(outcome, str)
        assert outcome.startswith("unsupported_cache: ")
        assert REFUSED[what] in outcome


@pytest.mark.parametrize(
    ("what", "option"),
    [
        ("ranks", "prefill_context_parallel_size = 2"), ("sleeps", "enable_sleep_mode = True"),
        ("keeps it in the host", "hisparse_config = True"),
    ],
)  # fmt: skip
def test_an_engine_whose_cache_would_be_mistaken_does_not_start(found: dict[str, Any], what: str, option: str) -> None:
    """Ranks of one name; memory that vLLM gives back and gets anew; a cache that lies elsewhere."""
    assert found[what].startswith("unsupported_engine: ")
    assert option in found[what]


@pytest.fixture(scope="module")
def lengths() -> dict[str, list[tuple[Any, str]]]:
    told: dict[str, list[tuple[Any, str]]] = told_by("model_lengths.py")
    return told


@pytest.mark.parametrize(("model", "ways"), [("llama", 1), ("longrope", 2), ("llama-4", 2)])
def test_models_that_the_longest_request_changes_are_told_apart(
    lengths: dict[str, list[tuple[Any, str]]], model: str, ways: int
) -> None:
    """vLLM turns keys by LongRoPE, and scales Llama 4's queries, by max_model_len: the configuration is the same."""
    made = [json.dumps(what) for what, _ in lengths[model]]
    names = [name for _, name in lengths[model]]
    assert len(set(made)) == len(set(names)) == len(set(zip(made, names, strict=True))) == ways
