"""Components are named by what they are: the order in which vLLM lists layers and groups changes none of the names."""

from __future__ import annotations

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


def test_ranks_that_share_a_prompt_in_another_way_have_no_names_and_do_not_start(found: dict[str, Any]) -> None:
    assert found["ranks"].startswith("unsupported_engine: ")
    assert "prefill_context_parallel_size = 2" in found["ranks"]
