"""The states that SGLang keeps beside KV, between engines on GPUs.

`SGLANG_VENV=... pytest -s -m gpu tests/engines/test_sglang_gpu.py`, with SGLang for CUDA there; on one GPU all engines
share it. CUDA graphs and the overlap scheduler are on.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import eq
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / "gpu")]

from needs import GPUS

# isort: split
from bench_sglang import GPU_START_S, GpuFleet
from sglang_engines import PYTHON, SglangPair, generate
from test_sglang_models import LENGTHS

from engines import fleet_of, prompt
from kvferry.schemas import TransferState
from kvferryd.demo.fleet import Service

pytestmark = [pytest.mark.gpu, pytest.mark.engines, pytest.mark.long, pytest.mark.timeout(500)]
FLAGS = (
    "--load-format", "auto", "--max-total-tokens", "16384", "--mem-fraction-static", "0.6", "--chunked-prefill-size",
    "512", "--max-mamba-cache-size", "48",
)  # fmt: skip
TIE = 3.0
"""bf16 alone makes 0.2 of these weights, and the state of another prompt 5 within three tokens."""


@pytest.fixture
def pair() -> Iterator[SglangPair]:
    last = str(len(GPUS) - 1)
    with fleet_of(GpuFleet, PYTHON) as fleet:
        fleet.model(checkpoint)
        prefill = fleet.sglang("p", mode="prefill", page_size=16, gpu="0", flags=FLAGS)
        decode = fleet.sglang("d", mode="decode", page_size=32, gpu=last, flags=FLAGS)
        single = fleet.sglang("single", mode="null", page_size=32, gpu=last, flags=FLAGS)
        asyncio.run(fleet.ready(prefill, decode, single, timeout_s=GPU_START_S))
        yield SglangPair(prefill, decode, single)


def checkpoint(folder: Path) -> None:
    """Not in a fork of an SGLang: the one for GPUs does not import beside this folder's stand-in for its kernels."""
    subprocess.run([PYTHON, Path(__file__).with_name("sglang_checkpoint.py"), "delta", folder], check=True, timeout=120)


def test_what_is_computed_behind_a_moved_state_is_what_a_single_engine_would_compute(pair: SglangPair) -> None:
    """But for ties in bf16: the single engine says for each token how much more likely it holds another."""
    for seed, at_once in ((0, 1), (1, 8)):
        prompts = [prompt(length, seed=seed) for length in LENGTHS]
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(pair.handover, prompts))
        found = [gap(pair.single, *each) for each in zip(prompts, answers, strict=True)]
        alone = [pair.alone(tokens) for tokens in prompts]
        print(f"{at_once} at once: gaps {found}, {sum(map(eq, answers, alone))} of {len(prompts)} token by token")
        assert max(found) < TIE
    transfers = pair.decode.transfers()
    assert {(transfer.state, transfer.path) for transfer in transfers} == {(TransferState.DONE, "mapped")}


def gap(single: Service, tokens: Sequence[int], answer: Sequence[int]) -> float:
    """How much less likely than its own choice the single engine finds a token of an answer at most, as a logarithm."""
    said = generate(
        single, [*tokens, *answer], max_tokens=1, return_logprob=True, logprob_start_len=len(tokens) - 1,
        top_logprobs_num=1,
    ).json()["meta_info"]  # fmt: skip
    given, best = (said[f"input_{which}_logprobs"][-len(answer) :] for which in ("token", "top"))
    assert [token for _, token, _ in given] == list(answer)
    return max(top[0][0] - own[0] for top, own in zip(best, given, strict=True))
