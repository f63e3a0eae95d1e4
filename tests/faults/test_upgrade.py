"""A new version of the daemon beside the old one, and in its place: the last commit but one that changed the code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet import TIMEOUT_S, Daemons
from older import CODE, git, unpacked
from scene import DIRECT, Scene, scened

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SILENT_S = 12.0
"""Longer than any version waits for a peer that says nothing."""


@pytest.fixture
def old(tmp_path: Path) -> str:
    """Its PYTHONPATH."""
    last = git("log", "-1", "--first-parent", "--format=%H", "--", *CODE)
    return unpacked(git("rev-parse", f"{last}^"), tmp_path)


@pytest.mark.parametrize("upgraded", ["source", "reader"])
async def test_a_daemon_is_upgraded_while_its_peer_is_not(
    daemons: Daemons,
    stack: AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    upgraded: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Old beside old; one is stopped in the middle of a read and comes back new; and then the other one."""
    with monkeypatch.context() as inherited:
        inherited.setenv("PYTHONPATH", old)
        scene = await stack.enter_async_context(scened(daemons, DIRECT))
    assert versions(scene) == [True, True]
    async with scene.brought("reading", 30.0) as request:
        side = scene.side(upgraded)
        scene.killed.add(side.daemons[0].process.pid)
        if upgraded == "reader":
            scene.aborts()
        side.daemons[0].process.terminate()
        await request.goes_on()
        await scene.ended(request)
        await asyncio.to_thread(side.daemons[0].process.wait, TIMEOUT_S)
        await scene.revived()
    await scene.holds(request)
    assert sorted(versions(scene)) == [False, True]
    async with scene.brought("connecting", 40.0) as request:
        await asyncio.sleep(SILENT_S)
        await scene.publish(request)
        await scene.ended(request)
    assert request.ends == ["done"]
    await scene.holds(request)
    record_property("seen", [f"the {upgraded}'s daemon upgraded, its peer not", ", ".join(request.ends), "", ""])


def versions(scene: Scene) -> list[bool]:
    """For both daemons: whether it runs the old code."""
    paths = [Path(f"/proc/{side.daemons[0].process.pid}/environ").read_bytes() for side in scene.sides]
    return [b"/old/daemon" in path for path in paths]
