"""Models whose cache or attention is another than Llama's, between real SGLang engines: equal to SGLang alone."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sglang_engines import PYTHON, START_S, SglangPair, sglang_fleet

from engines import prompt, transfers_at
from kvferry.schemas import TransferState

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]
LENGTHS = [5, 31, 33, 64, 129, 500, 513, 1025]
"""Both sides of a page (16, 32), of the window (64) and of a chunk (512)."""
ATTENTION = {"dp": 2, "flags": ("--enable-dp-attention", "--enable-dp-lm-head")}
"""Each rank of a server is a DP rank: it has the whole attention, and they compute the rest of each layer together.
On a CPU SGLang cannot compute the logits together."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "two stages of two ranks to two": ("dense", {"stages": 2, "ranks": 2}, {"ranks": 2}),
    "DP attention": ("dense", ATTENTION, ATTENTION),
    "latents": ("latent", {}, {}),
    "latents of two ranks to one": ("latent", {"ranks": 2}, {}),
    "latents of one rank to two": ("latent", {}, {"ranks": 2}),
    "windows in one pool": ("windowed", {}, {}),
    "windows in a pool of their own": ("pools", {}, {}),
    "windows of two ranks to one, in a pool of their own": ("pools", {"ranks": 2}, {}),
}
"""Model, prefill, decode."""
GATE = "latents", "windows in a pool of their own"
"""The cheapest of each kind of cache."""


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=[] if each in GATE else [pytest.mark.long]) for each in CASES]
)
def pair(request: pytest.FixtureRequest) -> Iterator[SglangPair]:
    kind, source, destination = CASES[request.param]
    with sglang_fleet(partial(_checkpoint, kind)) as fleet:
        prefill = fleet.sglang("p", mode="prefill", page_size=16, **source)
        decode = fleet.sglang("d", mode="decode", page_size=32, **destination)
        single = fleet.sglang("single", mode="null")
        asyncio.run(fleet.ready(prefill, decode, single, timeout_s=START_S))
        router = fleet.sglang_router(prefill, decode)
        asyncio.run(fleet.ready(router, timeout_s=START_S))
        yield SglangPair(prefill, decode, single, router)


def _checkpoint(kind: str, folder: Path) -> None:
    """Written by the Python that SGLang is installed for, which has transformers."""
    script = Path(__file__).with_name("sglang_checkpoint.py")
    subprocess.run([PYTHON, script, kind, folder], timeout=START_S, check=True)


def test_prompts_of_every_length_get_a_single_engines_tokens(pair: SglangPair) -> None:
    pair.same([prompt(length) for length in LENGTHS])
    transfers = [transfer for daemon in pair.decode.daemons for transfer in transfers_at(daemon)]
    assert {transfer.state for transfer in transfers} == {TransferState.DONE}
    assert len({transfer.request_id for transfer in transfers}) == len(LENGTHS)


def test_eight_at_once_get_a_single_engines_tokens(pair: SglangPair) -> None:
    pair.same([prompt(length, seed=1) for length in LENGTHS], at_once=8)
