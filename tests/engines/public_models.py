"""Public models: the numbers of their configurations that decide where KV lies, for tests/engines/models.py.

Every configuration is that of transformers 5.19 for its `model_type` (the defaults of many of its classes are the sizes
of a public model), with the fields that differ in the model's own config.json at huggingface.co/`source`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = tuple[int, int]
"""Rows in all, and into how many parts tensor parallelism may divide them; ranks beyond the parts have copies."""


@dataclass(frozen=True)
class Model:
    """heads: KV heads by layer. states: of a recurrent layer, by tensor the rows that follow one another along its
    sharded axis. layers: the first so many are compared: all kinds of layers, more than once. ranks: TP8 of the table
    is so many ranks here. dcp_ranks: with context parallelism, for which vLLM wants two ranks with each head."""

    source: str
    config: dict[str, Any]
    heads: Callable[[int], int]
    states: tuple[tuple[Rows, ...], ...] = ()
    layers: int = 6
    ranks: int = 8
    dcp_ranks: int = 16
    without: tuple[tuple[str, str], ...] = ()
    """Modules and classes of vLLM that are left out, as they do not run here, and have no KV."""


def mamba2(heads: int, dim: int, groups: int, size: int) -> tuple[tuple[Rows, ...], ...]:
    """The convolution remembers x, B and C; the state has heads."""
    group = (groups * size, groups)
    return (((heads * dim, heads), group, group), ((heads, heads),))


def delta(keys: int, values: int, dim: int) -> tuple[tuple[Rows, ...], ...]:
    """The convolution remembers q, k and v; the state has the heads of v."""
    return (((keys * dim, keys), (keys * dim, keys), (values * dim, values)), ((values, values),))


def _of(kind: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture]} | fields


KIMI = [4, 8, 12, 16, 20, 24, 27]
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

MODELS: dict[str, Model] = {
    "Llama-3-70B": Model(
        "meta-llama/Meta-Llama-3-70B",
        _of(
            "llama", "LlamaForCausalLM", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        ),
        lambda layer: 8,
        layers=4,
    ),
    "Qwen3-235B-A22B": Model(
        "Qwen/Qwen3-235B-A22B",
        _of(
            "qwen3_moe", "Qwen3MoeForCausalLM", hidden_size=4096, intermediate_size=12288, num_hidden_layers=94,
            num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
        ),
        lambda layer: 4,
        layers=4,
    ),
    "Gemma-3-27B": Model(
        "google/gemma-3-27b-it",
        _of(
            "gemma3_text", "Gemma3ForCausalLM", hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
            num_attention_heads=32, num_key_value_heads=16, head_dim=128, vocab_size=262208, sliding_window=1024,
            query_pre_attn_scalar=168,
        ),
        lambda layer: 16,
        layers=12,
        dcp_ranks=32,
    ),
    "Gemma-4-31B": Model(
        "google/gemma-4-31B-it",
        _of(
            "gemma4_text", "Gemma4ForCausalLM", hidden_size=5376, intermediate_size=21504, num_hidden_layers=60,
            num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4, head_dim=256,
            global_head_dim=512, attention_k_eq_v=True, vocab_size=262144, sliding_window=1024,
            hidden_size_per_layer_input=0,
        ),
        lambda layer: 16 if (layer + 1) % 6 else 4,
        layers=12,
        dcp_ranks=32,
    ),
    "gpt-oss-120b": Model(
        "openai/gpt-oss-120b",
        _of("gpt_oss", "GptOssForCausalLM"),
        lambda layer: 8,
        without=(("vllm.model_executor.models.gpt_oss", "FusedMoEFactory"),),
    ),
    "Llama-4-Scout": Model(
        "meta-llama/Llama-4-Scout-17B-16E",
        _of("llama4_text", "Llama4ForCausalLM"),
        lambda layer: 8,
        layers=8,
    ),
    "Llama-4-Maverick": Model(
        "meta-llama/Llama-4-Maverick-17B-128E",
        _of("llama4_text", "Llama4ForCausalLM", num_local_experts=128, interleave_moe_layer_step=2),
        lambda layer: 8,
        layers=8,
    ),
    "Mistral-7B (windows)": Model(
        "mistralai/Mistral-7B-v0.1",
        _of("mistral", "MistralForCausalLM", max_position_embeddings=32768),
        lambda layer: 8,
        layers=4,
    ),
    "MiniMax-M2": Model(
        "MiniMaxAI/MiniMax-M2",
        _of("minimax_m2", "MiniMaxM2ForCausalLM", rotary_dim=64, scoring_func="sigmoid"),
        lambda layer: 8,
        layers=4,
    ),
    "DeepSeek-V3": Model(
        "deepseek-ai/DeepSeek-V3",
        _of("deepseek_v3", "DeepseekV3ForCausalLM"),
        lambda layer: 1,
        layers=4,
    ),
    "DeepSeek-V3.2": Model(
        "deepseek-ai/DeepSeek-V3.2",
        _of("deepseek_v32", "DeepseekV32ForCausalLM", index_topk=2048, index_n_heads=64, index_head_dim=128),
        lambda layer: 1,
        layers=4,
    ),
    "Qwen3-Next-80B-A3B": Model(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _of("qwen3_next", "Qwen3NextForCausalLM"),
        lambda layer: 2,
        delta(keys=16, values=32, dim=128),
        layers=8,
    ),
    "Granite-4.0-H-Small": Model(
        "ibm-granite/granite-4.0-h-small",
        _of(
            "granitemoehybrid", "GraniteMoeHybridForCausalLM", hidden_size=4096, intermediate_size=768,
            num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8, vocab_size=100352,
            num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536, mamba_n_heads=128,
            mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, position_embedding_type="nope",
            max_position_embeddings=131072,
            layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        ),
        lambda layer: 8,
        mamba2(heads=128, dim=64, groups=1, size=128),
        layers=16,
    ),
    "Falcon-H1-34B": Model(
        "tiiuae/Falcon-H1-34B-Base",
        _of(
            "falcon_h1", "FalconH1ForCausalLM", hidden_size=5120, intermediate_size=21504, num_hidden_layers=72,
            num_attention_heads=20, num_key_value_heads=4, head_dim=128, vocab_size=261120, mamba_d_ssm=4096,
            mamba_n_heads=32, mamba_d_head=128, mamba_n_groups=2, mamba_d_state=256, mamba_chunk_size=128,
        ),
        lambda layer: 4,
        mamba2(heads=32, dim=128, groups=2, size=256),
        layers=4,
        ranks=2,
    ),
    "Nemotron-3-Nano-30B-A3B": Model(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        _of(
            "nemotron_h", "NemotronHForCausalLM", hidden_size=2688, intermediate_size=1856, num_attention_heads=32,
            num_key_value_heads=2, head_dim=128, vocab_size=131072, hybrid_override_pattern=NEMOTRON,
            num_hidden_layers=52, mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8,
            n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
        ),
        lambda layer: 2,
        mamba2(heads=64, dim=64, groups=8, size=128),
        without=(("vllm.model_executor.models.nemotron_h", "FusedMoEFactory"),),
        layers=14,
    ),
    "Kimi-Linear-48B-A3B": Model(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        _of(
            "kimi_linear", "KimiLinearForCausalLM", hidden_size=2304, intermediate_size=9216, num_hidden_layers=27,
            num_attention_heads=32, num_key_value_heads=32, head_dim=72, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True, num_experts=256, num_experts_per_token=8,
            num_shared_experts=1, moe_intermediate_size=1024, first_k_dense_replace=1, routed_scaling_factor=2.446,
            linear_attn_config={
                "full_attn_layers": KIMI, "kda_layers": [i for i in range(1, 28) if i not in KIMI], "head_dim": 128,
                "num_heads": 32, "short_conv_kernel_size": 4,
            },
        ),
        lambda layer: 1,
        delta(keys=32, values=32, dim=128),
        layers=8,
        without=(("torch.cuda", "Stream"),),
    ),
}  # fmt: skip
