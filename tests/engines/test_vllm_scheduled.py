"""vLLM's own scheduler and the connector's side of it, in runs that are drawn from seeds: aborts, preemptions, resets,
failed reads, several answers, windows, chunks, states, blocks of two lengths, with one step in flight and with two."""

from __future__ import annotations

import pytest

from engines import told_by

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
SEEDS = 75
HAPPEN = {"aborted", "arrived", "failed", "preempted", "published", "published, last", "reset"}


def test_attention_and_readers_find_what_they_need() -> None:
    """A decode computes a prompt's last token anew, which looks back one token further than the next one does: windows
    that ended at a block's edge had given that block back, on either side. The state of a prompt of one token goes on
    as more is generated: it was published a token late."""
    told = told_by("scheduled_runs.py", 0, SEEDS)
    assert not told["wrong"]
    assert not HAPPEN - told["happened"].keys()
