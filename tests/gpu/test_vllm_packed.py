"""vLLM's own CUDA kernels write each packed cache where the plug-in says. Needs an environment with vLLM for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import needs  # noqa: F401
import pytest

PYTHON = Path(__file__).parents[2] / os.environ.get("ENGINES_VENV", ".venv-engines") / "bin/python"
PACKED = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_ds_mla", "indexer", "nvfp4")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", PACKED)
def test_vllms_kernel_confirms_the_description(kind: str) -> None:
    if not PYTHON.exists():
        pytest.skip(f"no vLLM at {PYTHON}: ENGINES_VENV names an environment with vLLM for CUDA")
    run = [PYTHON, Path(__file__).with_name("vllm_packed.py"), kind]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=250)
    if "No module named 'flashinfer'" in done.stderr:
        pytest.skip("NVFP4 needs FlashInfer")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {kind: "proven"}, done.stderr
