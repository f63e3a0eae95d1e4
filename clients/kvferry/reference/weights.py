"""Weights by their Hugging Face names, from a checkpoint folder or from a seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvferry.errors import Malformed
from kvferry.reference.config import ModelConfig, ModelSource, weight_files


def weights_of(source: ModelSource) -> Weights:
    if source.checkpoint is None:
        return SeededWeights(source.config, source.seed)
    return CheckpointWeights(source.checkpoint, source.config)


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }.items():  # fmt: skip
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab_size, hidden)


class SeededWeights:
    """Random weights: a tensor depends on the seed and its name only, so every process and every TP has the same.

    The gains make an untrained model lively: sharp attention (q, k) that outweighs the residual stream (o), so
    that greedy decoding wanders instead of repeating one token, and logits far enough apart that the rounding of
    another TP or batch does not change the argmax (measured in tests/unit/test_reference_model.py).
    """

    GAINS: ClassVar = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 1.5, "o_proj": 2.0, "down_proj": 2.0, "lm_head": 4.0}

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._shapes = dict(shapes(config))
        self._seed = seed
        self._dtype: torch.dtype = getattr(torch, config.dtype)

    def read(self, name: str) -> torch.Tensor:
        """Matrices are [out, in]."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        gain = self.GAINS.get(name.split(".")[-2], 1.0)
        spread = 1.0 if "embed" in name else gain / math.sqrt(shape[1])
        return (torch.randn(shape, generator=generator) * spread).to(self._dtype)


class CheckpointWeights:
    """A folder with config.json and model.safetensors, or shards and model.safetensors.index.json.

    Raises KvferryError (`malformed_checkpoint`) when a tensor is absent or has another shape.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._file_of: dict[str, Path] = {}
        found: dict[str, tuple[int, ...]] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        for name, shape in shapes(config):
            if found.get(name) != shape:
                raise Malformed(
                    "malformed_checkpoint", f"{folder} has no tensor {name} of the shape {shape}", field=name,
                    value=found.get(name), remedy="config.json and the weights must be those of one model",
                )  # fmt: skip

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            return torch.as_tensor(file.get_tensor(name)).to(self._dtype)


Weights: TypeAlias = SeededWeights | CheckpointWeights


def write_checkpoint(source: ModelSource, folder: Path, *, shards: int = 1) -> None:
    """Write the weights as a Hugging Face folder, split over `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source.config.to_hf(), indent=2))
    weights = weights_of(source)
    tensors = {name: weights.read(name).contiguous() for name, _ in shapes(source.config)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    file_of = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
