"""Hand states and draft models' caches over between SGLang's own pools, in the memory of real daemons, and print by
their kind what was moved: its components, and whether each element is where it has to be. Run by the Python of SGLang's
environment.

.venv-sglang/bin/python tests/engines/sglang_states.py PREFILL_SOCKET... DECODE_SOCKET
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry

from kvferry.blocking import BlockingEngineClient
from kvferry.errors import KvferryError
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

    def __init__(self, engine: str, socket: str, rank: int, ranks: int, tp: int) -> None:
        """tp: ranks of a stage."""
        self.engine, self.rank, self.ranks, self.tp, self.seed = engine, rank, ranks, tp, rank
        self.daemon = BlockingEngineClient.connect(socket, engine_id=engine, epoch="1", rank=rank, world_size=ranks)
        self._place = place = SimpleNamespace(daemon=self.daemon, _regions=[])
        place.place = partial(Rank.place, place)
        patches._rank = lambda: place

    def register(self, cache: Any, heads: int, draft: tuple[Any, int] | None = None) -> str:
        """heads: of all ranks. draft: the draft model's pool, and its heads. Returns the encoding."""
        builder = ManifestBuilder(
            self.engine, "1", ModelInfo(name="m", fingerprint="f"), rank=self.rank, world_size=self.ranks,
            parallel={"tp": self.tp, "pp": self.ranks // self.tp},
        )  # fmt: skip
        for at, region in enumerate(self._place._regions):
            builder.region(at, region.kind, nbytes=region.nbytes, address=region.address)
        drafted = (draft[0], lambda _: draft[1]) if draft else None
        encoding = describe(builder, cache, 1, self.rank % self.tp, self.tp, lambda _: heads, "auto", drafted)
        manifest = builder.build()
        self.components = sorted({part.name for part in manifest.components})
        self.daemon.register(manifest)
        return encoding


class Recurrent(Side):
    """A rank of a model with recurrent layers."""

    def __init__(
        self, engine: str, socket: str, kind: str, rank: int, ranks: int, tp: int,
        attention: tuple[int, ...] = ATTENTION, recurrent: tuple[int, ...] = RECURRENT,
    ) -> None:  # fmt: skip
        """attention, recurrent: layers of this one."""
        super().__init__(engine, socket, rank, ranks, tp)
        params, shape, sizes, _, _ = KINDS[kind]
        states = MambaPool(
            size=8, spec_state_size=2, mamba_layer_ids=list(recurrent), device="cpu",
            cache_params=params(shape=shape(tp_world_size=tp, **sizes), layers=list(RECURRENT)),
        )  # fmt: skip
        self.cache = HybridLinearKVPool(
            size=8 * PAGE, dtype=torch.float32, page_size=PAGE, head_num=HEADS // tp, head_dim=8,
            full_attention_layer_ids=list(attention), device="cpu", mamba_pool=states,
        )  # fmt: skip
        self.encoding = self.register(self.cache, HEADS)

    def fill(self) -> None:
        states, pool = self.cache.mamba_pool.mamba_cache, self.cache.full_kv_pool
        for tensor in (*states.conv, states.temporal, *pool.k_buffer, *pool.v_buffer):
            tensor.copy_(torch.randn(tensor.shape))

    def tensors(self, slot: int, pages: list[int], axis: int) -> list[torch.Tensor]:
        """A request's: keys, values, convolutions with channels first, states."""
        pool, states = self.cache.full_kv_pool, self.cache.mamba_pool
        sides = [buffer[rows(pages)] for buffer in (*pool.k_buffer, *pool.v_buffer)]
        return [*sides, states.mamba_cache.conv[0][:, slot].movedim(1 + axis, 1), states.mamba_cache.temporal[:, slot]]


class Drafted(Side):
    """It has a model of three layers and a draft model of one: with heads, or with latent rows where those are 0."""

    def __init__(self, engine: str, socket: str, rank: int, tp: int, heads: int, draft_heads: int | None) -> None:
        super().__init__(engine, socket, rank, tp, tp)
        self.seed = rank if heads else 0  # all ranks have the same latent rows
        self.pools = [self._pool(heads, 3)] + ([] if draft_heads is None else [self._pool(draft_heads, 1)])
        self.register(self.pools[0], heads, (self.pools[1], draft_heads) if draft_heads is not None else None)

    def _pool(self, heads: int, layers: int) -> Any:
        common = {"size": 8 * PAGE, "page_size": PAGE, "layer_num": layers, "device": "cpu", "dtype": torch.float32}
        if not heads:
            return MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=8, enable_memory_saver=False, **common)
        return MHATokenToKVPool(
            head_num=max(1, heads // self.tp), head_dim=8, enable_memory_saver=False, enable_alt_stream=False, **common
        )

    def fill(self) -> None:
        for pool in self.pools:
            for tensor in buffers(pool):
                tensor.copy_(torch.randn(tensor.shape))

    def tensors(self, pages: list[int]) -> list[torch.Tensor]:
        """A request's, of each layer: keys, values, or latent rows; those of the draft model last."""
        return [buffer[rows(pages)] for pool in self.pools for buffer in buffers(pool)]


def buffers(pool: Any) -> list[torch.Tensor]:
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def rows(pages: list[int]) -> list[int]:
    return [page * PAGE + at for page in pages for at in range(PAGE)][:TOKENS]


def drafts(sockets: list[str]) -> dict[str, Any]:
    """Two ranks hand over to one: a draft model with other heads than the model's, then latent rows, which each rank
    has. Then decode alone has a draft model."""
    told: dict[str, Any] = {}
    for kind, heads, draft_heads in (("heads", 4, 2), ("latent", 0, 0)):
        engine = f"p-draft-{kind}"
        sources = [Drafted(engine, socket, rank, 2, heads, draft_heads) for rank, socket in enumerate(sockets[:-1])]
        reader = Drafted(f"d-draft-{kind}", sockets[-1], 0, 1, heads, draft_heads)
        moved(engine, sources, reader)
        whole = [each.tensors([3, 1, 2]) for each in sources]
        wanted = [torch.cat(of, 1) for of in zip(*whole, strict=True)] if heads else whole[0]
        same = [torch.equal(*pair) for pair in zip(reader.tensors([2, 4, 1]), wanted, strict=True)]
        told[kind] = {"components": reader.components, "same": same}
    source, reader = Drafted("p-plain", sockets[0], 0, 1, 4, None), Drafted("d-drafts", sockets[-1], 0, 1, 4, 2)
    try:
        moved("p-plain", [source], reader)
    except KvferryError as error:
        told["decode alone"] = f"{error.code}: {error}"
    return told


def handed_over(kind: str, sockets: list[str]) -> dict[str, Any]:
    """From two ranks to one."""
    engine, widths = f"p-{list(KINDS).index(kind)}", KINDS[kind][4]
    sources = [Recurrent(engine, socket, kind, rank, 2, 2) for rank, socket in enumerate(sockets[:-1])]
    reader = Recurrent(f"d{engine}", sockets[-1], kind, 0, 1, 1)
    moved(engine, sources, reader, (5, 7))
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
        Recurrent("p-stages", sockets[0], "Mamba2", 0, 2, 1, recurrent=()),
        Recurrent("p-stages", sockets[1], "Mamba2", 1, 2, 1, attention=()),
    ]
    reader = Recurrent("d-stages", sockets[-1], "Mamba2", 0, 1, 1)
    moved("p-stages", sources, reader, (5, 7))
    wanted = sources[0].tensors(5, [3, 1, 2], 0)[:2] + sources[1].tensors(5, [3, 1, 2], 0)[-2:]
    same = [torch.equal(*pair) for pair in zip(reader.tensors(7, [2, 4, 1], 0), wanted, strict=True)]
    return {"encodings": [each.encoding for each in sources], "same": same}


