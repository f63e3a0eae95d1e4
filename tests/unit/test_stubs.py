"""The committed stubs are what proto/ says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvferry.v1

GENERATE = Path(__file__).parent.parent / "generate_stubs.py"


def test_the_committed_stubs_equal_a_fresh_generation(tmp_path: Path) -> None:
    subprocess.run([sys.executable, GENERATE, tmp_path], check=True, timeout=60)
    fresh = {path.name: path.read_text() for path in (tmp_path / "kvferry/v1").iterdir() if path.is_file()}
    folder = Path(kvferry.v1.__file__).parent
    committed = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert committed.keys() == fresh.keys()
    for name, text in fresh.items():
        assert committed[name] == text, f"{name} is out of date: make proto"
