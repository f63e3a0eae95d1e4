"""`kvferry run -- vllm ...` on GPUs: a pair of two commands, each with a GPU of its own, and one of two ranks.

`ENGINES_VENV=... pytest -s -m gpu tests/engines/test_vllm_run_gpu.py`, with vLLM for CUDA there and two GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("gpu", "e2e")]

from needs import GPUS

# isort: split
from bench_gpu import SMALL, GpuEngines
from launched import Launched, launched
from test_vllm_run import daemon, ready

from engines import PYTHON, Pair, fleet_of, prompt, transfers_at
from kvferryd.demo.fleet import HOST

pytestmark = [
    pytest.mark.gpu, pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(600),
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs"),
]  # fmt: skip


@pytest.fixture
def fleet() -> Iterator[GpuEngines]:
    with fleet_of(GpuEngines) as fleet:
        fleet.shape(SMALL)
        (fleet.directory / "node").mkdir()
        yield fleet


def vllm(fleet: GpuEngines, patch: pytest.MonkeyPatch, *gpus: int) -> Launched:
    """The command of a user in a container with these GPUs, and a folder that it shares with others of the host."""
    patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, gpus)))
    command = [
        "/usr/bin/env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", str(PYTHON), "-m",
        "vllm.entrypoints.openai.api_server", "--model", str(fleet.directory / "model"), "--served-model-name", "m",
        "--host", HOST, "--port", "{port}", "--seed", "0", "--skip-tokenizer-init", "--enforce-eager",
        *fleet.flags, "--kv-cache-memory-bytes", str(2 << 30), "-tp", str(len(gpus)),
    ]  # fmt: skip
    flags = ["--node-dir", str(fleet.directory / "node")]
    return launched(fleet, command, ranks=len(gpus), device="", flags=flags)


@pytest.mark.parametrize("gpus", [([0], [1]), ([0, 1], [1, 0])], ids=["one rank", "two ranks"])
def test_a_pair_hands_over_survives_a_daemon_and_leaves_nothing(
    fleet: GpuEngines, monkeypatch: pytest.MonkeyPatch, gpus: tuple[list[int], list[int]]
) -> None:
    prefill, decode = (vllm(fleet, monkeypatch, *each) for each in gpus)
    ready(fleet, prefill, decode)
    pair = Pair(fleet, prefill.service, decode.service, [daemon(prefill)], [daemon(decode)])
    for length in (100, 1000, 4000):
        assert pair.handover(prompt(length)) == pair.alone(prompt(length))
    done = transfers_at(daemon(decode))
    assert [(each.state, each.path) for each in done] == [("done", "mapped")] * 3

    registered = decode.said.count("engine registered")
    decode.serving().kill()
    decode.eventually(lambda: decode.said.count("engine registered") > registered, "vLLM attaches to the next daemon")
    assert pair.handover(prompt(300)) == pair.alone(prompt(300))

    for run in (prefill, decode):
        run.look()
        run.service.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
        run.leaves_nothing()
