"""`kvferry run -- python -m sglang.launch_server`: a pair of two commands, and what becomes of it when one of its
processes is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sglang_engines import FLAGS, PYTHON, START_S, SglangEngine, SglangFleet, SglangPair, sglang_fleet

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import asyncio

from launched import Launched, launched

from engines import MODEL, SITE, prompt
from kvferryd.demo.fleet import HOST

pytestmark = [pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(3000)]


@pytest.fixture
def fleet() -> Iterator[SglangFleet]:
    with sglang_fleet(MODEL) as fleet:
        yield fleet


def sglang(fleet: SglangFleet, mode: str, ranks: int = 1) -> tuple[Launched, SglangEngine]:
    bootstrap = fleet.free_port()
    every = "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * ranks)
    command = [
        "/usr/bin/env", f"PYTHONPATH={os.pathsep.join(filter(None, (str(SITE), os.environ.get('PYTHONPATH'))))}",
        "SGLANG_USE_CPU_ENGINE=1", "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0",
        "SGLANG_EXTERNAL_MODEL_PACKAGE=few_models", f"SGLANG_CPU_OMP_THREADS_BIND={every}",
        str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(fleet.directory / "model"), "--host", HOST,
        "--port", "{port}", "--random-seed", "0", "--page-size", "32", "--tp", str(ranks), "--nccl-port",
        str(fleet.free_port()), *FLAGS, "--disaggregation-mode", mode,
        "--disaggregation-bootstrap-port", str(bootstrap),
    ]  # fmt: skip
    if mode == "decode":
        command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    run = launched(fleet, command, ranks=ranks)
    service = run.service
    return run, SglangEngine("sglang", service.url, "/health", service.process, service.log, bootstrap)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pair_of_two_commands_hands_over_and_leaves_nothing(fleet: SglangFleet, ranks: int) -> None:
    (first, prefill), (second, decode) = sglang(fleet, "prefill", ranks), sglang(fleet, "decode")
    single = fleet.engine("single")
    asyncio.run(fleet.ready(*fleet.services, timeout_s=START_S))
    pair = SglangPair(prefill, decode, single)
    pair.same([prompt(length) for length in (5, 100, 700)])
    listed = httpx.get(f"http://{HOST}:{second.rest}/v1/transfers", trust_env=False).json()["transfers"]
    assert [each["state"] for each in listed] == ["done"] * 3

    second.serving().kill()
    second.eventually(lambda: second.said.count("engine registered") == 2, "SGLang attaches to the next daemon")
    pair.same([prompt(300)])

    for run in (first, second):
        run.look()
    second.second.kill()
    assert second.wait() == 128 + signal.SIGKILL
    second.leaves_nothing()
    first.service.process.send_signal(signal.SIGTERM)
    first.wait()
    first.leaves_nothing()


@pytest.mark.parametrize("which", ["keeper", "engine", "first"])
def test_whichever_process_is_killed_nothing_is_left(fleet: SglangFleet, which: str) -> None:
    run, _ = sglang(fleet, "prefill")
    asyncio.run(fleet.ready(run.service, timeout_s=START_S))
    run.look()
    killed = {
        "keeper": lambda: run.child("daemon-0"),
        "engine": lambda: run.child("engine"),
        "first": lambda: run.first,
    }
    killed[which]().kill()
    run.wait()
    run.leaves_nothing()
