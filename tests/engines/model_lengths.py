"""Print what vLLM's option max_model_len changes of keys, and of the fingerprint. Run by the Python that vLLM is
installed for.

.venv-engines/bin/python tests/engines/model_lengths.py

A line of JSON: for each model and each length what vLLM makes of it, and the fingerprint.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
from transformers import Llama4TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models import llama4

from kvferry.vllm.identity import fingerprint
from kvferry.vllm.options import Options

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip
SHORT, LONG, HEAD = 64, 65536, 16
FITTED = -1
"""As long as memory allows, which is SHORT here."""
FACTORS = [1.0] * (HEAD // 2), [2.0] * (HEAD // 2)


def longrope(**more: Any) -> PreTrainedConfig:
    rope = {
        "rope_type": "longrope", "short_factor": FACTORS[0], "long_factor": FACTORS[1], "rope_theta": 10000.0,
        "original_max_position_embeddings": SHORT,
    }  # fmt: skip
    return Phi3Config(
        **SHAPE, max_position_embeddings=LONG, original_max_position_embeddings=SHORT, rope_parameters=rope,
        architectures=["Phi3ForCausalLM"], **more,
    )  # fmt: skip


def keys(config: VllmConfig) -> Any:
    """Keys of a token at position 1."""
    rope = config.model_config.hf_text_config.rope_parameters
    turn = get_rope(HEAD, LONG, True, rope, dtype=torch.float32)
    _, turned = turn(torch.tensor([1]), torch.ones(1, HEAD), torch.ones(1, HEAD))
    return turned.tolist()


def tuned(config: VllmConfig) -> Any:
    """Whether Llama 4 scales queries, as vLLM decides it when it makes the model; the rest of which needs a GPU."""
    made = config.with_hf_config(config.model_config.hf_text_config, ["Llama4ForCausalLM"])

    class Model(llama4.Llama4ForCausalLM):  # type: ignore[misc]
        set_moe_parameters = None

    with_layers = llama4.LlamaForCausalLM.__init__
    llama4.LlamaForCausalLM.__init__ = lambda *_, **__: None
    try:
        Model(vllm_config=made)
    except TypeError:  # nothing follows
        pass
    finally:
        llama4.LlamaForCausalLM.__init__ = with_layers
    return made.model_config.hf_config.attn_temperature_tuning


MODELS = {
    "llama": (LlamaConfig(**SHAPE, max_position_embeddings=LONG, architectures=["LlamaForCausalLM"]), keys),
    "longrope": (longrope(), keys),
    "llama-4": (Llama4TextConfig(
        **SHAPE, head_dim=HEAD, max_position_embeddings=LONG, num_local_experts=2, intermediate_size_mlp=32,
        architectures=["Llama4ForCausalLM"],
    ), tuned),
}  # fmt: skip


def main() -> None:
    told: dict[str, list[tuple[Any, str]]] = {}
    for name, (written, made) in MODELS.items():
        told[name] = []
        for longest in (SHORT - 1, SHORT, SHORT + 1, LONG // 2, LONG, FITTED):
            with tempfile.TemporaryDirectory() as folder:
                written.save_pretrained(folder)
                model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=longest)
                config = VllmConfig(
                    model_config=model, device_config=DeviceConfig("cpu"), load_config=LoadConfig(load_format="dummy")
                )
                with set_current_vllm_config(config):
                    get_rope.__globals__["_ROPE_DICT"].clear()  # vLLM keeps what an engine's one length made
                    how = made(config)
                    if longest == FITTED:  # vLLM does so when the model is there
                        model.max_model_len = SHORT
                    told[name].append((how, fingerprint(config, Options())))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
