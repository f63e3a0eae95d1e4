"""examples/: whole programs, run as a newcomer runs them."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from kvferryd.demo.fleet import Fleet

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 120.0


async def run(program: str, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    try:
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_two_engines_and_a_router_hand_over_a_request(tmp_path: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        source, reader = fleet.daemon("source"), fleet.daemon("reader")
        await fleet.ready(source, reader, timeout_s=TIMEOUT_S)
        engines = [
            asyncio.create_task(run("engine.py", "prefill", str(source.socket))),
            asyncio.create_task(run("engine.py", "decode", str(reader.socket))),
        ]
        await fleet.ready(reader, timeout_s=TIMEOUT_S, path="/readyz")  # the engine has registered: orders are taken
        ordered, *ended = await asyncio.gather(run("router.py", reader.url, source.peer), *engines)
    assert re.fullmatch(r"req-1 is done: 167936 bytes, (direct|staged)\n", ordered[1]), ordered
    assert ended == [
        (0, "published 41 tokens of req-1\nreq-1 was read: its lease is released\n", ""),
        (0, "received 167936 bytes, first token: 42; all 41 tokens are right\n", ""),
    ]


@pytest.mark.parametrize("program", ["engine.py", "router.py"])
async def test_without_arguments_a_program_says_how_it_is_used(program: str) -> None:
    status, _, said = await run(program)
    assert status == 1
    assert f"python examples/{program}" in said


async def test_a_router_that_finds_no_daemon_says_so() -> None:
    status, _, said = await run("router.py", "http://127.0.0.1:9", "127.0.0.1:7411")
    assert status == 1
    assert said.startswith("daemon_unreachable: no daemon answers at http://127.0.0.1:9")
