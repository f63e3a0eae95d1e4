"""What the plug-in says of vLLM's layers, by kind: any two shapes exchange them exactly, or are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PYTHON = TOP / os.environ.get("ENGINES_VENV", ".venv-engines") / "bin/python"
pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
STATES = ("Kimi-Linear", "Bailing-MoE-V3", "Bailing-MoE-Linear", "MiniMax-Text-01")
PAGED = (
    "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_ds_mla", "nvfp4_ds_mla", "indexer",
    "shuffled indexer", "nvfp4", "nvfp4 of trtllm",
)  # fmt: skip
UNNAMED = ("Kimi-K3 with RecoverSSM",)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    if not PYTHON.exists():
        pytest.skip(f"no vLLM at {PYTHON}: make engines-venv")
    run = [PYTHON, Path(__file__).with_name("descriptions.py")]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=360)
    assert done.returncode == 0, done.stderr
    told: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("kind", STATES)
def test_a_state_is_what_vllm_would_have_written_there(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"exact"}


@pytest.mark.parametrize("kind", PAGED)
def test_a_packed_cache_is_what_vllm_would_have_written_there(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"exact"}


@pytest.mark.parametrize("kind", UNNAMED)
def test_states_that_are_not_whole_in_the_cache_are_refused(found: dict[str, list[str]], kind: str) -> None:
    assert set(found[kind]) == {"refused: unsupported_cache"}
