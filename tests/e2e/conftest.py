from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage, staged


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with staged() as stage:
        yield stage


@pytest.fixture(autouse=True)
def hears_hang_ups() -> Iterator[None]:
    """Programs that a test starts hear SIGHUP. Under `nohup` they would inherit that it is ignored, and live on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def none_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons under keepers stand still before their first line: a test has all the time before they serve."""
    os.mkfifo(gate := tmp_path / "nobody-opens-it")
    code = f"import sys\nif {{'kvferryd', 'serve'}} <= {{*sys.orig_argv}}:\n    open({str(gate)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
