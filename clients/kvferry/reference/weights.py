"""Weights by their Hugging Face names, from a checkpoint folder or from a seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvferry.errors import KvferryError, Malformed
from kvferry.reference.config import ModelConfig, ModelSource
from kvferry.reference.fingerprint import weight_files


class Weights(Protocol):
    """Rows and columns are half-open ranges of the stored [out, in] matrix; None is all of them."""

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor: ...


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
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (q, hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, q)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
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

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        gain = self.GAINS.get(name.split(".")[-2], 1.0)
        spread = 1.0 if "embed" in name else gain / math.sqrt(shape[1])
        tensor = torch.randn(shape, generator=generator) * spread
        return _part(tensor, rows, columns).to(self._dtype)


class CheckpointWeights:
    """A folder with config.json and model.safetensors, or shards and model.safetensors.index.json.

    Raises KvferryError (`malformed_checkpoint`) when a tensor is absent or has another shape.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._file_of: dict[str, Path] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)
                for name, shape in shapes(config):
                    if name in file.keys() and tuple(file.get_slice(name).get_shape()) != shape:  # noqa: SIM118
                        raise _malformed(folder, name, f"the shape {shape} that config.json implies")
        for name, _ in shapes(config):
            if name not in self._file_of:
                raise _malformed(folder, name, "to be there")

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            return _part(file.get_tensor(name), rows, columns).to(self._dtype)


def write_checkpoint(source: ModelSource, folder: Path, *, shards: int = 1) -> None:
    """Write the weights as a Hugging Face folder, split over `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source.config.to_hf(), indent=2))
    weights = weights_of(source)
    tensors = {name: weights.read(name).contiguous() for name, _ in shapes(source.config)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    files = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i::shards] for i in range(shards)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _part(tensor: torch.Tensor, rows: range | None, columns: range | None) -> torch.Tensor:
    if rows is not None:
        tensor = tensor[rows.start : rows.stop]
    if columns is not None:
        tensor = tensor[:, columns.start : columns.stop]
    return tensor.contiguous()


def _malformed(folder: Path, name: str, wanted: str) -> KvferryError:
    return Malformed("malformed_checkpoint", f"{folder}: the tensor {name} was expected {wanted}", field=name)
