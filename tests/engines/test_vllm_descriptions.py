"""The plug-in's descriptions of vLLM's layers, by kind: any two shapes exchange them exactly, or are refused by
name."""

from __future__ import annotations

import pytest

from engines import told_by

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
STATES = ("Kimi-Linear", "Bailing-MoE-V3", "Bailing-MoE-Linear", "MiniMax-Text-01")
PAGED = (
    "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_ds_mla", "nvfp4_ds_mla", "indexer",
    "shuffled indexer", "nvfp4", "nvfp4 of trtllm",
)  # fmt: skip
READ = ("HPC_ATTN",)
"""Backends whose cache nobody sees written; their source says where."""
UNSEEN = ("a backend of another project", "rows of streams")
UNNAMED = ("Kimi-K3 with RecoverSSM",)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    told: dict[str, list[str]] = told_by("descriptions.py")
    return told


@pytest.mark.parametrize("kind", STATES)
def test_a_state_is_what_vllm_would_have_written_there(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"exact"}


@pytest.mark.parametrize("kind", PAGED)
def test_a_packed_cache_is_what_vllm_would_have_written_there(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"exact"}


@pytest.mark.parametrize("kind", READ)
def test_a_cache_is_what_the_source_of_its_backend_says(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"exact"}


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_cache_that_nobody_sees_written_is_not_cut(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"refused: divided"}


@pytest.mark.parametrize("kind", UNNAMED)
def test_states_that_are_not_whole_in_the_cache_are_refused(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"refused: unsupported_cache"}
