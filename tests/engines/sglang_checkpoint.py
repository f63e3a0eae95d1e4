"""Write a small model with random weights. Run by the Python that SGLang is installed for.

    .venv-sglang/bin/python tests/engines/sglang_checkpoint.py latent|windowed|pools|dense FOLDER

latent: MiniCPM3, whose cache has one row of latent attention for each token. windowed: Gemma 3, every second layer of
which attends to the last 64 tokens; SGLang keeps the others in the same pool. pools: the same, and SGLang keeps them
in another one. dense: Qwen3, which SGLang computes with DP attention, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MiniCPM3Config, Qwen3Config

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
CONFIGS = {
    "latent": lambda: MiniCPM3Config(
        **SHAPE, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        dim_model_base=192, scale_emb=1,
    ),
    "windowed": lambda: Gemma3TextConfig(**SHAPE, **WINDOWS),
    "pools": lambda: Gemma3TextConfig(**SHAPE, **WINDOWS, is_hybrid_swa=True, hybrid_layer_pattern=[1, 0] * 2),
    "dense": lambda: Qwen3Config(**SHAPE, head_dim=32),
}  # fmt: skip


def main(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).float()
    if kind in ("windowed", "pools"):  # SGLang ties Gemma's embeddings: larger ones only say the last token again
        model.get_input_embeddings().weight.data /= 10
    model.save_pretrained(folder)
    if kind == "pools":
        path = Path(folder, "config.json")
        path.write_text(path.read_text().replace("Gemma3ForCausalLM", "Gemma3OfTwoPools"))


if __name__ == "__main__":
    main(*sys.argv[1:])
