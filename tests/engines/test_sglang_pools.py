"""SGLang's own pools say what their bytes mean, also where they keep them in uint8."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sglang_engines import PYTHON, START_S

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
HELD = {
    "auto torch.bfloat16": "bfloat16 bf16",
    "fp8_e4m3 torch.float8_e4m3fn": "uint8 fp8_e4m3fn",
    "fp8_e5m2 torch.float8_e5m2": "uint8 fp8_e5m2",
    "fp8_e5m2 torch.float8_e4m3fnuz": "uint8 fp8_e4m3fnuz",
    "tomorrow torch.float8_e4m3fn": "uint8 opaque:sglang.tomorrow",
}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """By sglang_pools.py."""
    if not PYTHON.exists():
        pytest.skip("there is no SGLang here: make engines-sglang installs one")
    command = [PYTHON, Path(__file__).with_name("sglang_pools.py")]
    done = subprocess.run(command, timeout=START_S, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_windows_in_a_pool_of_their_own_are_a_group_of_their_own(told: dict[str, Any]) -> None:
    """Pages, the tokens of a window, layers."""
    assert told["windows"] == [[5, None, [5]], [3, 24, [4, 6]]]


def test_every_pool_says_what_it_holds(told: dict[str, Any]) -> None:
    means = told["means"]
    assert means.pop("packed") == [{"kv": "uint8 opaque:sglang.packed_fp8_e4m3"}]
    assert means == {name: [{"k": held, "v": held}, {"kv": held}] for name, held in HELD.items()}
