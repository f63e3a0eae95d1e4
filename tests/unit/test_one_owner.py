"""A single module of the daemon makes tasks and timers: what it makes has an owner. Every wait of a thread ends."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import kvferry
import kvferryd

FOLDER = Path(kvferryd.__file__).parent
OWNER = "aio.py"
MAKE = {"create_task", "ensure_future", "call_later", "call_at"}
PROGRAMS = {"bench", "demo", "explain", "commands", "run"}
"""Rooms of other programs than the daemon."""
STILL = {
    "api/engine.py", "api/handover.py", "api/rest/server.py", "engine/registration.py", "transfers/work.py",
}  # fmt: skip
"""Files that make their own. No file is added; a file that does not any more is taken away."""
FILES = {str(path.relative_to(FOLDER)): path for path in sorted(FOLDER.rglob("*.py"))}


@pytest.mark.parametrize("name", [name for name in FILES if name != OWNER and name.split("/")[0] not in PROGRAMS])
def test_no_other_module_makes_tasks_or_timers(name: str) -> None:
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    names = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    names |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    assert bool(names & MAKE) == (name in STILL), f"{sorted(names & MAKE)} in {name}: see {OWNER}"


def test_every_file_of_the_list_is_there() -> None:
    assert not STILL - set(FILES)


@pytest.mark.parametrize("package", [kvferry, kvferryd])
def test_no_simple_queue_is_asked_for_a_while(package: ModuleType) -> None:
    """Python's SimpleQueue waits for ever when the while is over before the wait begins. Its Queue does not."""
    for path in Path(str(package.__file__)).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
        asked = {word.arg for call in calls if ast.unparse(call.func).endswith(".get") for word in call.keywords}
        assert "SimpleQueue" not in text or "timeout" not in asked, path
