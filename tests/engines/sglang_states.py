"""Hand states over between SGLang's own pools, in the memory of real daemons, and print by the kind of state what was
moved: its components, and whether each element is where it has to be. Run by the Python of SGLang's environment.

.venv-sglang/bin/python tests/engines/sglang_states.py PREFILL_SOCKET... DECODE_SOCKET
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
from sglang.srt.plugins.hook_registry import HookRegistry

from kvferry.blocking import BlockingEngineClient
from kvferry.manifest import ManifestBuilder, ModelInfo
from kvferry.schemas import SourceBody
from kvferry.sglang import patches
from kvferry.sglang.cache import describe, tables_of
from kvferry.sglang.rank import Rank

PAGE, TOKENS, HEADS = 16, 40, 4
ATTENTION, RECURRENT = (0,), (1, 2)
"""The layers of each kind."""
GATED = {"num_heads": 4, "head_dim": 8, "state_size": 6, "conv_kernel": 4}
KINDS: dict[str, tuple[Any, Any, dict[str, Any], str, list[int]]] = {
    "gated delta net": (
        Mamba2CacheParams, Mamba2StateShape.create,
        {**GATED, "intermediate_size": 32, "n_groups": 2, "conv_shard_groups": [12, 12, 32]}, "qkv", [12, 12, 32],
    ),
    "Kimi's": (
        KimiLinearCacheParams, KimiLinearStateShape.create, {"num_heads": 4, "head_dim": 8}, "qkv", [32, 32, 32],
    ),
    "Mamba2": (
        Mamba2CacheParams, Mamba2StateShape.create, {**GATED, "intermediate_size": 32, "n_groups": 2}, "xbc",
        [32, 12, 12],
    ),
    "Mamba": (
        Mamba2CacheParams, Mamba2StateShape.create_full_rank,
        {"intermediate_size": 32, "state_size": 6, "conv_kernel": 4}, "x", [32],
    ),
    "convolution alone": (
        Mamba2CacheParams, Mamba2StateShape.create,
        {"intermediate_size": 32, "n_groups": 1, "num_heads": 2, "head_dim": 32, "state_size": 0, "conv_kernel": 3},
        "x", [32],
    ),
}  # fmt: skip
"""Of what SGLang makes a kind's pools, and of the convolution's channels whose they are and how many on all ranks."""


class Side:
    """A rank of an engine: its daemon, and SGLang's pools in the memory of that."""

    def __init__(
        self, engine: str, socket: str, kind: str, rank: int, ranks: int, tp: int,
        attention: tuple[int, ...] = ATTENTION, recurrent: tuple[int, ...] = RECURRENT,
    ) -> None:  # fmt: skip
        """tp: ranks of a stage. attention, recurrent: layers of this one."""
        params, shape, sizes, _, _ = KINDS[kind]
        self.daemon = BlockingEngineClient.connect(socket, engine_id=engine, epoch="1", rank=rank, world_size=ranks)
        place = SimpleNamespace(daemon=self.daemon, _regions=[])
        place.place = partial(Rank.place, place)
        patches._rank = lambda: place
        states = MambaPool(
            size=8, spec_state_size=2, mamba_layer_ids=list(recurrent), device="cpu",
            cache_params=params(shape=shape(tp_world_size=tp, **sizes), layers=list(RECURRENT)),
        )  # fmt: skip
        self.cache = HybridLinearKVPool(
            size=8 * PAGE, dtype=torch.float32, page_size=PAGE, head_num=HEADS // tp, head_dim=8,
            full_attention_layer_ids=list(attention), device="cpu", mamba_pool=states,
        )  # fmt: skip
        builder = ManifestBuilder(
            engine, "1", ModelInfo(name="m", fingerprint="f"), rank=rank, world_size=ranks,
            parallel={"tp": tp, "pp": ranks // tp},
        )  # fmt: skip
        for at, region in enumerate(place._regions):
            builder.region(at, region.kind, nbytes=region.nbytes, address=region.address)
        self.encoding = describe(builder, self.cache, 1, rank % tp, tp, lambda layer: HEADS, "auto")
        manifest = builder.build()
        self.components = sorted({part.name for part in manifest.components})
        self.daemon.register(manifest)

    def tensors(self, slot: int, pages: list[int], axis: int) -> list[torch.Tensor]:
        """A request's: keys, values, convolutions with channels first, states."""
        pool, states = self.cache.full_kv_pool, self.cache.mamba_pool
        rows = [page * PAGE + at for page in pages for at in range(PAGE)][:TOKENS]
        sides = [buffer[rows] for buffer in (*pool.k_buffer, *pool.v_buffer)]
        return [*sides, states.mamba_cache.conv[0][:, slot].movedim(1 + axis, 1), states.mamba_cache.temporal[:, slot]]


def handed_over(kind: str, sockets: list[str]) -> dict[str, Any]:
    """From two ranks to one."""
    engine, widths = f"p-{list(KINDS).index(kind)}", KINDS[kind][4]
    sources = [Side(engine, socket, kind, rank, 2, 2) for rank, socket in enumerate(sockets[:-1])]
    reader = Side(f"d{engine}", sockets[-1], kind, 0, 1, 1)
    moved(engine, sources, reader)
    axis = reader.cache.mamba_pool.conv_slice_axis
    theirs = [each.tensors(5, [3, 1, 2], axis) for each in sources]
    keys, values, convolution, state = (list(each) for each in zip(*theirs, strict=True))
    parts = [each.split([width // len(sources) for width in widths], 1) for each in convolution]
    whole = [part for of in zip(*parts, strict=True) for part in of]
    wanted = [torch.cat(keys, 1), torch.cat(values, 1), torch.cat(whole, 1)]
    if state[0].numel():
        wanted.append(torch.cat(state, 1))
    got = reader.tensors(7, [2, 4, 1], axis)
    same = [torch.equal(ours, each) for ours, each in zip(got, wanted, strict=False)]
    return {"components": reader.components, "same": same}


def of_stages(sockets: list[str]) -> dict[str, Any]:
    """From two stages to one: the first has no states, the second no keys and values."""
    sources = [
        Side("p-stages", sockets[0], "Mamba2", 0, 2, 1, recurrent=()),
        Side("p-stages", sockets[1], "Mamba2", 1, 2, 1, attention=()),
    ]
    reader = Side("d-stages", sockets[-1], "Mamba2", 0, 1, 1)
    moved("p-stages", sources, reader)
    wanted = sources[0].tensors(5, [3, 1, 2], 0)[:2] + sources[1].tensors(5, [3, 1, 2], 0)[-2:]
    same = [torch.equal(*pair) for pair in zip(reader.tensors(7, [2, 4, 1], 0), wanted, strict=True)]
    return {"encodings": [each.encoding for each in sources], "same": same}


def moved(engine: str, sources: list[Side], reader: Side) -> None:
    """A request whose pages and slots are other ones on either side."""
    for at, each in enumerate(sources):
        torch.manual_seed(at)
        states, pool = each.cache.mamba_pool.mamba_cache, each.cache.full_kv_pool
        for tensor in (*states.conv, states.temporal, *pool.k_buffer, *pool.v_buffer):
            tensor.copy_(torch.randn(tensor.shape))
    for each in sources:
        tables = tables_of(TOKENS, PAGE, np.array([3, 1, 2]), [np.array(5)])
        each.daemon.publish("r", tables, TOKENS, lease=1, digest=b"prompt")
    received = reader.daemon.receive(
        "r", tables_of(TOKENS, PAGE, np.array([2, 4, 1]), [np.array(7)]), (0, TOKENS), attempt=1, digest=b"prompt",
        source=SourceBody(engine_id=engine, address=sources[0].daemon.peer_address), deadline_s=30.0,
    )  # fmt: skip
    received.result()
    for each in (*sources, reader):
        each.daemon.close()


def main() -> None:
    patches.install()
    HookRegistry.apply_hooks()
    told = {kind: handed_over(kind, sys.argv[1:]) for kind in KINDS}
    print(json.dumps(told | {"stages": of_stages(sys.argv[1:])}))


if __name__ == "__main__":
    main()
