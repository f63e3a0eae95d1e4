"""Layers of every kind on ranks of two shapes: does each reader get what vLLM itself would have written there?

.venv-engines/bin/python tests/engines/descriptions.py [NAME ...]

vLLM makes the layers of a rank, their specs and their views; kvferry's plug-in describes them. Source ranks are filled
with the truth by vLLM's own kernel or, where that needs a GPU, by torch code that follows its source (named beside it).
The planner's runs are copied into a reader's memory, and the whole of that memory is compared with a second one, which
was filled with the same truth directly: no description has a part in it. Prints a line of JSON: by name "exact" or
"refused: CODES" for each pair of shapes; "wrong: ..." otherwise.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import interpreted  # noqa: F401  # before vLLM
import torch
from in_torch import fp8, store_index
from models import HND, as_one_of
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v32.common.kernels import fused_norm_rope
from vllm.utils.torch_utils import nvfp4_split_data_scale, set_default_torch_dtype
from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.ops.int4_per_token_head import single_rht
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo
from kvferry.tables import BlockTable
from kvferry.vllm.layers import Group, describe
from kvferryd.plan import PlanRefused, bind, plan

NAME = "model.layers.0.self_attn.attn"
TOKENS, BLOCKS, BLANK = 70, 12, 0xEE
KV, SIZE = 2, 64
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": KV, "vocab_size": 512,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The shape of an engine. conv: the layout of convolutions (VLLM_SSM_CONV_STATE_LAYOUT)."""

    tp: int
    block: int = 16
    layout: str = "LBNHC"
    conv: str = "SD"


@dataclass
class Rank:
    """A rank's cache: all of its memory, what vLLM made, and the blocks of a request."""

    number: int
    shape: Shape
    memory: torch.Tensor
    layer: Any
    spec: Any
    manifest: Manifest
    own: Sequence[int] = ()

    @property
    def slots(self) -> torch.Tensor:
        """The slot of each token of the request: vLLM's slot mapping."""
        at = torch.arange(TOKENS)
        return torch.tensor(self.own)[at // self.spec.block_size] * self.spec.block_size + at % self.spec.block_size

    def heads(self, total: int) -> slice:
        """vLLM's rule: rank r of R has the heads from r * total / R on."""
        first = self.number * total // self.shape.tp
        return slice(first, first + max(1, total // self.shape.tp))


@dataclass(frozen=True)
class Kind:
    """A kind of layer. make: that of one rank. write: the truth into a rank's cache, as vLLM does it. check: whether
    what stands in for a kernel does as the kernel."""

    make: Callable[[VllmConfig], Any]
    write: Callable[[Rank], None]
    pairs: tuple[tuple[Shape, Shape], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Rank], None] = lambda rank: None


def config_of(shape: Shape, options: Mapping[str, Any]) -> VllmConfig:
    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(MODEL, file)
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, tensor_parallel_size=shape.tp, load_format="dummy", enforce_eager=True,
        max_model_len=4096, block_size=shape.block, distributed_executor_backend="mp", **options,
    ).create_engine_config()  # fmt: skip
    config.cache_config.block_size = config.cache_config.mamba_block_size = shape.block
    config.cache_config.kv_cache_layout = shape.layout
    return config


@cache
def rank_of(name: str, shape: Shape, number: int) -> Rank:
    """A rank's cache, described."""
    kind = KINDS[name]
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = shape.conv
    mamba_utils.get_conv_state_layout.cache_clear()
    config = config_of(shape, kind.options)
    with set_current_vllm_config(config), as_one_of(shape.tp, 1, 0, 1), set_default_torch_dtype(torch.bfloat16):
        layer = kind.make(config)
        spec = layer.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):  # as its model runner does
            spec = layer.get_attn_backend().customize_spec(spec)
        groups = get_kv_cache_groups(config, {NAME: spec})
    one = 2**26 // get_kv_cache_config_from_groups(config, groups, 2**26).num_blocks
    pages = get_kv_cache_config_from_groups(config, groups, one * BLOCKS)
    view = allocate_kv_cache(pages, torch.device("cpu"), KVCacheLayout[shape.layout])[NAME]
    memory = torch.tensor([], dtype=torch.uint8).set_(view.untyped_storage())
    layer.bind_kv_cache(view)
    builder = ManifestBuilder("e", "1", ModelInfo(name="m", fingerprint="f"), rank=number, world_size=shape.tp)
    builder.region(0, "host", nbytes=memory.nbytes, address=memory.data_ptr())
    describe(builder, config, [Group("0", spec, (NAME,))], pages.num_blocks, {NAME: view}, number, shape.tp)
    rank = Rank(number, shape, memory, layer, spec, builder.build())
    if not number:
        kind.check(rank)
    return rank


