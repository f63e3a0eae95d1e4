"""The decoder of one rank (RMSNorm, RoPE, grouped-query attention over pages, SwiGLU), and its weights by their Hugging
Face names, from a checkpoint folder or from a seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name everybody gives it
from safetensors import safe_open
from safetensors.torch import save_file

from kvferry.errors import Malformed
from kvferry.reference.cache import AXES, CacheGeometry, RankShard
from kvferry.reference.config import ModelConfig, ModelSource, weight_files

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's part of a step: `count` tokens at positions [start, start + count), which its blocks hold."""

    start: int
    count: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer as views (block, slot, head, dim); the layout is in their strides."""

    k: Tensor
    v: Tensor

    def write(self, blocks: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v: (token, head, dim), one block id and slot per token."""
        self.k[blocks, slots] = k
        self.v[blocks, slots] = v

    def read(self, blocks: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens [start, stop) of the request as (head, token, dim)."""
        slots = self.k.shape[1]
        first = start // slots
        held = blocks[first : -(-stop // slots)]
        part = slice(start - first * slots, stop - first * slots)
        k, v = (pages.index_select(0, held).flatten(0, 1)[part].transpose(0, 1) for pages in (self.k, self.v))
        return k, v


def map_cache(region: Tensor, geometry: CacheGeometry) -> list[LayerCache]:
    """Views of a uint8 region, by layer; nothing is copied."""
    cache = region[: geometry.nbytes].view(getattr(torch, geometry.dtype)).view(*geometry.extents.values())
    order = list(geometry.extents)
    return [LayerCache(*layer) for layer in cache.permute([order.index(axis) for axis in AXES])]


@dataclass(frozen=True, slots=True)
class Layer:
    """This rank's part: rows of qkv and gate_up, columns of o and down."""

    attention_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    window: int | None


class Decoder:
    """A rank of the model. With tp > 1, torch.distributed must be initialised: a step all-reduces twice a layer."""

    def __init__(self, config: ModelConfig, weights: Weights, rank: int = 0, tp: int = 1) -> None:
        self.config = config
        self._tp = tp
        self._shard = RankShard.of(config, rank, tp)
        self._layers = [self._read_layer(weights, layer) for layer in range(config.num_layers)]
        self._embed = weights.read("model.embed_tokens.weight")
        self._norm = weights.read("model.norm.weight")
        # Only rank 0 samples, so only rank 0 pays for the logits.
        self._head = None if rank else self._embed if config.tied else weights.read("lm_head.weight")
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), config.rope_theta**-half)
        self._cos, self._sin = angles.cos()[:, None, :], angles.sin()[:, None, :]

    def _read_layer(self, weights: Weights, layer: int) -> Layer:
        dim, shard = self.config.head_dim, self._shard
        q = slice(shard.heads.start * dim, shard.heads.stop * dim)
        kv = slice(shard.kv_heads.start * dim, shard.kv_heads.stop * dim)
        columns = slice(shard.columns.start, shard.columns.stop)

        def read(name: str) -> Tensor:
            return weights.read(f"model.layers.{layer}.{name}.weight")

        return Layer(
            attention_norm=read("input_layernorm"),
            qkv=torch.cat([read(f"self_attn.{name}_proj")[rows] for name, rows in (("q", q), ("k", kv), ("v", kv))]),
            o=read("self_attn.o_proj")[:, q].contiguous(),
            mlp_norm=read("post_attention_layernorm"),
            gate_up=torch.cat([read(f"mlp.{name}_proj")[columns] for name in ("gate", "up")]),
            down=read("mlp.down_proj")[:, columns].contiguous(),
            window=self.config.window if self.config.sliding[layer] else None,
        )

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, sequences: Sequence[Chunk], caches: Sequence[LayerCache], sampled: Tensor
    ) -> Tensor | None:
        """Run the sequences' tokens, one after another in `tokens`, and write their KV.

        Returns the logits (len(sampled), vocab) at the indices `sampled` of `tokens` on rank 0, None elsewhere.
        """
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in sequences])
        slots_per_block = caches[0].k.shape[1]
        blocks = torch.cat([s.blocks[torch.arange(s.start, s.start + s.count) // slots_per_block] for s in sequences])
        slots = positions % slots_per_block
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(tokens, self._embed)
        for layer, cache in zip(self._layers, caches, strict=True):
            q, k, v = self._project(rms_norm(x, layer.attention_norm, self.config.rms_norm_eps), layer)
            cache.write(blocks, slots, rotate(k, cos, sin), v)
            q = rotate(q, cos, sin)
            of_each = torch.split(q, [s.count for s in sequences])
            attended = torch.cat(
                [attend(own, s, cache, layer.window) for own, s in zip(of_each, sequences, strict=True)]
            )
            x = x + self._reduce(F.linear(attended.flatten(1), layer.o))
            gate, up = F.linear(rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps), layer.gate_up).chunk(2, dim=-1)
            x = x + self._reduce(F.linear(F.silu(gate) * up, layer.down))
        if self._head is None:
            return None
        return F.linear(rms_norm(x[sampled], self._norm, self.config.rms_norm_eps), self._head)

    def _project(self, x: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as (token, head, dim)."""
        heads = F.linear(x, layer.qkv).view(len(x), -1, self.config.head_dim)
        num_q, num_kv = len(self._shard.heads), len(self._shard.kv_heads)
        return heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]

    def _reduce(self, x: Tensor) -> Tensor:
        if self._tp > 1:
            dist.all_reduce(x)
        return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in Hugging Face's halves convention; x is (token, head, dim)."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, sequence: Chunk, cache: LayerCache, window: int | None) -> Tensor:
    """Attention of one request's new tokens over its pages; q and the result are (token, head, dim).

    Nothing outside the window is read, not even masked: after a transfer, what lies there is another request's.
    """
    start, stop = sequence.start, sequence.start + sequence.count
    first = 0 if window is None else max(0, start - window + 1)
    k, v = cache.read(sequence.blocks, first, stop)
    mask = None
    if sequence.count > 1:
        behind = torch.arange(start, stop)[:, None] - torch.arange(first, stop)[None, :]
        mask = behind >= 0
        if window is not None:
            mask &= behind < window
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


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
