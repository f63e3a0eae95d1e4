"""Write a small hybrid model: Mamba2 layers and attention layers in turn. Run by the Python that vLLM is installed for.

.venv-engines/bin/python tests/engines/hybrid_checkpoint.py FOLDER GROUPS
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig


def main(folder: str, groups: str) -> None:
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(
        vocab_size=576,
        hidden_size=192,
        intermediate_size=384,
        shared_intermediate_size=384,
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        num_attention_heads=6,
        num_key_value_heads=6,
        position_embedding_type="rope",
        max_position_embeddings=4096,
        mamba_n_heads=12,
        mamba_d_head=32,
        mamba_n_groups=int(groups),
        mamba_d_state=16,
        mamba_expand=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,  # with less, the next token hardly depends on the prompt
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
