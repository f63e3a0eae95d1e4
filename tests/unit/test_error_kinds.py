"""Every error says what kind it is: no site raises the base class, whose kind is a fault of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvferry.errors import CLASSES, Kind, KvferryError
from kvferry.wire import problem_from_proto, problem_to_proto

ROOT = Path(__file__).parents[2]


def test_no_site_raises_the_base_class() -> None:
    found = []
    for path in (*(ROOT / "clients").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == KvferryError.__name__:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_survives_the_wire(kind: Kind) -> None:
    assert set(CLASSES) == set(Kind)
    raised = CLASSES[kind]("some_code", "some message")
    arrived = problem_from_proto(problem_to_proto(raised))
    assert (type(arrived), arrived.code, arrived.kind) == (CLASSES[kind], "some_code", kind)
