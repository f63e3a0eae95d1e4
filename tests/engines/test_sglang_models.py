"""Models whose cache or attention is another than Llama's, between real SGLang engines: equal to SGLang alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sglang_engines import PYTHON, START_S, SglangPair, generate, sglang_fleet

from engines import prompt, ran, transfers_at
from kvferry.schemas import TransferState

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]
LENGTHS = [5, 31, 33, 64, 129, 500, 513, 1025]
"""Both sides of a page (16, 32), of the window (64) and of a chunk (512)."""
OTHERS = [prompt(length, seed=2) for length in LENGTHS]
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
DRAFTS = (
    "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "{model}/eagle",
    "--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2",
)  # fmt: skip
"""The draft model guesses one token at a time: SGLang's attention of torch has no more."""
GATE = "windows in a pool of their own"


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=[] if each == GATE else [pytest.mark.long]) for each in CASES]
)
def pair(request: pytest.FixtureRequest) -> Iterator[SglangPair]:
    with started(*CASES[request.param]) as pair:
        yield pair


@pytest.fixture(scope="module", params=[1, 2])
def drafting(request: pytest.FixtureRequest) -> Iterator[SglangPair]:
    """With a draft model on both sides; so many ranks to one."""
    with started("drafted", {"ranks": request.param}, {}, DRAFTS) as pair:
        yield pair


@contextmanager
def started(
    kind: str, source: dict[str, Any], destination: dict[str, Any], flags: Sequence[str] = ()
) -> Iterator[SglangPair]:
    """flags: of all three engines beside their own; {model} stands for the model's folder."""
    with sglang_fleet(partial(checkpoint, kind)) as fleet:
        every = {"flags": [each.format(model=fleet.directory / "model") for each in flags]}
        prefill = fleet.sglang("p", mode="prefill", page_size=16, **every | source)
        decode = fleet.sglang("d", mode="decode", page_size=32, **every | destination)
        single = fleet.sglang("single", mode="null", **every)
        asyncio.run(fleet.ready(prefill, decode, single, timeout_s=START_S))
        router = fleet.sglang_router(prefill, decode)
        asyncio.run(fleet.ready(router, timeout_s=START_S))
        yield SglangPair(prefill, decode, single, router)


def checkpoint(kind: str, folder: Path) -> None:
    """Written by the Python that SGLang is installed for, which has transformers."""
    ran("sglang_checkpoint.py", kind, folder, python=PYTHON)


def test_prompts_of_every_length_get_a_single_engines_tokens(pair: SglangPair) -> None:
    pair.same([prompt(length) for length in LENGTHS])
    transfers = [transfer for daemon in pair.decode.daemons for transfer in transfers_at(daemon)]
    assert {transfer.state for transfer in transfers} == {TransferState.DONE}
    assert len({transfer.request_id for transfer in transfers}) == len(LENGTHS)


def test_eight_at_once_get_a_single_engines_tokens(pair: SglangPair) -> None:
    pair.same([prompt(length, seed=1) for length in LENGTHS], at_once=8)


@pytest.mark.long
def test_a_draft_model_guesses_what_it_guesses_in_a_single_engine(drafting: SglangPair) -> None:
    """Its own cache of the prompt was moved: with another one it would guess something else. The tokens are
    the model's, whatever was guessed."""
    drafting.same([prompt(length) for length in LENGTHS])
    found = [(_right(drafting.handed_over(tokens)), _right(generate(drafting.single, tokens))) for tokens in OTHERS]
    assert [moved for moved, _ in found] == [alone for _, alone in found]
    assert sum(moved for moved, _ in found) > 2 * len(OTHERS), "most of a draft model's use is there"


def _right(answer: httpx.Response) -> int:
    """The guesses that were right."""
    return int(answer.json()["meta_info"]["spec_num_correct_drafts"])
