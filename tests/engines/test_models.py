"""docs/models.md says what becomes of each model in each shape: vLLM's own layers and views, and every element."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PYTHON = TOP / os.environ.get("ENGINES_VENV", ".venv-engines") / "bin/python"
ROWS = [
    line for line in (TOP / "docs/models.md").read_text().splitlines() if line.startswith("| ") and " exact " in line
]
pytestmark = [pytest.mark.engines, pytest.mark.long]


@pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: make engines-venv")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_model_is_as_the_table_says(row: str) -> None:
    run = [PYTHON, TOP / "tests/engines/models.py", row.split("|")[1].strip()]
    found = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600).stdout
    assert row in found.splitlines()
