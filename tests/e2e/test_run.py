"""`kvferry run` with the reference engine: what ends with what, and that nothing is left."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from launched import Launched, launched, refused

from kvferryd.demo.fleet import HOST, Fleet
from kvferryd.run.daemons import APART

START_S = 240.0
ENGINE = (sys.executable, "-m", "kvferry.reference", "serve", "--preset", "tiny", "--port", "{port}")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def ready(*runs: Launched) -> None:
    asyncio.run(runs[0].fleet.ready(*(run.service for run in runs), timeout_s=START_S))


def hears(process: psutil.Process) -> set[int]:
    """The signals for which it has a handler."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return {number for number in signal.valid_signals() if int(caught, 16) >> (number - 1) & 1}


def complete(url: str, **more: object) -> dict[str, object]:
    body = {"prompt": [*range(3, 60)], "max_tokens": 8, "return_token_ids": True, "ignore_eos": True, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_two_engines_of_one_command_each_hand_over_and_end_with_it(fleet: Fleet) -> None:
    prefill = launched(fleet, [*ENGINE, "--tp", "2", "--engine-id", "p"], ranks=2)
    decode = launched(fleet, [*ENGINE, "--engine-id", "d"], flags=["--log-format=json"])
    ready(prefill, decode)
    proxy = fleet.proxy(prefill.service, decode.service)
    asyncio.run(fleet.ready(proxy, timeout_s=START_S))
    moved, alone = complete(proxy.url), complete(prefill.url)
    assert moved["choices"] == alone["choices"]
    listed = httpx.get(f"http://{HOST}:{decode.rest}/v1/transfers", trust_env=False).json()["transfers"]
    assert [each["state"] for each in listed] == ["done"]
    for run, number in ((prefill, signal.SIGTERM), (decode, signal.SIGHUP)):  # as of a closed terminal
        run.look()
        run.service.process.send_signal(number)
    for run in (prefill, decode):
        assert run.wait() == 0, "as the engine"
        run.leaves_nothing()
    lines = prefill.said.splitlines()
    assert {line.partition("|")[0].rstrip() for line in lines} == {"daemon-0", "daemon-1", "engine", "run"}
    order = ["daemons drain", "drain begins", "engine ended", "stopping"]
    found = [next(i for i, line in enumerate(lines) if what in line) for what in order]
    assert found == sorted(found), "drain, then the engine, then the daemons"
    assert all(line.startswith('{"process": "') for line in decode.said.splitlines()), decode.said


KILLED = {
    "daemon": (Launched.serving, 1),  # this engine ends with its daemon; its status is told
    "keeper": (lambda run: run.child("daemon-0"), 2),
    "engine": (lambda run: run.child("engine"), 128 + signal.SIGKILL),
    "first": (lambda run: run.first, -signal.SIGKILL),
    "second": (lambda run: run.second, 128 + signal.SIGKILL),
}


@pytest.mark.parametrize("which", KILLED)
def test_whichever_process_is_killed_nothing_is_left(fleet: Fleet, which: str) -> None:
    find, status = KILLED[which]
    run = launched(fleet, ENGINE)
    run.says("engine registered")
    run.look()
    find(run).kill()
    assert run.wait() == status
    run.leaves_nothing()


def test_an_engine_that_does_not_stop_is_killed_with_all_that_it_has_started(fleet: Fleet) -> None:
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True);"
        " print('deaf', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", stubborn, "-m", "kvferry.reference"]
    run = launched(fleet, command, flags=["--engine-stop-s=0.1"])
    run.says("deaf")
    run.look()
    run.service.process.send_signal(signal.SIGINT)
    run.service.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGKILL
    run.leaves_nothing()


def test_an_upgrade_goes_to_the_keepers_and_leaves_the_engine(fleet: Fleet) -> None:
    lives = "import time; print('lives', flush=True); time.sleep(600)"
    run = launched(fleet, [sys.executable, "-c", lives, "-m", "kvferry.reference"])
    run.says("lives")
    run.look()
    run.service.process.send_signal(signal.SIGUSR1)
    run.eventually(lambda: len(run.served()) == 2, "another daemon serves")
    run.look()
    assert run.child("engine").is_running()
    run.service.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, "as the engine"
    run.leaves_nothing()


@pytest.mark.usefixtures("none_serves")
def test_a_signal_before_the_engine_s_start_ends_the_daemons(fleet: Fleet) -> None:
    run = launched(fleet, ENGINE)
    keeper = run.child("daemon-0")
    keeper.send_signal(signal.SIGHUP)  # an upgrade, wished for before the keeper can hear it
    run.eventually(lambda: signal.SIGHUP in hears(keeper), "the keeper hears signals")
    run.look()
    run.service.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    run.leaves_nothing()


@pytest.mark.usefixtures("none_serves")
def test_a_daemon_that_ends_before_it_serves_is_named(fleet: Fleet) -> None:
    run = launched(fleet, ENGINE)
    keeper = run.child("daemon-0")
    run.look()
    keeper.kill()
    assert run.wait() == 2
    assert "daemon-0 was ended by SIGKILL before it served: its lines say why" in run.said
    assert "Traceback" not in run.said
    run.leaves_nothing()


def test_what_is_in_the_way_is_said_before_anything_starts() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        flags = [f"--rest={HOST}:{port - APART}", "--device=cpu", "--", *ENGINE, "--tp", "2"]
        said = refused([*flags])
    assert f"daemon-1: nothing can listen on rest = {HOST}:{port}" in said
    assert "--rest 127.0.0.1:7510 --peer 127.0.0.1:7511" in said
    assert "there is no such program (command = /nowhere/vllm)" in refused(["--", "/nowhere/vllm", "serve", "m"])
    assert "kvferry run -- vllm serve m" in refused(["vllm", "serve", "m"])
