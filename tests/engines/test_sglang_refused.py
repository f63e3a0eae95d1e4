"""SGLang's sender at a real daemon, without an engine around it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from sglang_engines import PYTHON, START_S

from engines import lone_daemon

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


def test_a_last_publish_that_is_refused_ends_what_was_published_before_it() -> None:
    """Before the request has failed: its pages are SGLang's again then."""
    if not PYTHON.exists():
        pytest.skip("there is no SGLang here: make engines-sglang installs one")
    with lone_daemon() as daemon:
        command = [PYTHON, Path(__file__).with_name("sglang_refused.py"), str(daemon.socket), daemon.url]
        done = subprocess.run(command, timeout=START_S, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["failed"]
    assert "metadata" in told["why"]
    assert told["left"] == []
