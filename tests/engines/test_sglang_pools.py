"""SGLang's own pools say what their bytes mean, also where they keep them in uint8."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from sglang_engines import sglang_told_by

from engines import Engines

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
HELD = {
    "auto torch.bfloat16": "bfloat16 bf16",
    "fp8_e4m3 torch.float8_e4m3fn": "uint8 fp8_e4m3fn",
    "fp8_e5m2 torch.float8_e5m2": "uint8 fp8_e5m2",
    "fp8_e5m2 torch.float8_e4m3fnuz": "uint8 fp8_e4m3fnuz",
    "tomorrow torch.float8_e4m3fn": "uint8 opaque:sglang.tomorrow",
}
STATES = {"gated delta net": "qkv", "Kimi's": "qkv", "Mamba2": "xbc", "Mamba": "x", "convolution alone": "x"}
"""The channels of each convolution."""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return dict(sglang_told_by("sglang_pools.py"))


@pytest.fixture(scope="module")
def handed_over() -> dict[str, Any]:
    """By sglang_states.py."""
    with closing(Engines()) as fleet:
        daemons = [*fleet.daemons("p", 2), *fleet.daemons("d", 1)]
        asyncio.run(fleet.ready(*daemons, timeout_s=60))
        return dict(sglang_told_by("sglang_states.py", *(each.socket for each in daemons)))


def test_windows_in_a_pool_of_their_own_are_a_group_of_their_own(told: dict[str, Any]) -> None:
    """Pages, the tokens of a window, layers."""
    assert told["windows"] == [[5, None, [5]], [3, 24, [4, 6]]]


def test_every_pool_says_what_it_holds(told: dict[str, Any]) -> None:
    means = told["means"]
    assert means.pop("packed") == [{"kv": "uint8 opaque:sglang.packed_fp8_e4m3"}]
    assert means == {name: [{"k": held, "v": held}, {"kv": held}] for name, held in HELD.items()}


def test_states_of_two_ranks_are_those_of_one(handed_over: dict[str, Any]) -> None:
    """SGLang's own pools, real daemons, every element of keys, values, convolutions and states; no engine computes."""
    for kind, channels in STATES.items():
        ssm = [] if kind == "convolution alone" else ["ssm"]
        told = handed_over[kind]
        assert told["components"] == sorted([*(f"conv.{each}" for each in channels), "k", *ssm, "v"]), kind
        assert told["same"] == [True] * (3 + len(ssm)), kind


def test_a_draft_models_cache_is_moved_beside_the_models(handed_over: dict[str, Any], told: dict[str, Any]) -> None:
    """Two ranks hand over to one by the same pages, with other heads than the model's, and with latent rows."""
    said, told = told, handed_over["drafts"]
    assert told["heads"] == {"components": ["draft.k", "draft.v", "k", "v"], "same": [True] * 8}
    assert told["latent"] == {"components": ["draft.kv", "kv"], "same": [True] * 4}
    refused = ["unsupported_cache: MHATokenToKVPool", "unsupported_cache: SWAKVPool"]
    assert said["refused"] == refused, "of another size, and of two pools"
    assert told["decode alone"].startswith("refused: ") and "missing_component" in told["decode alone"]


def test_a_stage_of_a_pipeline_may_have_no_layers_of_a_kind(handed_over: dict[str, Any], told: dict[str, Any]) -> None:
    assert handed_over["stages"] == {"encodings": ["fp32", "fp32"], "same": [True] * 4}
    assert told["windows alone"] == [[5, None, []], [3, 24, [4, 6]]]
