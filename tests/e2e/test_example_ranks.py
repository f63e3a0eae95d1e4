"""examples/ranks.py, whole: two ranks on either side, each with a daemon of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from kvferryd.demo.fleet import DaemonService, Fleet

pytestmark = pytest.mark.anyio
RANKS = Path(__file__).parents[2] / "examples" / "ranks.py"
TIMEOUT_S = 120


def started(side: str, daemons: list[DaemonService], *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, RANKS, side, *(str(daemon.socket) for daemon in daemons), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


async def test_two_ranks_on_either_side_move_their_shares(own_fleet: Fleet) -> None:
    there, here = own_fleet.daemons("there", 2), own_fleet.daemons("here", 2)
    await own_fleet.ready(*there, *here, timeout_s=TIMEOUT_S)
    with contextlib.ExitStack() as running:
        prefill = running.enter_context(started("prefill", there))
        running.callback(prefill.kill)
        assert prefill.stdout is not None
        assert prefill.stdout.readline() == "published 41 tokens of req-1 on 2 ranks\n"
        # The peer address of rank 1: any rank's will do.
        decode = running.enter_context(started("decode", here, there[1].peer))
        running.callback(decode.kill)
        got, _ = decode.communicate(timeout=TIMEOUT_S)
        gave, _ = prefill.communicate(timeout=TIMEOUT_S)
    assert (decode.returncode, prefill.returncode) == (0, 0), got + gave
    assert got == "received 83968 + 83968 bytes; all 41 tokens are right on 2 ranks\n"
    assert gave == "req-1 was read: its leases are released, released\n"
