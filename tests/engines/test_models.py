"""docs/models.md says what becomes of each model in each shape: vLLM's own layers and views, and every element."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PYTHON = TOP / os.environ.get("ENGINES_VENV", ".venv-engines") / "bin/python"
COMPUTED = (TOP / "docs/models.md").read_text().partition("<!-- computed: make models -->\n")[2]
ROWS = [line.strip("| ").split(" | ") for line in COMPUTED.partition("<!-- computed: end -->")[0].splitlines()[2:]]
pytestmark = [pytest.mark.engines, pytest.mark.long]
INSTALLED = pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM at {PYTHON}: make engines-venv")


def test_no_model_is_accepted_and_wrong() -> None:
    assert ROWS
    assert [cell for row in ROWS for cell in row if cell.startswith("wrong")] == []


@INSTALLED
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_model_is_as_the_table_says(row: list[str]) -> None:
    """But for the times, its last two columns."""
    assert told(row[0]) == row[:-2]


@INSTALLED
def test_stages_without_a_layer_of_some_group_serve() -> None:
    """Every tenth of 40 layers is attention: of eight stages four have none."""
    assert told("Granite-4.0-H-Small", "--stages", "8") == ["Granite-4.0-H-Small", "exact", "exact"]


def told(*asked: str) -> list[str]:
    """The cells of the row that models.py prints."""
    run = [PYTHON, TOP / "tests/engines/models.py", *asked]
    found = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600).stdout.splitlines()
    return found[-1].strip("| ").split(" | ")
