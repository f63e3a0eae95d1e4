"""How many KV heads a layer of vLLM has: its own number, never that of the model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import Malformed
from kvferry.vllm import heads


def model(total: int, **config: Any) -> Any:
    text = SimpleNamespace(to_dict=lambda: config)
    return SimpleNamespace(get_total_num_kv_heads=lambda: total, hf_text_config=text)


GEMMA_4 = model(16, num_key_value_heads=16, num_global_key_value_heads=4)
"""Gemma-4-31B: layers with windows have 16 KV heads, the others 4."""


@pytest.fixture(autouse=True)
def noted() -> Iterator[None]:
    heads.NOTED.clear()
    heads.NOTED["layers.0.self_attn"].add(16)
    heads.NOTED["layers.5.self_attn"].add(4)
    yield
    heads.NOTED.clear()


@pytest.mark.parametrize(
    ("ranks", "windowed", "full"), [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 4), (16, 16, 4), (32, 16, 4)]
)
def test_layers_with_different_numbers_of_heads_are_each_divided_by_their_own(
    ranks: int, windowed: int, full: int
) -> None:
    for name, total, shards in (("layers.0.self_attn.attn", 16, windowed), ("layers.5.self_attn.attn", 4, full)):
        assert heads.shards(name, max(1, total // ranks), ranks, GEMMA_4) == shards


def test_where_the_projection_says_nothing_the_configuration_may() -> None:
    assert heads.shards("other.attn", 1, 8, model(4, num_key_value_heads=4)) == 4
    assert heads.shards("other.attn", 1, 8, model(8)) == 8
    assert heads.shards("other.attn", 1, 8, model(8, id2label={0: "none"})) == 8


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(16, {"num_global_key_value_heads": 4}), (16, {"block_configs": [{"attention": {"num_key_value_heads": 2}}]})],
)
def test_a_number_that_cannot_be_known_is_refused_with_the_layers_name(ranks: int, config: dict[str, Any]) -> None:
    with pytest.raises(Malformed) as refused:
        heads.shards("layers.7.attn", 1, ranks, model(16, **config))
    assert refused.value.code == "unknown_heads"
    assert "layers.7.attn" in str(refused.value)


def test_heads_that_every_rank_keeps_whole_are_not_divided() -> None:
    heads.NOTED["layers.3.attn"].add(6)
    assert heads.shards("layers.3.attn.kv", 6, 4, GEMMA_4) == 1


def test_more_heads_than_any_number_explains_are_refused() -> None:
    with pytest.raises(Malformed) as refused:
        heads.shards("layers.7.attn", 3, 4, GEMMA_4)
    assert refused.value.code == "unknown_heads"


def test_modules_of_one_name_with_different_numbers_are_refused() -> None:
    heads.NOTED["layers.0.self_attn"].add(2)
    with pytest.raises(Malformed) as refused:
        heads.shards("layers.0.self_attn.attn", 1, 16, GEMMA_4)
    assert refused.value.code == "unknown_heads"
