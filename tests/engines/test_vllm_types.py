"""Every cache type of the vLLM that is installed says what its bytes mean, and any two are paired only if they mean the
same."""

from __future__ import annotations

from typing import Any

import pytest

from engines import told_by

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
OPAQUE = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit")
PLAIN = {
    "auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8_e4m3fn", "fp8_e4m3": "fp8_e4m3fn",
    "fp8_inc": "fp8_e4m3fn", "fp8_e5m2": "fp8_e5m2",
}  # fmt: skip
SCALED = {
    "int8_per_token_head": ("int8_per_token_head", "fp32"), "nvfp4": ("nvfp4", "fp8_e4m3fn"),
    "fp8_per_token_head": ("fp8_e4m3fn_per_token_head", "fp32"), "nvfp4_4over6": ("nvfp4", "fp8_e4m3fn"),
    "int4_per_token_head": ("uint4_per_token_head", "fp32_zero4"),
}  # fmt: skip
MEANINGS = {
    **{kind: {"k": means, "v": means} for kind, means in PLAIN.items()},
    **{kind: {"k": each, "k.scale": scale, "v": each, "v.scale": scale} for kind, (each, scale) in SCALED.items()},
    **{kind: {"kv": kind} for kind in ("fp8_ds_mla", "nvfp4_ds_mla")},
    **{kind: {"kv": f"opaque:vllm.{kind}"} for kind in OPAQUE},
}
REFUSED = {"encoding", "dtype", "missing_component", "inner_extent", "axes"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    told: dict[str, Any] = told_by("cache_types.py")
    return told


def test_every_type_says_what_its_bytes_mean(found: dict[str, Any]) -> None:
    assert found["meanings"] == MEANINGS


def test_only_types_that_mean_the_same_are_paired(found: dict[str, Any]) -> None:
    assert len(found["pairs"]) == len(MEANINGS) ** 2
    for one, other, outcome in found["pairs"]:
        if MEANINGS[one] == MEANINGS[other]:
            assert outcome == "paired", (one, other)
        else:
            named = {*outcome.split(", ")}
            assert named <= REFUSED and named & {"encoding", "dtype"}, (one, other, outcome)
