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
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from models import as_one_of, llama
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo
from kvferry.tables import BlockTable
from kvferry.vllm.layers import Group, describe
from kvferryd.plan import PlanRefused, bind, plan

NAME = "model.layers.0.self_attn.attn"
TOKENS, BLOCKS, BLANK = 70, 12, 0xEE


@dataclass(frozen=True)
class Shape:
    """Of an engine. conv: the layout of convolutions (VLLM_SSM_CONV_STATE_LAYOUT)."""

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
    own: list[int]

    @property
    def slots(self) -> torch.Tensor:
        """Of each token of the request: vLLM's slot mapping."""
        at = torch.arange(TOKENS)
        return torch.tensor(self.own)[at // self.spec.block_size] * self.spec.block_size + at % self.spec.block_size

    def heads(self, total: int) -> slice:
        """vLLM's rule: rank r of R has the heads from r * total / R on."""
        first = self.number * total // self.shape.tp
        return slice(first, first + max(1, total // self.shape.tp))


@dataclass(frozen=True)
class Kind:
    """A kind of layer. make: that of one rank. write: the truth into a rank's cache, as vLLM does it."""

    make: Callable[[VllmConfig], Any]
    write: Callable[[Rank], None]
    pairs: tuple[tuple[Shape, Shape], ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def config_of(shape: Shape, options: Mapping[str, Any]) -> VllmConfig:
    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(llama(torch_dtype="bfloat16", num_hidden_layers=2, hidden_size=1024, num_attention_heads=8), file)
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, tensor_parallel_size=shape.tp, load_format="dummy", enforce_eager=True,
        max_model_len=4096, block_size=shape.block, distributed_executor_backend="mp", **options,
    ).create_engine_config()  # fmt: skip
    config.cache_config.block_size = config.cache_config.mamba_block_size = shape.block
    config.cache_config.kv_cache_layout = shape.layout
    return config


def rank_of(kind: Kind, shape: Shape, number: int, blocks: Sequence[int]) -> Rank:
    """A rank's cache of BLANK bytes, described."""
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = shape.conv
    mamba_utils.get_conv_state_layout.cache_clear()
    config = config_of(shape, kind.options)
    with set_current_vllm_config(config), as_one_of(shape.tp), set_default_torch_dtype(torch.bfloat16):
        layer = kind.make(config)
        spec = layer.get_kv_cache_spec(config)
        groups = get_kv_cache_groups(config, {NAME: spec})
    one = 2**26 // get_kv_cache_config_from_groups(config, groups, 2**26).num_blocks
    pages = get_kv_cache_config_from_groups(config, groups, one * BLOCKS)
    view = allocate_kv_cache(pages, torch.device("cpu"), KVCacheLayout[shape.layout])[NAME]
    memory = torch.tensor([], dtype=torch.uint8).set_(view.untyped_storage())
    layer.bind_kv_cache(view)
    builder = ManifestBuilder("e", "1", ModelInfo(name="m", fingerprint="f"), rank=number, world_size=shape.tp)
    builder.region(0, "host", nbytes=memory.nbytes, address=memory.data_ptr())
    describe(builder, config, [Group("0", spec, (NAME,))], pages.num_blocks, {NAME: view}, number, shape.tp)
    assert not memory.any(), "the description has left something behind"
    memory.fill_(BLANK)
    own = list(blocks[: 1 if isinstance(spec, MambaSpec) else -(-TOKENS // spec.block_size)])
    return Rank(number, shape, memory, layer, spec, builder.build(), own)


def outcome(kind: Kind, source: Shape, reader: Shape) -> str:
    """What becomes of the request between engines of these shapes, rank by rank of the reader."""
    try:
        held = [rank_of(kind, source, rank, (7, 3, 4, 9, 1)) for rank in range(source.tp)]
        read = [rank_of(kind, reader, rank, (2, 8, 5, 6, 10)) for rank in range(reader.tp)]
        plans = [plan([each.manifest for each in held], own.manifest) for own in read]
    except PlanRefused as refused:
        return "refused: " + ", ".join(sorted({each.code for each in refused.refusals}))
    except KvferryError as error:
        return f"refused: {error.code}"
    for rank in held:
        kind.write(rank)
    tables = {rank.number: {"0": BlockTable.of(rank.own)} for rank in held}
    for chosen, own in zip(plans, read, strict=True):
        moved, memory = own.memory.clone().numpy(), {rank.number: rank.memory.numpy() for rank in held}
        for runs in bind(chosen, tables, {"0": BlockTable.of(own.own)}, (0, TOKENS)).runs():
            theirs = memory[runs.source_rank]
            for start, to, count in zip(runs.source_offsets, runs.destination_offsets, runs.nbytes, strict=True):
                moved[to : to + count] = theirs[start : start + count]
        kind.write(own)
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


def main(chosen: Sequence[str]) -> None:
    print(json.dumps({name: [outcome(KINDS[name], *pair) for pair in KINDS[name].pairs] for name in chosen or KINDS}))


if __name__ == "__main__":
    main(sys.argv[1:])
