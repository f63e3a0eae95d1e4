"""Write a small model of some architecture, its weights random. Run by the Python that vLLM is installed for.

.venv-engines/bin/python tests/engines/checkpoints.py FOLDER NAME [JSON of changes to its configuration]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 576
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,  # with less, the next token hardly depends on the prompt
}  # fmt: skip
"""A model with TP 2 and 3: heads, groups and widths are multiples of 6."""
MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 32, "mamba_n_groups": 6, "mamba_d_state": 16, "mamba_expand": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-4": (
        "GraniteMoeHybridConfig",
        PLAIN | MAMBA | {
            "shared_intermediate_size": 384, "layer_types": ["mamba", "attention"] * 2,
            "position_embedding_type": "rope", "num_local_experts": 0, "num_experts_per_tok": 0,
        },
    ),
}  # fmt: skip
"""The class of a configuration and its values, by the name of the model."""


def main(folder: str, name: str, changes: str = "{}") -> None:
    torch.manual_seed(0)
    made, values = MODELS[name]
    config = getattr(transformers, made)(**values | json.loads(changes))
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
