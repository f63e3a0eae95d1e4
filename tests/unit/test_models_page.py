"""docs/models.md has the name of every refusal that a pair of its tables can meet."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvferryd.plan.refused import MEANING

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs/models.md").read_text()
DESCRIBING = ["parts.py", *(f"vllm/{name}.py" for name in ("cells", "heads", "layers", "worker"))]
"""The files of clients/kvferry that describe an engine's cache."""


def table(marker: str) -> list[list[str]]:
    """The rows of a table of the page."""
    text = PAGE.partition(f"<!-- {marker} -->\n")[2].partition("end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert rows, marker
    return rows


def named(where: str) -> set[str]:
    return {row[0].strip("`") for row in table("refusals") if row[1] == where}


def raised(file: Path) -> Iterator[str]:
    """The codes of the errors that a file makes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Malformed":
            assert isinstance(node.args[0], ast.Constant), f"{file}:{node.lineno} has a code that is computed"
            yield node.args[0].value


def test_every_name_that_a_pair_can_be_refused_by_is_on_the_page() -> None:
    assert named("plan") == set(MEANING)


def test_every_name_that_an_engine_can_be_refused_by_at_its_start_is_on_the_page() -> None:
    assert named("start") == {code for name in DESCRIBING for code in raised(TOP / "clients/kvferry" / name)}


def test_the_tables_refuse_by_no_other_name() -> None:
    rows = table("computed: make models") + table("engines: test_vllm_models")
    cells = [cell.removeprefix("refused: ") for row in rows for cell in row if cell.startswith("refused: ")]
    met = {code for cell in cells for code in cell.split(", ")}
    assert met
    assert met <= named("plan") | named("start")
