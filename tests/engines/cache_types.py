"""Every cache type that vLLM has a name for: what do the bytes mean, and which of any two types are paired?

.venv-engines/bin/python tests/engines/cache_types.py

vLLM makes a layer of each type, by the backend that has it; kvferry's plug-in describes it. Prints a line of JSON:
`meanings`, by type those of its components, and `pairs`, for any two types "paired" or the codes of the refusal.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any, get_args

import descriptions
import torch
from descriptions import ALIKE, KINDS, Kind, Rank, Shape, attention, nvfp4, rank_of, write_attention
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.backends.ultraquant_attn import UltraQuantAttentionBackend

from kvferryd.plan import PlanRefused, plan

# Two backends ask for an AMD GPU, and load kernels by this name: beside those of this CPU they would end the process.
current_platform.import_kernels()
sys.modules.setdefault("vllm._C", ModuleType("vllm._C"))


class Plain:
    """Puts keys and values where vLLM's FlashAttention does, whose kernel needs a GPU: halves of the content."""

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        both = torch.cat((keys, values), dim=-1)
        if cache.dtype == torch.uint8:
            e5m2 = layer.kv_cache_dtype == "fp8_e5m2"
            both = both.to(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).view(torch.uint8)
        cache[slots // cache.shape[2], :, slots % cache.shape[2]] = both.to(cache.dtype)


def plain(config: VllmConfig) -> Any:
    layer = attention(CPUAttentionBackend)(config)
    layer.impl = Plain()
    return layer


def of_every_layer(backend: Any) -> Any:
    """vLLM leaves the first and the last layers of a model out of these types."""

    def make(config: VllmConfig) -> Any:
        config.cache_config.kv_cache_dtype_skip_layers = []
        return attention(backend)(config)

    return make


def kind_of(name: str) -> Kind:
    if name in KINDS:
        return KINDS[name]
    make = plain
    if name.startswith("turboquant"):
        make = of_every_layer(TurboQuantAttentionBackend)
    elif name.startswith("ultraquant"):
        make = of_every_layer(UltraQuantAttentionBackend)
    elif name.startswith("nvfp4"):
        make = nvfp4(False)
    return Kind(make, write_attention, ALIKE, {"kv_cache_dtype": name})


def pair(source: Rank, reader: Rank) -> str:
    try:
        plan([source.manifest], reader.manifest)
    except PlanRefused as refused:
        return ", ".join(sorted({each.code for each in refused.refusals}))
    return "paired"


def main() -> None:
    types = get_args(CacheDType)
    descriptions.KINDS |= {name: kind_of(name) for name in types}
    ranks = {name: rank_of(name, Shape(1), 0) for name in types}
    meanings = {
        name: {component.name: component.meaning for component in rank.manifest.components}
        for name, rank in ranks.items()
    }
    pairs = [[one, other, pair(ranks[one], ranks[other])] for one in types for other in types]
    print(json.dumps({"meanings": meanings, "pairs": pairs}))


if __name__ == "__main__":
    main()
