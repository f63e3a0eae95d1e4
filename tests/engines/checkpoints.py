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
from safetensors.torch import save_file

VOCABULARY = 576
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,  # with less, the next token hardly depends on the prompt
}  # fmt: skip
"""A model with TP 2 and 3: heads, groups and widths are multiples of 6."""
MAMBA = {
    "mamba_n_heads": 12, "mamba_d_head": 32, "mamba_n_groups": 6, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_d_ssm": 384,
}  # fmt: skip
WINDOWS = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
"""As DeepSeek's own models have it. Without it latent attention is wrong on vLLM 0.32's CPU: the kernel for plain
rotary embeddings takes the step from head to head for the one from token to token, so it turns the key of token t when
it means token 9 t, and a prompt's keys change with the tokens behind them."""
LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "rope_parameters": YARN,
}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-4": (
        "GraniteMoeHybridConfig",
        PLAIN | MAMBA | {
            "shared_intermediate_size": 384, "layer_types": ["mamba", "attention"] * 2,
            "position_embedding_type": "rope", "num_local_experts": 0, "num_experts_per_tok": 0,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        PLAIN | {
            "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "linear_num_key_heads": 6, "linear_num_value_heads": 12, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96,
        },
    ),
    "falcon-h1": ("FalconH1Config", PLAIN | MAMBA),
    "nemotron-h": (
        "NemotronHConfig",
        PLAIN | {
            "head_dim": 32, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 12,
            "mamba_head_dim": 32, "n_groups": 6, "ssm_state_size": 16,
        },
    ),
    "jamba": (
        "JambaConfig",
        PLAIN | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1},
    ),
    "lfm2": (
        "Lfm2Config",
        PLAIN | {
            "conv_dim": 192, "block_dim": 192, "block_multiple_of": 64, "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0, "layer_types": ["conv", "full_attention"] * 2,
        },
    ),
    "gemma-3": ("Gemma3TextConfig", PLAIN | WINDOWS | {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma-3n": (
        "Gemma3nTextConfig",
        PLAIN | WINDOWS | PER_LAYER | {
            "head_dim": 32, "num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4,
            "num_kv_shared_layers": 4, "laurel_rank": 16, "tie_word_embeddings": True, "intermediate_size": [384] * 8,
            "activation_sparsity_pattern": [0.0] * 8,
        },
    ),
    "gemma-4": (
        "Gemma4TextConfig",
        PLAIN | WINDOWS | PER_LAYER | {
            "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        },
    ),
    "llama-4": (
        "Llama4TextConfig",
        PLAIN | {
            "head_dim": 32, "attention_chunk_size": 128, "no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 384,
            "num_local_experts": 4, "num_experts_per_tok": 1,
        },
    ),
    "gpt-oss": ("GptOssConfig", PLAIN | WINDOWS | EXPERTS | {"head_dim": 32}),
    "deepseek-v2": ("DeepseekV2Config", PLAIN | LATENT | {"topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3Config", PLAIN | LATENT | {"topk_method": "noaux_tc"}),
    "mistral": ("MistralConfig", PLAIN | {"head_dim": 32, "sliding_window": 100}),
    "qwen3": ("Qwen3Config", PLAIN | {"head_dim": 32}),
    "llama": ("LlamaConfig", PLAIN | {"head_dim": 32}),
}  # fmt: skip
"""The class of a configuration and its values, by the name of the model."""


def main(folder: str, name: str, changes: str = "{}") -> None:
    torch.manual_seed(0)
    made, values = MODELS[name]
    config = getattr(transformers, made)(**values | json.loads(changes))
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(Path(folder))
    if name == "llama":
        write_eagle(Path(folder, "eagle"), config)


def write_eagle(folder: Path, target: Any) -> None:
    """A draft model for it: a layer whose input is a token's embedding and what the target made of the one before.

    The first layer of vLLM's EagleLlamaForCausalLM has no norm before it, and the embeddings are the target's.
    """
    values = target.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    config = transformers.LlamaConfig(**values)
    layer = transformers.AutoModelForCausalLM.from_config(config).float().model.layers.state_dict(prefix="layers.")
    del layer["layers.0.input_layernorm.weight"]
    size = config.hidden_size
    config.save_pretrained(folder)
    save_file(
        layer | {"fc.weight": torch.randn(size, 2 * size) * config.initializer_range}, folder / "model.safetensors"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
