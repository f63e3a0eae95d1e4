"""`kvferry run -- python -m sglang.launch_server` on GPUs: a pair of two commands, with a GPU each where there are two.

`SGLANG_VENV=... pytest -s -m gpu tests/engines/test_sglang_run_gpu.py`, with SGLang for CUDA there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("gpu", "e2e")]

from needs import GPUS

# isort: split
from bench_sglang import GPU_START_S, GpuFleet
from launched import Launched, launched
from sglang_engines import PYTHON, SglangEngine, SglangPair
from test_sglang_gpu import FLAGS, TIE, gap
from test_vllm_run import daemon

from engines import MODEL, fleet_of, prompt, transfers_at
from kvferryd.demo.fleet import HOST

pytestmark = [pytest.mark.gpu, pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture
def fleet() -> Iterator[GpuFleet]:
    with fleet_of(GpuFleet, PYTHON) as fleet:
        fleet.model(MODEL)
        (fleet.directory / "node").mkdir()
        yield fleet


def sglang(fleet: GpuFleet, patch: pytest.MonkeyPatch, mode: str, gpu: int) -> tuple[Launched, SglangEngine]:
    """The command of a user in a container with this GPU, and a folder that it shares with others of the host."""
    patch.setenv("CUDA_VISIBLE_DEVICES", str(gpu))
    bootstrap = fleet.free_port()
    command = [
        "/usr/bin/env", *(f"{name}={value}" for name, value in fleet.sglang_environment("kvferry", 1).items()),
        str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(fleet.directory / "model"), "--host", HOST,
        "--port", "{port}", "--random-seed", "0", "--page-size", "32", "--nccl-port", str(fleet.free_port()),
        *fleet.sglang_flags, *FLAGS, "--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(bootstrap),
    ]  # fmt: skip
    run = launched(fleet, command, device="", flags=["--node-dir", str(fleet.directory / "node")])
    service = run.service
    return run, SglangEngine("sglang", service.url, "/health", service.process, service.log, bootstrap)


def test_a_pair_hands_over_survives_a_daemon_and_leaves_nothing(
    fleet: GpuFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, prefill), (second, decode) = (
        sglang(fleet, monkeypatch, mode, gpu) for mode, gpu in (("prefill", 0), ("decode", len(GPUS) - 1))
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    single = fleet.sglang("single", mode="null", page_size=32, gpu=str(len(GPUS) - 1), flags=FLAGS)
    asyncio.run(fleet.ready(prefill, decode, single, timeout_s=GPU_START_S))
    pair = SglangPair(prefill, decode, single)

    def worst(*lengths: int) -> float:
        prompts = [prompt(length) for length in lengths]
        return max(gap(single, tokens, pair.handover(tokens)) for tokens in prompts)

    assert worst(5, 100, 700) < TIE
    done = transfers_at(daemon(second))
    assert [(each.state, each.path) for each in done] == [("done", "mapped")] * 3

    registered = second.said.count("engine registered")
    second.serving().kill()
    second.eventually(lambda: second.said.count("engine registered") > registered, "SGLang attaches to the next daemon")
    assert worst(300) < TIE

    for run in (first, second):
        run.look()
        run.service.process.send_signal(signal.SIGTERM)
        run.wait()
        run.leaves_nothing()
