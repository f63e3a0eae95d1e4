"""The protocol does nothing by itself: it imports nothing that waits, sends, draws, writes or tells the time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry.protocol

FOLDER = Path(kvferry.protocol.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
ALLOWED = {
    "__future__", "collections", "collections.abc", "dataclasses", "enum", "functools", "heapq", "itertools", "math",
    "numpy", "numpy.typing", "typing",
}  # fmt: skip
OURS = {"kvferry.errors", "kvferry.tables"}
FORBIDDEN = {
    "asyncio", "google", "grpc", "kvferry.schemas", "kvferry.v1", "kvferryd", "nixl", "pydantic", "structlog", "torch",
}  # fmt: skip
"""Nor what it imports imports them. (numpy, which tables are made of, brings much of the rest.)"""
LINES, ATTRIBUTES = 330, 15


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_imports_values_and_machines_only(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert source.count("\n") <= LINES
    for node in ast.walk(ast.parse(source)):
        assert not isinstance(node, (ast.Await, ast.AsyncFunctionDef, ast.Global))
        if isinstance(node, ast.Import):
            assert {each.name for each in node.names} <= ALLOWED
        elif isinstance(node, ast.ImportFrom):
            assert node.module in ALLOWED | OURS or str(node.module).startswith("kvferry.protocol")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_machine_is_small_enough_to_be_held_in_mind(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and "frozen" not in map(ast.unparse, node.decorator_list):
            own = {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
            own |= {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            assert len(own) <= ATTRIBUTES, f"{node.name}: {sorted(own)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_event_and_effect_is_true(file: Path) -> None:
    """A named tuple without fields is empty, so that `if event:` would pass it by: it is a dataclass."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            assert any(isinstance(each, ast.AnnAssign) for each in node.body), node.name


def test_all_of_it_is_imported_without_what_does_something() -> None:
    modules = [f"kvferry.protocol.{file.stem}" for file in FILES if file.stem != "__init__"]
    program = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found = set(loaded.stdout.split())
    assert set(modules) <= found
    assert not {name for name in found if any(name == each or name.startswith(f"{each}.") for each in FORBIDDEN)}
    ours = {name for name in found if name.startswith("kvferry")} - set(modules)
    assert ours == {"kvferry", "kvferry.protocol", *OURS}
