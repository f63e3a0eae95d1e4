"""How many KV heads a layer has on all ranks of tensor parallelism.

A layer's spec says how many its rank keeps. A layer of one may have as many as there are ranks, or fewer, so that
several ranks keep the same; models have layers of both kinds. vLLM's Attention does not say which. The
projection beside it does, so its numbers are noted when it is made.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

from kvferry.errors import Malformed

NOTED: defaultdict[str, set[int]] = defaultdict(set)
"""KV heads by the name of the module that has the projection, in this process."""
NAMES = ("key_value_heads", "kv_heads", "head_kv", "query_groups")
"""Ends of the names of a configuration's fields that hold a number of KV heads."""


def watch() -> None:
    """Note the KV heads of every projection that is made from now on. Idempotent."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    make = QKVParallelLinear.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def made(projection: Any, *args: Any, **named: Any) -> None:
        make(projection, *args, **named)
        NOTED[_module(projection.prefix)].add(projection.total_num_kv_heads)

    QKVParallelLinear.__init__ = made


def shards(name: str, own: int, ranks: int, model: Any) -> int:
    """Into how many parts the layer's KV heads are divided; ranks beyond that have copies.

    own: heads that a rank keeps. model: vLLM's ModelConfig. Raises KvferryError (`unknown_heads`).
    """
    totals = NOTED.get(_module(name)) or _configured(model)
    found = {_parts(total, own, ranks) for total in totals} - {0}
    if len(found) != 1:
        why = f"layer {name} keeps {own} KV heads on each of {ranks} ranks, and how many it has in all is not known"
        remedy = "report the model; or serve it with fewer ranks, so that none keeps a copy of another's head"
        raise Malformed("unknown_heads", why, field="kv_heads", value=sorted(totals), remedy=remedy)
    return found.pop()


def _parts(total: int, own: int, ranks: int) -> int:
    """The parts of so many heads, where each rank keeps `own`; 0 where that cannot be."""
    if total == own:
        return 1  # every rank has all of them
    divides = max(total, ranks) % min(total, ranks) == 0
    return min(ranks, total) if divides and own == max(1, total // ranks) else 0


def _configured(model: Any) -> set[int]:
    """Every number of KV heads that the configuration names, for layers whose projection is none of vLLM's."""
    totals, left = {model.get_total_num_kv_heads()}, [model.hf_text_config.to_dict()]
    while left:
        for name, value in left.pop().items():
            values = value if isinstance(value, list) else [value]
            left += [each for each in values if isinstance(each, dict)]
            if str(name).endswith(NAMES):  # names of labels are numbers
                totals.update(each for each in values if type(each) is int and each > 0)
    return totals


def _module(name: str) -> str:
    """The module that has this one: `model.layers.0.self_attn` of `model.layers.0.self_attn.qkv_proj`."""
    return name.rpartition(".")[0]