def request(name: str, shape: Shape, blocks: Sequence[int]) -> list[Rank]:
    """An engine's ranks, whose caches hold nothing; the request has the first of these blocks."""
    ranks = [rank_of(name, shape, number) for number in range(shape.tp)]
    for rank in ranks:
        count = 1 if isinstance(rank.spec, MambaSpec) else -(-TOKENS // rank.spec.block_size)
        rank.own = blocks[:count]
        rank.memory.fill_(BLANK)
    return ranks


def outcome(name: str, source: Shape, reader: Shape) -> str:
    """The end of the request between engines of these shapes, rank by rank of the reader."""
    write = KINDS[name].write
    try:
        held, read = request(name, source, (7, 3, 4, 9, 1)), request(name, reader, (2, 8, 5, 6, 10))
        plans = [plan([each.manifest for each in held], own.manifest) for own in read]
    except PlanRefused as refused:
        return "refused: " + ", ".join(sorted({each.code for each in refused.refusals}))
    except KvferryError as error:
        return f"refused: {error.code}"
    for rank in held:
        write(rank)
    tables = {rank.number: {"0": BlockTable.of(rank.own)} for rank in held}
    for chosen, own in zip(plans, read, strict=True):
        moved, memory = own.memory.clone().numpy(), {rank.number: rank.memory.numpy() for rank in held}
        for runs in bind(chosen, tables, {"0": BlockTable.of(own.own)}, (0, TOKENS)).runs():
            theirs = memory[runs.source_rank]
            for start, to, count in zip(runs.source_offsets, runs.destination_offsets, runs.nbytes, strict=True):
                moved[to : to + count] = theirs[start : start + count]
        write(own)
        assert (own.memory != BLANK).any()
        if wrong := int((own.memory.numpy() != moved).sum()):
            return f"wrong: {wrong} bytes of rank {own.number}"
    return "exact"


def truth(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same values of a whole model wherever it is asked for, no two alike in a row."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


HEADS, DIM, KERNEL = 8, 32, 4
RECURRENT = SimpleNamespace(
    hidden_size=256, hidden_act="silu", rms_norm_eps=1e-5, num_attention_heads=HEADS, head_dim=DIM,
    num_hidden_layers=2, max_position_embeddings=4096, use_bias=False, use_qkv_bias=False, group_norm_size=8,
    short_conv_kernel_size=KERNEL, no_kda_lora=True, layer_idx=0,
    linear_attn_config={"head_dim": DIM, "num_heads": HEADS, "short_conv_kernel_size": KERNEL},
)  # fmt: skip


class RecoverSsm(KimiGatedDeltaNetAttention):  # type: ignore[misc]
    """kimi_k3/nvidia/kda.py, 548-583: Kimi-K3's layers, which need a GPU, add records of the newest inputs."""

    def get_state_dtype(self) -> Any:
        return MambaStateDtypeCalculator.append_kda_recoverssm_record(super().get_state_dtype(), torch.bfloat16)

    def get_state_shape(self) -> Any:
        return MambaStateShapeCalculator.append_kda_recoverssm_record(
            super().get_state_shape(), HEADS, DIM, self.tp_size, 3
        )


def bailing_kda(config: VllmConfig) -> Any:
    return BailingMoeV3KimiDeltaAttention(
        RECURRENT, prefix=NAME, model_config=config.model_config, cache_config=config.cache_config
    )


def recurrent(made: Any) -> Callable[[VllmConfig], Any]:
    return lambda config: made(RECURRENT, config, NAME)


def write_kda(rank: Rank) -> None:
    """kimi_gdn_linear_attn.py, 444-454 (Bailing: bailing_moe_v3.py, `conv_state.chunk(3, dim=-2)`): channels of q, k
    and v one after another, of each those of the rank's heads; the state by heads."""
    conv, state = rank.layer.kv_cache
    conv = conv if rank.shape.conv == "DS" else conv.transpose(-1, -2)
    for nth, part in enumerate(conv[rank.own[0]].chunk(3, dim=-2)):
        part.copy_(truth(HEADS, DIM, KERNEL - 1, seed=nth)[rank.heads(HEADS)].flatten(0, 1))
    state[rank.own[0]] = truth(HEADS, DIM, DIM, seed=3)[rank.heads(HEADS)]


def write_linear(rank: Rank) -> None:
    """minimax_linear_attn.py, 142-146: one state, by heads."""
    (state,) = rank.layer.kv_cache
    state[rank.own[0]] = truth(HEADS, DIM, DIM)[rank.heads(HEADS)]


STATES = (
    (Shape(4), Shape(2)), (Shape(2), Shape(4)), (Shape(1), Shape(8, block=64)), (Shape(2, conv="DS"), Shape(4)),
)  # fmt: skip
KINDS = {
    "Kimi-Linear": Kind(recurrent(KimiGatedDeltaNetAttention), write_kda, STATES),
    "Bailing-MoE-V3": Kind(bailing_kda, write_kda, STATES),
    "Bailing-MoE-Linear": Kind(recurrent(BailingMoELinearAttention), write_linear, STATES),
    "MiniMax-Text-01": Kind(recurrent(MiniMaxText01LinearAttention), write_linear, STATES),
    "Kimi-K3 with RecoverSSM": Kind(recurrent(RecoverSsm), write_kda, STATES[:1]),
}


def attention(backend: Any, made: Any = Attention) -> Callable[[VllmConfig], Any]:
    def make(config: VllmConfig) -> Any:
        tp = config.parallel_config.tensor_parallel_size
        own, kv = 16 // tp, max(1, KV // tp)
        return made(own, SIZE, 1.0, kv, cache_config=config.cache_config, prefix=NAME, attn_backend=backend)

    return make


def write_attention(rank: Rank) -> None:
    """vLLM's own operation."""
    keys, values = (truth(TOKENS, KV, SIZE, seed=seed)[:, rank.heads(KV)].bfloat16() for seed in (0, 1))
    rank.layer.impl.do_kv_cache_update(rank.layer, keys, values, rank.layer.kv_cache, rank.slots)


def quantize(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, k_scale: torch.Tensor,
    v_scale: torch.Tensor, slots: torch.Tensor, kv_quant_mode: Any,
) -> None:  # fmt: skip
    """triton_reshape_and_cache_flash.py, 154-252, and int4_per_token_head.py, 65-253: Triton's interpreter takes 10 ms
    for each token and head."""
    at = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for vectors, pages, scales in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        size = vectors.shape[-1]
        if kv_quant_mode == KVQuantMode.INT4_PER_TOKEN_HEAD:
            turned = single_rht(vectors.float()).to(vectors.dtype).float()
            low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
            scale = ((high - low) / 15).clamp(min=1e-6)
            zero = rounded(-low / scale).clamp(0, 15)
            nibbles = rounded(turned * (1 / scale) + zero).clamp(0, 15).to(torch.uint8)
            pages[(*at, slice(None), slice(size // 2))] = nibbles[..., ::2] | nibbles[..., 1::2] << 4
            scale = (scale.view(torch.int32) & -16 | zero.int()).view(torch.float32)
        else:
            low, high = (-128, 127) if pages.dtype == torch.int8 else (-448, 448)
            scale = (vectors.float().abs().amax(-1, keepdim=True) / high).clamp(min=1e-6)
            scaled = vectors.float() * (1 / scale)
            scaled = rounded(scaled) if pages.dtype == torch.int8 else scaled
            pages.view(torch.uint8)[(*at, slice(None), slice(size))] = (
                scaled.clamp(low, high).to(pages.dtype).view(torch.uint8)
            )
        scales[at] = scale.squeeze(-1)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Half away from zero."""
    return (values + torch.where(values >= 0, 0.5, -0.5)).trunc()


def like_the_kernel(rank: Rank) -> None:
    """`quantize` writes what vLLM's own kernel does: the same bytes; of fp8 the interpreter rounds down, and
    loses the carry."""
    impl, memory, slots = rank.layer.impl, rank.memory, torch.tensor([17, 34])
    heads, found = rank.spec.num_kv_heads, []
    keys, values = (truth(2, heads, SIZE, seed=seed).bfloat16() for seed in (2, 3))
    for write in (KERNEL_QUANTIZE, quantize):
        memory.fill_(BLANK)
        triton_attn.triton_reshape_and_cache_flash_per_token_head_quant = write
        impl.do_kv_cache_update(rank.layer, keys, values, rank.layer.kv_cache, slots)
        found.append(memory.clone())
    memory.fill_(BLANK)
    apart = (found[0].int() - found[1].int()).abs()
    assert (found[0] != BLANK).sum() > heads * rank.spec.state_content_size_bytes, "too little was written"
    allowed = 8 if rank.layer.kv_cache_dtype == "fp8_per_token_head" else 0
    assert apart.max() <= allowed, "quantize is not what the kernel does"


PAGED = (
    (Shape(2), Shape(1)), (Shape(4), Shape(2)), (Shape(1), Shape(4)), (Shape(2), Shape(1, 64)),
    (Shape(1, 64), Shape(2, 16, HND)), (Shape(2, 16, HND), Shape(2)),
)  # fmt: skip
KERNEL_QUANTIZE = triton_attn.triton_reshape_and_cache_flash_per_token_head_quant
triton_attn.triton_reshape_and_cache_flash_per_token_head_quant = quantize
KINDS |= {
    kind: Kind(attention(TritonAttentionBackend), write_attention, PAGED, {"kv_cache_dtype": kind}, like_the_kernel)
    for kind in ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
}


RANK, ROPE, INDEX = 512, 64, 128
E2M1 = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Half-way between the numbers of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def fp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pairs of e2m1, the first in the low half; a scale for each 16 values."""
    scaled = values / scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    nibbles = torch.bucketize(scaled.abs(), E2M1) | (scaled < 0).long() << 3
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8)


def fp4_scales(values: torch.Tensor) -> torch.Tensor:
    return fp8((values.unflatten(-1, (-1, 16)).abs().amax(-1) / 6).clamp(min=2**-9))


class Latents:
    """The writer of vLLM's sparse MLA backends, which need a GPU: the base of all. It calls the operation below."""

    do_kv_cache_update = MLAAttentionImpl.do_kv_cache_update


def store_latents(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:  # fmt: skip
    """deepseek_v32/common/kernels.py, 300-372, which fuses concat_and_cache_mla with what comes before it."""
    latents, at = kv_c.float(), (slot_mapping // kv_cache.shape[1], slot_mapping % kv_cache.shape[1])
    if kv_cache_dtype == "nvfp4_ds_mla":
        scales = fp4_scales(latents)
        where = torch.arange(RANK // 16)
        permuted = torch.empty_like(scales)
        permuted[:, 8 * (where % 4) + where // 4] = scales
        parts = fp4(latents, scales), fp8(k_pe.float()), permuted
    else:
        tiles = latents.unflatten(-1, (4, 128))
        largest = (tiles.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-4)
        scales = largest.log2().ceil().exp2()
        parts = fp8(tiles / scales).flatten(1), scales.flatten(1).view(torch.uint8), k_pe.bfloat16().view(torch.uint8)
    kv_cache[at] = torch.cat(parts, -1)


def latents(config: VllmConfig) -> Any:
    kind, config.cache_config.cache_dtype = config.cache_config.cache_dtype, "auto"
    up = ColumnParallelLinear(RANK, 16 * 2 * ROPE, bias=False, prefix=f"{NAME}.up")
    layer = MLAAttention(16, 1.0, ROPE, ROPE, ROPE, None, RANK, up, cache_config=config.cache_config, prefix=NAME)
    layer.kv_cache_dtype, layer.impl = kind, Latents()
    config.cache_config.cache_dtype = kind
    return layer


class Shuffled(DeepseekV32IndexerCache):  # type: ignore[misc]
    """deepseek_v32/amd/rocm.py, 24-32, which needs AMD's libraries."""

    uses_shuffled_layout = True


def indexer(made: Any) -> Callable[[VllmConfig], Any]:
    return lambda config: made(INDEX + 4, torch.uint8, NAME, config.cache_config)


def write_latents(rank: Rank) -> None:
    found, rotated = truth(TOKENS, RANK).bfloat16(), truth(TOKENS, 1, ROPE, seed=1).bfloat16()
    layer = rank.layer
    layer.impl.do_kv_cache_update(found, rotated, layer.kv_cache, rank.slots, layer.kv_cache_dtype, layer._k_scale)


def write_index(rank: Rank) -> None:
    shuffled = "shuffled" if rank.layer.uses_shuffled_layout else "ue8m0"
    store_index(truth(TOKENS, INDEX).bfloat16(), rank.layer.kv_cache, rank.slots, INDEX, shuffled)


def like_the_fused_kernel(rank: Rank) -> None:
    """`store_latents` and `store_index` write what vLLM's kernel does after its norms and rotations; the interpreter
    loses the carry of fp8."""
    layer, memory, slots = rank.layer, rank.memory, torch.tensor([17, 34])
    index = isinstance(layer, DeepseekV32IndexerCache)
    shuffled = index and layer.uses_shuffled_layout
    out = {name: torch.empty(2, size) for name, size in (("kv_c", RANK), ("k_pe", ROPE), ("index_k", INDEX))}
    memory.fill_(BLANK)
    fused_norm_rope(
        torch.tensor([3, 9]), truth(2, 64), torch.ones(64), 1e-6, truth(2, RANK), torch.ones(RANK), 1e-6,
        truth(2, ROPE), truth(16, ROPE, seed=4), truth(2, INDEX, seed=2), torch.ones(INDEX), torch.zeros(INDEX), 1e-6,
        truth(16, ROPE, seed=4), torch.zeros(2, 4, dtype=torch.int32), slot_mapping=slots,
        indexer_k_cache=layer.kv_cache if index else None, indexer_cache_shuffled=shuffled,
        mla_kv_cache=None if index else layer.kv_cache,
        mla_kv_cache_dtype="auto" if index else layer.kv_cache_dtype,
        **{f"{name}_out": tensor for name, tensor in out.items()},
    )  # fmt: skip
    kernels = memory.clone()
    memory.fill_(BLANK)
    if index:
        store_index(out["index_k"], layer.kv_cache, slots, INDEX, "shuffled" if shuffled else "ue8m0")
    else:
        store_latents(out["kv_c"], out["k_pe"], layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)
    apart = (kernels.int() - memory.int()).abs()
    assert (kernels != BLANK).sum() > rank.spec.state_content_size_bytes, "too little was written"
    assert apart.max() <= 8, "what stands in is not what the kernel does"


class Pages:
    """nvfp4_kv_cache_kernels.cu, 45-176, on the views of flashinfer.py, 116-136; needs a GPU, and FlashInfer."""

    def __init__(self, heads: int, trtllm: bool) -> None:
        self.heads, self.nvfp4_trtllm = heads, trtllm

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        _, rows, block, full = cache.shape
        heads_first = cache.stride()[1:] == (block * full, full, 1)
        assert heads_first or cache.stride()[1:] == (full, rows * full, 1)
        at, slot = slots // block, slots % block
        for side, vectors in enumerate((keys.float(), values.float())):
            dims = (self.heads, block) if heads_first else (block, self.heads)
            pages = cache.as_strided(
                (len(cache), *dims, full), (cache.stride(0), dims[1] * full, full, 1),
                cache.storage_offset() + side * self.heads * block * full,
            )  # fmt: skip
            data, scales = nvfp4_split_data_scale(pages)
            found = fp4_scales(vectors)
            if not heads_first:
                data[at, slot], scales.view(torch.uint8)[at, slot] = fp4(vectors, found), found
                continue
            data[at, :, slot] = fp4(vectors, found)
            if not (side and self.nvfp4_trtllm):
                scales.view(torch.uint8)[at, :, slot] = found
                continue
            size = found.shape[-1]
            for s in range(size):  # 33-40: swizzle_scale_offset
                to = slot // 4 * 4 + s // (size // 4), s % (size // 4) * 4 + slot % 4
                scales.view(torch.uint8)[at, :, to[0], to[1]] = found[..., s]


class Nvfp4(TritonAttentionBackend):  # type: ignore[misc]
    """flashinfer.py, 432-445: FlashInferBackend.customize_spec."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=spec.head_size * 9 // 16)


def nvfp4(trtllm: bool) -> Callable[[VllmConfig], Any]:
    def make(config: VllmConfig) -> Any:
        kind, config.cache_config.cache_dtype = config.cache_config.cache_dtype, "auto"
        layer = attention(Nvfp4)(config)
        config.cache_config.cache_dtype = layer.kv_cache_dtype = kind
        layer.kv_cache_torch_dtype, layer.impl = torch.uint8, Pages(layer.num_kv_heads, trtllm)
        return layer

    return make


class Transposed:
    """Puts the keys of a block as vLLM's kernels for CPUs do: those of a head transposed, before its values."""

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        (blocks, heads, block, full), size = cache.shape, keys.shape[-1]
        sizes, steps = (blocks, heads, 2, block * size), (cache.stride(0), block * full, block * size, 1)
        first, second = cache.as_strided(sizes, steps, cache.storage_offset()).unbind(2)
        at, slot = slots // block, slots % block
        first.unflatten(2, (size, block))[at, :, :, slot] = keys
        second.unflatten(2, (block, size))[at, :, slot] = values


class Unseen(TritonAttentionBackend):  # type: ignore[misc]
    """Writes as it computes attention, so that nobody sees where."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


class Hpc(TritonAttentionBackend):  # type: ignore[misc]
    """hpc_attn.py, 443: a key and a value in the content of each head and token."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "HPC_ATTN"


def write_halves(rank: Rank) -> None:
    both = torch.cat([truth(TOKENS, KV, SIZE, seed=seed)[:, rank.heads(KV)].bfloat16() for seed in (0, 1)], -1)
    cache, slots = rank.layer.kv_cache, rank.slots
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = both


class Streams(Attention):  # type: ignore[misc]
    """As models/inkling/nvidia/sconv_swa_attn.py, 186: no keys and values, and what else is in a row is its own."""

    def get_kv_cache_spec(self, config: VllmConfig) -> Any:
        return replace(super().get_kv_cache_spec(config), head_size=2 * SIZE, head_size_v=0)


def unseen(made: Any, backend: Any) -> Callable[[VllmConfig], Any]:
    def make(config: VllmConfig) -> Any:
        layer = attention(backend, made)(config)
        layer.impl = Transposed()
        return layer

    return make


_custom_ops.concat_and_cache_mla, _custom_ops.indexer_k_quant_and_cache = store_latents, store_index
ALIKE = ((Shape(2), Shape(1)), (Shape(1), Shape(2, 64)), (Shape(1, 64), Shape(2)))
UNALIKE = ((Shape(2, 32), Shape(1, 32)), (Shape(1, 32), Shape(1, 64)), (Shape(1, 64), Shape(2, 32)))
KINDS |= {
    "fp8_ds_mla": Kind(latents, write_latents, ALIKE, {"kv_cache_dtype": "fp8_ds_mla"}, like_the_fused_kernel),
    "nvfp4_ds_mla": Kind(latents, write_latents, ALIKE, {"kv_cache_dtype": "nvfp4_ds_mla"}),
    "indexer": Kind(indexer(DeepseekV32IndexerCache), write_index, ALIKE, {}, like_the_fused_kernel),
    "shuffled indexer": Kind(indexer(Shuffled), write_index, ALIKE[1:2], {}, like_the_fused_kernel),
    "a backend of another project": Kind(unseen(Attention, Unseen), write_attention, UNALIKE),
    "rows of streams": Kind(unseen(Streams, TritonAttentionBackend), write_attention, UNALIKE),
    "HPC_ATTN": Kind(attention(Hpc), write_halves, PAGED),
    "nvfp4": Kind(nvfp4(False), write_attention, PAGED, {"kv_cache_dtype": "nvfp4"}),
    "nvfp4 of trtllm": Kind(
        nvfp4(True), write_attention, ((Shape(2, 16, HND), Shape(1, 64, HND)),), {"kv_cache_dtype": "nvfp4"}
    ),
}


def main(chosen: Sequence[str]) -> None:
    print(json.dumps({name: [outcome(name, *pair) for pair in KINDS[name].pairs] for name in chosen or KINDS}))


if __name__ == "__main__":
    main(sys.argv[1:])
