"""With log_format = json every line is JSON, whoever writes it, and the last one comes out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import TIMEOUT_S, Daemons
from ranks import Shape, start_rank

from kvferry.output import as_json
from kvferryd.demo import fleet

SAYS = """
import ctypes, os, sys
from kvferryd.observe import logs
from kvferryd.config import Config
from kvferry.output import wrap
logs.configure(Config(log_format="json"), wrap())
libc = ctypes.CDLL(None)
logs.get("kvferryd.x").info("ours", number=1)
libc.puts(b"E1122 08:00:00.000000  77 nixl_agent.cpp:9] no such thing")
libc.fflush(None)
os.write(2, b"[1795337709.18] [vm:5293 :0] ucp_worker.c:1 UCX  WARN  slow\\n\\xff odd bytes\\n")
print("x" * 200_000, flush=True)
"""
ENDS = {
    "crashes": ("os.write(2, b'last words'); os.abort()", -signal.SIGABRT),
    "is killed": ("os.write(2, b'last words'); os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "raises": ("raise RuntimeError('last words')", 1),
    "faults": ("import faulthandler; faulthandler.enable(); os.write(2, b'last words\\n'); ctypes.string_at(0)", -11),
}


ENDS_WITH_LINES = """
import logging.config
from kvferryd.observe import logs
from kvferryd.config import Config
logs.configure(Config(log_format="json"))
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
for number in range(300):
    logs.get("kvferryd.x").info("one of many", number=number)
"""


def said(script: str) -> tuple[int, list[dict[str, str]]]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.anyio
@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", "2>&-"])
async def test_a_daemon_without_standard_descriptors_serves(
    log_format: str, closed: str, daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some supervisors start it. Nothing that it opens has a number below 3: its log would go there."""

    def without(arguments: list[str]) -> list[str]:
        return ["sh", "-c", f'exec "$0" -m kvferryd "$@" {closed}', sys.executable, *arguments]

    monkeypatch.setattr(fleet, "_kvferry", without)
    (daemon,) = await daemons.start(f"closed-{log_format}-{len(closed)}", 1, "--log-format", log_format)
    held = [os.readlink(f"/proc/{daemon.process.pid}/fd/{number}") for number in range(3)]
    assert not [each for each in held if each.startswith(("socket:", "anon_inode:"))]
    daemon.signal(signal.SIGTERM)
    assert await asyncio.to_thread(daemon.process.wait, TIMEOUT_S) == 0


@pytest.mark.parametrize("end", ENDS)
def test_every_line_is_json_and_the_last_words_come_out(end: str) -> None:
    script, status = ENDS[end]
    returned, told = said(SAYS + script)
    assert returned == status
    events = {line["event"]: (line["level"], line["logger"]) for line in told}
    assert events["ours"] == ("info", "kvferryd.x")
    assert events["E1122 08:00:00.000000  77 nixl_agent.cpp:9] no such thing"] == ("error", "nixl")
    assert events["[1795337709.18] [vm:5293 :0] ucp_worker.c:1 UCX  WARN  slow"] == ("warning", "ucx")
    assert events["\ufffd odd bytes"] == ("info", "foreign")
    assert sum(event.count("x") for event in events if set(event) == {"x"}) == 200_000
    assert any("last words" in event for event in events)
    assert all(line["time"] for line in told)


def test_a_process_ends_when_its_lines_are_written_though_a_library_has_set_up_logging() -> None:
    returned, told = said(ENDS_WITH_LINES)
    assert returned == 0
    assert [line["number"] for line in told] == list(range(300))


@pytest.mark.parametrize("said", ['logs.get("x").error(str(number) * 99)', 'os.write(2, b"UCX  WARN" * 99)'])
def test_whoever_writes_ends_though_nobody_reads(said: str) -> None:
    script = f"{SAYS.partition('libc =')[0]}for number in range(9999):\n    {said}"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def test_a_json_line_stays_and_what_only_looks_like_one_is_wrapped() -> None:
    line = '{"event": "ours"}'
    assert as_json(line) == line
    assert json.loads(as_json("{not json}"))["event"] == "{not json}"


@pytest.mark.anyio
async def test_a_real_daemon_writes_nothing_but_json_though_nixl_and_ucx_talk(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    flags = ["--rest", "127.0.0.1:0", "--peer", "127.0.0.1:0", "--advertise", "127.0.0.1:9"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferryd", "serve", "--log-format", "json", "--engine-socket", str(path), *flags,
        env=os.environ | {"NIXL_LOG_LEVEL": "DEBUG", "UCX_LOG_LEVEL": "info"},
        stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
    )  # fmt: skip
    told = []
    try:
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            async for line in process.stdout:
                told.append(json.loads(line))
                if told[-1]["event"] == "serving":
                    rank = await start_rank("engine", path, Shape(num_blocks=4), 0, "epoch")
                    await rank.client.close()
                    process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert {"nixl", "ucx", "kvferryd.process.serve"} <= {each["logger"] for each in told}
    assert "stopped" in [each["event"] for each in told]
