"""Write a small model with random weights. Run by the Python that SGLang is installed for.

    .venv-sglang/bin/python tests/engines/sglang_checkpoint.py latent|windowed|pools|dense|drafted|delta FOLDER

latent: MiniCPM3, whose cache has one row of latent attention for each token. windowed: Gemma 3, every second layer of
which attends to the last 64 tokens; SGLang keeps the others in the same pool. pools: the same, and SGLang keeps them
in another one. dense: Qwen3, which SGLang computes with DP attention, too. drafted: Llama, with an EAGLE draft model in
FOLDER/eagle. delta: Qwen3.5, of whose four layers three have a gated delta net.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MiniCPM3Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

SHAPE = {
    "vocab_size": 512, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,  # with less, the next token hardly depends on the prompt
}  # fmt: skip
WINDOWS = {
    "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
"""SGLang's kernels for these layers are for GPUs, and for heads as large as these."""
CONFIGS = {
    "latent": lambda: MiniCPM3Config(
        **SHAPE, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        dim_model_base=192, scale_emb=1,
    ),
    "windowed": lambda: Gemma3TextConfig(**SHAPE, **WINDOWS),
    "pools": lambda: Gemma3TextConfig(**SHAPE, **WINDOWS, is_hybrid_swa=True, hybrid_layer_pattern=[1, 0] * 2),
    "dense": lambda: Qwen3Config(**SHAPE, head_dim=32),
    "drafted": lambda: LlamaConfig(**SHAPE, head_dim=32),
    "delta": lambda: Qwen3_5TextConfig(
        **SHAPE | WIDE, full_attention_interval=4, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=128, linear_value_head_dim=128,
    ),
}  # fmt: skip


def main(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).float()
    if kind in ("windowed", "pools"):  # SGLang ties Gemma's embeddings: larger ones only say the last token again
        model.get_input_embeddings().weight.data /= 10
    if kind == "drafted":
        embeddings = model.get_input_embeddings().weight.data.normal_()
        embeddings /= embeddings.square().mean(-1, keepdim=True).sqrt()
    model.save_pretrained(folder)
    if kind == "drafted":
        write_eagle(Path(folder, "eagle"), model)
    path = Path(folder, "config.json")
    if kind == "pools":
        path.write_text(path.read_text().replace("Gemma3ForCausalLM", "Gemma3OfTwoPools"))
    if kind == "delta":  # SGLang asks for what transformers has made layer_types of
        path.write_text(json.dumps(json.loads(path.read_text()) | {"full_attention_interval": 4}))


def write_eagle(folder: Path, target: torch.nn.Module) -> None:
    """A draft model that guesses as the target does for the prompt without its first token, for that is what it is: it
    has the target's layers, embeddings and head, and passes over what the target made of the token before. It has no
    norm before its first layer; the target's changes nothing, as its embeddings are of length 1 in the mean."""
    kept = {f"layers.{name}": value for name, value in target.model.layers.state_dict().items()}
    del kept["layers.0.input_layernorm.weight"]
    size = target.config.hidden_size
    kept |= {"fc.weight": torch.cat((torch.eye(size), torch.zeros(size, size)), 1), "fc.bias": torch.zeros(size)}
    LlamaConfig(**target.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"]}).save_pretrained(folder)
    save_file(kept, folder / "model.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
