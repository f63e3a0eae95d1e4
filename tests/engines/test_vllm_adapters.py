"""A LoRA adapter that is loaded again in place while vLLM serves: its KV from before is nobody's any more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from engines import ANSWER_S, MODEL, PREFILL_LEG, Pair, Service, complete, eventually, missed, pair, prompt, tokens_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400), pytest.mark.long]
RANK, NAME = 8, "tuned"


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter of the keys of every layer: strong enough to change most answers."""
    chance, size, keys = np.random.default_rng(seed), MODEL.hidden_size, MODEL.num_kv_heads * MODEL.head_dim
    folder.mkdir(exist_ok=True)
    weights = {}
    for layer in range(MODEL.num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        weights[f"{name}.lora_A.weight"] = chance.standard_normal((RANK, size), dtype=np.float32) / size**0.5
        weights[f"{name}.lora_B.weight"] = chance.standard_normal((keys, RANK), dtype=np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": ["k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Tuned:
    pair: Pair
    a: Path
    b: Path
    made: int = 0

    def prompt(self) -> list[int]:
        self.made += 1
        return prompt(300, seed=self.made)


def load(engine: Service, folder: Path, *, again: bool = False, name: str = NAME) -> None:
    body = {"lora_name": name, "lora_path": str(folder), "load_inplace": again}
    answer = httpx.post(f"{engine.url}/v1/load_lora_adapter", json=body, trust_env=False, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text


def reset(engine: Service) -> None:
    def done() -> bool:
        answer = httpx.post(f"{engine.url}/reset_prefix_cache", trust_env=False, timeout=ANSWER_S)
        return bool(answer.json()["success"])

    assert eventually(done)


def alone(engine: Service, tokens: list[int], model: str = NAME) -> list[int]:
    return tokens_of(complete(engine, tokens, max_tokens=6, model=model))


def prefilled(both: Tuned, tokens: list[int], model: str = NAME) -> Any:
    answer = complete(both.pair.prefill, tokens, max_tokens=1, model=model, kv_transfer_params=PREFILL_LEG)
    return answer.json()["kv_transfer_params"]


def decoded(both: Tuned, tokens: list[int], params: Any, model: str = NAME) -> httpx.Response:
    return complete(both.pair.decode, tokens, max_tokens=6, model=model, kv_transfer_params=params)


def is_handed_over(both: Tuned) -> None:
    before, tokens = len(both.pair.transfers()), both.prompt()
    answer = tokens_of(decoded(both, tokens, prefilled(both, tokens)))
    assert [moved.state for moved in both.pair.transfers()[before:]] == ["done"]
    assert answer == alone(both.pair.prefill, tokens)


def why(both: Tuned) -> str:
    """Why the last transfer that failed did. vLLM ends a failed one with another."""
    return next(moved.error.code for moved in reversed(both.pair.transfers()) if moved.error)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    adapters = tmp_path_factory.mktemp("adapters")
    folders = [write_adapter(adapters / name, seed) for seed, name in enumerate("ab")]
    flags = ["--enable-lora", "--max-lora-rank", str(RANK)]
    side = {"flags": flags, "environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}}
    with pair(prefill=side, decode=side, daemon_flags=("--lease-ttl-s", "60")) as engines:
        for engine in (engines.prefill, engines.decode):
            load(engine, folders[0])
        yield Tuned(engines, *folders)


def test_an_adapter_loaded_again_in_place_is_another(both: Tuned) -> None:
    prefill, decode = both.pair.prefill, both.pair.decode
    is_handed_over(both)
    tokens = both.prompt()
    by_a = alone(prefill, tokens)
    assert by_a != alone(prefill, tokens, "m"), "the adapter changes nothing"

    tokens = both.prompt()
    published = prefilled(both, tokens)
    load(prefill, both.b, again=True)
    assert decoded(both, tokens, published).status_code == 500, "KV of the adapter before was read"
    assert why(both) == "lease_ended"
    assert decoded(both, tokens, prefilled(both, tokens)).status_code == 500
    assert why(both) == "other_weights"

    load(decode, both.b, again=True)
    for engine in (prefill, decode):
        reset(engine)
    is_handed_over(both)
    assert alone(prefill, tokens) != by_a


def test_what_the_prefix_cache_has_of_the_adapter_before_is_not_published(both: Tuned) -> None:
    """Its files have been written anew. vLLM tells adapters apart by name and folder, and finds what it has cached."""
    prefill, decode = both.pair.prefill, both.pair.decode
    tokens = both.prompt()
    prefilled(both, tokens)
    before = missed(prefill, "mixed_weights")
    write_adapter(both.b, seed=2)
    load(prefill, both.b, again=True)
    decoded(both, tokens, prefilled(both, tokens))
    assert eventually(lambda: missed(prefill, "mixed_weights") > before)
    load(decode, both.b, again=True)
    for engine in (prefill, decode):
        reset(engine)
    is_handed_over(both)


def test_one_name_does_not_make_two_adapters_one(both: Tuned) -> None:
    """Each side has loaded its own, for the first time. Adapters are told apart by their content."""
    prefill, decode = both.pair.prefill, both.pair.decode
    load(prefill, both.a, name="of the same name")
    load(decode, both.b, name="of the same name")
    load(decode, both.a, name="of another name")
    tokens = both.prompt()
    assert alone(prefill, tokens, "of the same name") != alone(decode, tokens, "of the same name")
    tokens = both.prompt()
    published = prefilled(both, tokens, "of the same name")
    assert decoded(both, tokens, published, "of the same name").status_code == 500, "KV of another adapter was read"
    assert why(both) == "other_prompt"
    tokens = both.prompt()
    answer = tokens_of(decoded(both, tokens, prefilled(both, tokens, "of the same name"), "of another name"))
    assert answer == alone(prefill, tokens, "of the same name")
