"""An older version of clients and daemon, out of git's history."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("clients", "daemon")


def git(*arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("an older version needs git")
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"an older version needs the git history of this tree: {done.stderr.strip()}")
    return done.stdout.strip()


def unpacked(commit: str, into: Path, *also: str) -> str:
    """The PYTHONPATH of clients and daemon of that commit. also: other folders, which are on it as well."""
    folders = (*CODE, *also)
    archive = into / "old.tar"
    git("archive", f"--output={archive}", commit, *folders)
    with tarfile.open(archive) as packed:
        packed.extractall(into / "old", filter="data")
    return os.pathsep.join(str(into / "old" / folder) for folder in folders)