def moved(engine: str, sources: Sequence[Side], reader: Side, slots: Sequence[int] = ()) -> None:
    """A request whose pages, and the slots of its states, are other ones on either side. Raises KvferryError."""
    there, here = [[[np.array(slot)]] for slot in slots] or [[], []]
    try:
        for each in sources:
            torch.manual_seed(each.seed)
            each.fill()
            tables = tables_of(TOKENS, PAGE, np.array([3, 1, 2]), *there)
            each.daemon.publish("r", tables, TOKENS, lease=1, digest=b"prompt")
        reader.daemon.receive(
            "r", tables_of(TOKENS, PAGE, np.array([2, 4, 1]), *here), (0, TOKENS), attempt=1, digest=b"prompt",
            source=SourceBody(engine_id=engine, address=sources[0].daemon.peer_address), deadline_s=30.0,
        ).result()  # fmt: skip
    finally:
        for each in (*sources, reader):
            each.daemon.close()


def main() -> None:
    patches.install()
    HookRegistry.apply_hooks()
    told = {kind: handed_over(kind, sys.argv[1:]) for kind in KINDS}
    print(json.dumps(told | {"stages": of_stages(sys.argv[1:]), "drafts": drafts(sys.argv[1:])}))


if __name__ == "__main__":
    main()
