"""vLLM engines of many architectures. NaN lies in the blocks of every load before it begins: none of it may be read.

Each test holds what it found against its row of the table in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from architectures import DEVICE, VOCABULARY, Model, Stages, stages

from engines import prompt
from kvferry.schemas import TransferState

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
LENGTHS = [5, 33, 63, 100, 127, 129, 200, 300, 500, 513, 700, 1025]
SEEDS = (3, 4, 5)
BF16: dict[str, Any] = {"dtype": "bfloat16", "block_size": 32}
HYBRID: dict[str, Any] = BF16 | {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False}
FP8 = {name: {"kv_cache_dtype": name} for name in ("fp8", "fp8_e4m3", "fp8_e5m2")}
LONGER_BLOCKS = {"block_size": 64}
LATENT = BF16 | {"block_size": 16}  # the only size of vLLM's latent attention on CPUs without AMX
MODELS = {
    "granite-4": Model("granite-4", HYBRID, apart=False),
    "gemma-3": Model("gemma-3", BF16, decode=LONGER_BLOCKS),
    "gemma-4": Model("gemma-4", BF16),
    "deepseek-v2": Model("deepseek-v2", LATENT, apart=True),
    "fp8": Model("qwen3", BF16, FP8["fp8"], FP8["fp8_e4m3"]),
    "qwen3": Model("qwen3", BF16, decode=LONGER_BLOCKS),
    "falcon-h1": Model("falcon-h1", HYBRID, apart=False),
    "nemotron-h": Model("nemotron-h", HYBRID, apart=False),
    "qwen3-next": Model("qwen3-next", HYBRID, apart=False),
    "lfm2": Model("lfm2", BF16, apart=False),
    "gpt-oss": Model("gpt-oss", BF16),
    "gemma-3n": Model("gemma-3n", BF16),
    "llama-4": Model("llama-4", BF16),
    "mistral": Model("mistral", BF16),
    "deepseek-v3": Model("deepseek-v3", LATENT, apart=True),
    "qwen3-next, cached": Model("qwen3-next", HYBRID | {"enable_prefix_caching": True}, apart=False),
    "deepseek-v2, whole": Model("deepseek-v2", LATENT | {"dtype": "float32"}, apart=False),
}
IN_THE_GATE = ["gemma-3", "deepseek-v2", "fp8"]
"""Windows, two block sizes; latent attention; two names of one cache type."""
PAGE = Path(__file__).parents[2] / "docs/models.md"
SHOWN = ("dtype", "mamba_ssm_cache_dtype", "kv_cache_dtype", "block_size")
"""Options of the engines that the table has columns for."""
DRAFT: dict[str, Any] = {
    "speculative_config": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 2},
    "logits_processors": [],  # vLLM has no custom ones beside drafts
}  # fmt: skip
DRAFTED: dict[str, Any] = {"dtype": "float32", "block_size": 32}
DRAFTS = {
    "llama, draft on both": Model("llama", DRAFTED, DRAFT, DRAFT),
    "llama, draft on prefill": Model("llama", DRAFTED, DRAFT),
    "llama, draft on decode": Model("llama", DRAFTED, decode=DRAFT),
}
UNPROVEN = {"lfm2": "none depends on the first of 200 tokens: this proves little"}
DEPENDS, WITHIN_A_WINDOW = 6, {"mistral": 3}
"""Which prompt is asked again with another first token; where all layers have windows, one that is no longer."""
NO_FP8 = "vLLM 0.32 has FP8 caches on CPUs with AVX-512 only"


@pytest.fixture(scope="module")
def both() -> Iterator[Stages]:
    with stages() as started:
        yield started


def marks(name: str) -> list[pytest.MarkDecorator]:
    unproven = [pytest.mark.xfail(strict=True, reason=UNPROVEN[name])] if name in UNPROVEN else []
    return unproven if name in IN_THE_GATE else [pytest.mark.long, *unproven]


def rows() -> dict[str, list[str]]:
    """The table of the page, by the first cell."""
    table = PAGE.read_text().partition("<!-- engines: test_vllm_models -->\n")[2].partition("<!-- engines: end -->")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {name: rest for name, *rest in cells}


def check_row(name: str, model: Model, prompts: int, tokens: str) -> None:
    """tokens: what became of them."""
    both = [dict(model.options) | dict(side) for side in (model.prefill, model.decode)]
    options = [" to ".join(dict.fromkeys(str(side.get(option, "-")) for side in both)) for option in SHOWN]
    assert rows()[name] == [*options, str(prompts), tokens]


def test_the_page_has_a_row_for_every_model() -> None:
    assert list(rows()) == [*MODELS, *DRAFTS]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in MODELS])
def test_the_tokens_are_those_of_one_engine(both: Stages, name: str) -> None:
    if name == "fp8" and DEVICE == "cpu" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip(NO_FP8)
    both.load(MODELS[name])
    before = len(both.transfers())
    prompts = [prompt(length, seed, vocabulary=VOCABULARY) for seed in SEEDS for length in LENGTHS]
    moved = [both.handover(tokens, max_tokens=6) for tokens in prompts]
    alone = [both.split(tokens, max_tokens=6) for tokens in prompts]
    different = [len(tokens) for tokens, one, other in zip(prompts, moved, alone, strict=True) if one != other]
    assert not different, f"prompts of {different} tokens have other tokens: {moved}, alone {alone}"
    assert [one.state for one in both.transfers()[before:]] == [TransferState.DONE] * len(prompts)
    check_row(name, MODELS[name], len(prompts), f"equal, but {UNPROVEN[name]}" if name in UNPROVEN else "equal")
    asked = WITHIN_A_WINDOW.get(name, DEPENDS)
    first, *rest = prompts[asked]
    assert both.split([first ^ 1, *rest], max_tokens=6) != alone[asked], "the tokens do not depend on the whole prompt"


@pytest.mark.long
@pytest.mark.parametrize("name", list(DRAFTS)[:2])
def test_a_draft_model_changes_no_tokens(both: Stages, name: str) -> None:
    both.load(DRAFTS[name])
    before = len(both.transfers())
    for tokens in (prompt(length, vocabulary=VOCABULARY) for length in LENGTHS):
        assert both.handover(tokens, max_tokens=12) == both.prefill.generate(tokens, 12)[0]
    assert [one.state for one in both.transfers()[before:]] == [TransferState.DONE] * len(LENGTHS)
    check_row(name, DRAFTS[name], len(LENGTHS), "equal")


@pytest.mark.long
def test_a_draft_model_on_decode_alone_is_refused(both: Stages) -> None:
    name = "llama, draft on decode"
    both.load(DRAFTS[name])
    assert both.handover(prompt(100, vocabulary=VOCABULARY), max_tokens=6) == []
    error = both.transfers()[-1].error
    assert error
    assert "component 4.k: missing_component" in error.message
    check_row(name, DRAFTS[name], 1, "refused: missing_component")
