"""The Makefile, as a newcomer meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """make, where pip finds no package."""
    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = ["make", *arguments, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | nothing, capture_output=True, text=True, timeout=120)


def test_an_environment_that_is_half_made_is_made_anew(tmp_path: Path) -> None:
    """As `python3 -m venv` leaves one where Debian's python3-venv is not installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=60)
    made = make("setup", f"VENV={tmp_path}")
    assert "No module named pip" not in made.stderr
    assert "No matching distribution found for torch" in made.stderr  # pip is there, and has no index here
    assert not (tmp_path / ".ready").exists()


def test_a_folder_that_is_no_environment_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    make("setup", f"VENV={tmp_path}")
    assert (tmp_path / "mine").exists()


def test_what_takes_minutes_says_so_before_it_begins() -> None:
    assert "minutes" in make("--dry-run", "--always-make", "setup").stdout
    assert "half an hour" in make("--dry-run", "--assume-old=.venv/.ready", "test").stdout.partition("-m pytest -")[0]
