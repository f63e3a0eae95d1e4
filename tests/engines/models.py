"""Models with the sizes of real ones, without weights: is every element that a reader gets the one that it means?

make models, or of one model: .venv-engines/bin/python tests/engines/models.py Llama-3-70B

vLLM itself makes the layers (on the meta device), their specs, groups, tensors and views, and kvferry's plug-in
describes them. The truth beside it is vLLM's rule only (`held`, `Engine.pieces`), of the public numbers and of vLLM's
views. Every element of every layer is given a number, sources are filled by that rule, the planner's runs are copied,
and each element that the reader should have is looked at. For every model one row of the table in docs/models.md is
printed: by shape "exact", "refused: CODES", "not run: WHY" or "wrong: WHERE"; with --times how long `plan` and `bind`
take as well.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

import numpy as np
import torch
from in_torch import store_index
from public_models import MODELS, Rows
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_utils import (
    _project_kv_cache_groups_to_worker,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import MambaSpec, SparseCacheRole, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.errors import KvferryError
from kvferry.manifest import Manifest, ManifestBuilder, ModelInfo
from kvferry.tables import BlockTable, Tables
from kvferry.vllm import heads
from kvferry.vllm.layers import Group, describe
from kvferryd.plan import Plan, PlanRefused, bind, plan

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- computed: make models -->\n", "<!-- computed: end -->\n"
TOKENS = 70
"""A request has at least so many: blocks of 16 and of 64, the last ones in part; or what makes a second block."""
PROMPT = 8192
"""Tokens of the request whose `plan` and `bind` are timed."""
REPEATS = 100
"""Calls, the fastest of which is told."""
NHD, HND = "LBNHC", "LBHNC"


@dataclass(frozen=True)
class Shape:
    """tp: in eighths of the ranks that the model has for TP8; 0 where context parallelism is to be possible."""

    tp: int
    block: int = 16
    layout: str = NHD
    pp: int = 1
    dcp: int = 1
    interleave: int = 1


SHAPES = {
    "TP8 to TP4": (Shape(8), Shape(4)),
    "TP4 to TP8": (Shape(4), Shape(8)),
    "TP8 to TP16": (Shape(8), Shape(16)),
    "TP16 to TP8": (Shape(16), Shape(8)),
    "PP2 to PP1": (Shape(8, pp=2), Shape(8)),
    "block 16 to 64": (Shape(8), Shape(8, block=64)),
    "NHD to HND": (Shape(8), Shape(8, layout=HND)),
    "TP4, NHD, 64 to TP8, HND, 16": (Shape(4, 64), Shape(8, 16, HND)),
    "DCP2 to 1, by 1": (Shape(0, dcp=2), Shape(8)),
    "DCP2 to 1, by 16": (Shape(0, dcp=2, interleave=16), Shape(8)),
}
TIMED = ("TP4, NHD, 64 to TP8, HND, 16", "DCP2 to 1, by 1")


def as_on_gpus() -> None:
    """vLLM for a CPU makes layers as it does for GPUs. The kernels that it calls are here in torch."""
    CPUMLABackend.supports_block_size = TritonMLABackend.supports_block_size
    _custom_ops.indexer_k_quant_and_cache = store_index
    of_a_cpu, reduces = CpuPlatform.get_attn_backend_cls, "vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar"

    def backend(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.use_mla:  # sparse, too
            return AttentionBackendEnum.CPU_MLA.get_path()
        return of_a_cpu(selected_backend, attn_selector_config, num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    sys.modules[reduces] = SimpleNamespace(  # type: ignore[assignment]  # Kimi's layers ask for it, in CUTLASS
        get_gemm_rs_ar=lambda: None, maybe_init_gemm_rs_ar=lambda *_, **__: None
    )


class NotRun(Exception):
    """vLLM does not make this engine."""


class PlainImpl:
    """Puts keys and values where vLLM's FlashAttention does: halves of the content (its kernel needs a GPU)."""

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        size = cache.shape[2]
        cache[slots // size, :, slots % size] = torch.cat((keys, values), dim=-1)


@dataclass
class Rank:
    """memory: all of its cache, which `views` are views of. states: of recurrent layers, their tensors by name."""

    manifest: Manifest
    tables: Tables
    views: dict[str, torch.Tensor]
    states: dict[str, tuple[torch.Tensor, ...]]
    memory: torch.Tensor


class Piece(NamedTuple):
    """A part of a layer: memory as whole numbers of its elements' width, where in it, and what lies there."""

    memory: torch.Tensor
    index: Any
    value: torch.Tensor


def held(rows: Rows, rank: int, ranks: int) -> range:
    """vLLM's rule: rank r of R has rows [r * total / R, ...); where there are fewer parts than ranks, a part."""
    total, parts = rows
    if parts >= ranks:
        return range(rank * total // ranks, (rank + 1) * total // ranks)
    part = rank * parts // ranks
    return range(part * total // parts, (part + 1) * total // parts)


def numbers(what: str, width: int, *axes: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """[axis, ...]: what the rule says lies at these positions of `what`, as whole numbers of so many bytes."""
    spans = torch.meshgrid(*(torch.as_tensor(list(axis)) for axis in axes), indexing="ij")
    mixed = torch.full_like(spans[0], zlib.crc32(what.encode()))
    for span in spans:
        mixed = (mixed * 1000003 + span) * 2654435761
        mixed ^= mixed >> 23
    return ((mixed >> 11) & (2 ** (8 * width - 1) - 1)).to(INTEGERS[width])


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Engine:
    """A model on ranks of this shape. `rank` makes one after another, since layers are made once for each stage."""

    def __init__(self, name: str, shape: Shape, *, whole: bool = False) -> None:
        self.model, self.shape = MODELS[name], shape
        self.tp = shape.tp * self.model.ranks // 8 or self.model.dcp_ranks
        self.ranks = self.tp * shape.pp
        try:
            self._make(whole)
        except (ValueError, AssertionError, NotImplementedError, ImportError, ZeroDivisionError) as error:
            raise NotRun(_why(error)) from error

    def _make(self, whole: bool) -> None:
        shape, model = self.shape, self.model
        numbers = model.config | {"torch_dtype": "bfloat16"}
        if not whole:
            by_layer = [name for name in ("layer_types", "hybrid_override_pattern") if name in numbers]
            numbers |= {"num_hidden_layers": model.layers} | {name: numbers[name][: model.layers] for name in by_layer}
        self.folder = tempfile.TemporaryDirectory()  # some models read it when they are made
        Path(self.folder.name, "config.json").write_text(json.dumps(numbers))
        self.config: VllmConfig = EngineArgs(
            model=self.folder.name, skip_tokenizer_init=True, tensor_parallel_size=self.tp, load_format="dummy",
            enforce_eager=True, max_model_len=4096, block_size=shape.block, distributed_executor_backend="mp",
            limit_mm_per_prompt={}, pipeline_parallel_size=shape.pp, decode_context_parallel_size=shape.dcp,
            cp_kv_cache_interleave_size=shape.interleave, enable_prefix_caching=False,
        ).create_engine_config()  # fmt: skip
        cache_config = self.config.cache_config
        cache_config.block_size, cache_config.kv_cache_layout = shape.block, shape.layout
        made = self.config.compilation_config.static_forward_context
        stages: list[dict[str, Any]] = []
        with set_current_vllm_config(self.config), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            for stage in range(shape.pp):
                before = set(made)
                with as_one_of(self.tp, shape.dcp, stage, shape.pp):
                    for module, part in model.without:
                        setattr(importlib.import_module(module), part, torch.nn.Identity)
                    initialize_model(vllm_config=self.config)
                stages.append({name: each for name, each in made.items() if name not in before})
            with as_one_of(self.tp, shape.dcp):
                current_platform.update_block_size_for_backend(self.config)
                self.config.validate_block_size()
                specs = [
                    {
                        name: spec
                        for name, layer in stage.items()
                        if isinstance(layer, AttentionLayerBase) and (spec := layer.get_kv_cache_spec(self.config))
                    }
                    for stage in stages
                ]
        self.layers = made
        groups = get_kv_cache_groups(self.config, {name: spec for stage in specs for name, spec in stage.items()})
        self.groups = [_project_kv_cache_groups_to_worker(groups, stage) for stage in specs]
        for name in {name for stage in specs for name in stage}:
            if hasattr(made[name], "impl"):
                made[name].impl = PlainImpl()

    @property
    def blocks(self) -> list[int]:
        """Tokens of a block, by group; 0 of a state."""
        specs = [_one(group.kv_cache_spec) for group in self.groups[0]]
        return [0 if isinstance(spec, MambaSpec) else spec.block_size for spec in specs]

    @cache  # noqa: B019  # engines live as long as their model is looked at
    def describe(self, rank: int, tokens: int) -> Rank:
        """A rank with a cache that has room for so many tokens, in blocks that are in no order."""
        stage, tp_rank = divmod(rank, self.tp)
        spans = [block * self._ring(group) for block, group in zip(self.blocks, self.groups[stage], strict=True)]
        counts = [-(-tokens // span) if span else 1 for span in spans]
        self.config.cache_config.num_gpu_blocks_override = sum(counts) + 4
        cache_config = get_kv_cache_config_from_groups(self.config, self.groups[stage], 2**40)
        views = allocate_kv_cache(cache_config, torch.device("cpu"), KVCacheLayout[self.shape.layout])
        with as_one_of(self.tp, self.shape.dcp):
            for name, view in views.items():
                self.layers[name].bind_kv_cache(view)
        storage = next(iter(views.values())).untyped_storage()
        builder = ManifestBuilder(
            "e", "1", ModelInfo(name="m", fingerprint="f"), rank=rank, world_size=self.ranks
        ).region(0, "host", nbytes=storage.nbytes(), address=storage.data_ptr())
        groups = [
            Group(str(i), each.kv_cache_spec, tuple(each.layer_names)) for i, each in enumerate(self.groups[stage])
        ]
        describe(builder, self.config, groups, cache_config.num_blocks, views, tp_rank, self.tp)
        order = torch.randperm(cache_config.num_blocks - 1, generator=torch.Generator().manual_seed(rank)) + 1
        tables = {
            group.name: BlockTable.of(ids.tolist())
            for group, ids in zip(groups, order.split([*counts, 3]), strict=False)
        }
        states = {name: self.layers[name].kv_cache for name in views if isinstance(self.layers[name].kv_cache, tuple)}
        memory = torch.tensor([], dtype=torch.uint8).set_(storage)
        return Rank(builder.build(), tables, views, states, memory)

    def _ring(self, group: Any) -> int:
        return self.shape.dcp if _one(group.kv_cache_spec).dcp_sharded else 1

    def pieces(self, rank: int, state: Rank, tokens: int) -> Iterator[tuple[str, Piece]]:
        """Layer by layer: what lies where on this rank, by vLLM's rule."""
        stage, tp_rank = divmod(rank, self.tp)
        for i, group in enumerate(self.groups[stage]):
            ids = torch.tensor(state.tables[str(i)].block_ids)
            for name in group.layer_names:
                spec = _one(group.kv_cache_spec, name)
                if isinstance(spec, MambaSpec):
                    for piece in self._states(name, state.states[name], int(ids[0]), tp_rank):
                        yield name, piece
                else:
                    view = state.views[name]
                    view = view.view(INTEGERS[view.element_size()])
                    if getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER:
                        yield name, self._indexed(name, spec, view, ids, tokens, tp_rank)
                    else:
                        yield name, self._attention(name, spec, view, ids, tokens, tp_rank)

    def _attention(self, name: str, spec: Any, view: torch.Tensor, ids: torch.Tensor, tokens: int, rank: int) -> Piece:
        """[block, head, slot, content]."""
        total = self.model.heads(extract_layer_index(name))
        own = held((total, total), rank, self.tp)
        assert view.shape[1] == len(own), (name, view.shape, own)
        at, block, slot = self._slots(spec, tokens, rank)
        value = numbers(name, view.element_size(), own, at, range(view.shape[3]))
        return Piece(view, (ids[block], slice(None), slot), value.transpose(0, 1))

    def _slots(self, spec: Any, tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens of a rank, the index of the block of each and its slot there. Context parallelism as in vLLM's slot
        mapping: of `size * dcp` tokens in a row, rank r of the ring has those whose interval of `interleave` is r
        modulo the ring, close together."""
        at, size, ring = torch.arange(tokens), spec.block_size, self.shape.dcp if spec.dcp_sharded else 1
        inside, interleave = at % (size * ring), self.shape.interleave
        mine = inside // interleave % ring == rank % ring
        slot = inside // (interleave * ring) * interleave + inside % interleave
        return at[mine], at[mine] // (size * ring), slot[mine]

    def _indexed(self, name: str, spec: Any, view: torch.Tensor, ids: torch.Tensor, tokens: int, rank: int) -> Piece:
        """The sparse indexer's keys, as its kernel writes a block: the values of all slots (128 bytes each), then their
        scales (4 bytes each)."""
        size, content = view.shape[2:]
        (at, block, slot), part = self._slots(spec, tokens, rank), torch.arange(content)
        values, slot = content - 4, slot[:, None]
        inside = torch.where(part < values, slot * values + part, size * values + slot * 4 + part - values)
        value = numbers(name, view.element_size(), at, range(content))
        return Piece(view, (ids[block][:, None], 0, inside // content, inside % content), value)

    def _states(self, name: str, tensors: Sequence[torch.Tensor], block: int, rank: int) -> Iterator[Piece]:
        """The convolution, whose channels are the first of its axes or the last, and the state."""
        assert len(tensors) == len(self.model.states), (name, [each.shape for each in tensors])
        for nth, (tensor, parts) in enumerate(zip(tensors, self.model.states, strict=True)):
            own = tensor[block] if nth or is_conv_state_dim_first() else tensor[block].transpose(0, 1)
            own, start, before = own.view(INTEGERS[own.element_size()]), 0, 0
            for rows in parts:
                mine = held(rows, rank, self.tp)
                global_rows = range(before + mine.start, before + mine.stop)
                value = numbers(f"{name}.{nth}", own.element_size(), global_rows, *map(range, own.shape[1:]))
                yield Piece(own, slice(start, start + len(mine)), value)
                start, before = start + len(mine), before + rows[0]
            assert start == len(own), (name, nth, start, own.shape)


def _one(spec: Any, name: str | None = None) -> Any:
    """The spec of one layer of a group."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    return spec.kv_cache_specs[name] if name else next(iter(spec.kv_cache_specs.values()))


@contextmanager
def as_one_of(tp: int, dcp: int, stage: int = 0, stages: int = 1) -> Iterator[None]:
    """vLLM makes the layers of a rank of so many; no other rank is needed for that."""
    if parallel_state._TP is None:
        with torch.device("cpu"):
            parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
            parallel_state.initialize_model_parallel(1, 1, backend="gloo")
    groups = ((parallel_state._TP, 0, tp), (parallel_state._DCP, 0, dcp), (parallel_state._PP, stage, stages))
    try:
        for group, rank, ranks in groups:
            group.rank_in_group, group.world_size, group.ranks = rank, ranks, list(range(-rank, ranks - rank))
        yield
    finally:
        for group, _, _ in groups:
            group.rank_in_group, group.world_size, group.ranks = 0, 1, [0]


def copied(chosen: Plan, sources: Sequence[Rank], own: Rank, tokens: int) -> None:
    """Copy what the planner says."""
    tables = {i: each.tables for i, each in enumerate(sources)}
    for runs in bind(chosen, tables, own.tables, (0, tokens)).runs():
        theirs, ours = sources[runs.source_rank].memory.numpy(), own.memory.numpy()
        for length in np.unique(runs.nbytes):
            these, along = runs.nbytes == length, np.arange(length)
            for part in np.array_split(np.flatnonzero(these), 1 + int(these.sum() * length) // 2**24):
                starts, ends = runs.source_offsets[part], runs.destination_offsets[part]
                ours[ends[:, None] + along] = theirs[starts[:, None] + along]


def planned(sources: Sequence[Rank], own: Rank) -> Plan:
    return plan([each.manifest for each in sources], own.manifest)


def outcome(source: Engine, reader: Engine) -> str:
    """The cell of this pair. Readers: three or four ranks, the first and the last among them."""
    tokens = max(TOKENS, *(block + block // 8 + 3 for block in source.blocks + reader.blocks))
    readers = sorted({*range(0, reader.ranks, max(1, reader.ranks // 3)), reader.ranks - 1})
    try:
        room = 2 * max(*source.blocks, *reader.blocks) * max(source.shape.dcp, reader.shape.dcp) + tokens
        sources = [source.describe(rank, room) for rank in range(source.ranks)]
        read = [(rank, reader.describe(rank, room)) for rank in readers]
        plans = [planned(sources, own) for _, own in read]
    except PlanRefused as refused:
        return "refused: " + ", ".join(sorted({each.code for each in refused.refusals}))
    except KvferryError as error:
        return f"refused: {error.code}"
    for rank, state in enumerate(sources):
        for _, piece in source.pieces(rank, state, tokens):
            piece.memory[piece.index] = piece.value
    for chosen, (rank, own) in zip(plans, read, strict=True):
        own.memory.fill_(0xEE)
        copied(chosen, sources, own, -(-tokens // chosen.grain) * chosen.grain)
        for name, piece in reader.pieces(rank, own, tokens):
            if not torch.equal(piece.memory[piece.index], piece.value):
                return f"wrong: layer {name} of rank {rank}"
    return "exact"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _why(error: Exception) -> str:
    """The first sentence of what vLLM says."""
    said = " ".join(str(error).split())
    said = said.partition("Value error, ")[2] or said  # pydantic's, around it
    kind = f"{type(error).__name__}: " if isinstance(error, ZeroDivisionError) else ""
    return kind + said.partition(". ")[0].rstrip(".")[:160]


def row(name: str) -> list[str]:
    """The cells of a model, by shape."""
    heads.watch()
    heads.NOTED.clear()
    engine = cache(lambda shape: Engine(name, shape))
    cells = []
    for source, reader in SHAPES.values():
        try:
            cells.append(outcome(engine(source), engine(reader)))
        except NotRun as error:
            cells.append(f"not run: {error}")
    return cells


def times(name: str) -> list[str]:
    """Milliseconds of a core that `plan` and `bind` take, of the whole model: the longest of the pairs, each the
    fastest of many."""
    heads.NOTED.clear()
    longest = [0.0, 0.0]
    for source, reader in map(SHAPES.__getitem__, TIMED):
        try:
            engine, other = Engine(name, source, whole=True), Engine(name, reader, whole=True)
            sources = [engine.describe(rank, PROMPT) for rank in range(engine.ranks)]
            own = other.describe(0, PROMPT)
            found = planned(sources, own)
        except (NotRun, KvferryError):
            continue
        tables = {i: each.tables for i, each in enumerate(sources)}
        taken = [_best_ms(planned, sources, own), _best_ms(bind, found, tables, own.tables, (0, PROMPT))]
        longest = list(map(max, longest, taken))
    return [f"{each:.2g}" if each else "-" for each in longest]


def _best_ms(call: Any, *arguments: Any) -> float:
    """A core's time, of the fastest: a machine with other work disturbs it least."""
    taken = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call(*arguments)
        taken.append(1000 * (time.thread_time() - start))
    return min(taken)


def row_of(name: str, *, timed: bool) -> str:
    """The row of a model, from a process of its own: it gives its memory back, and vLLM's groups are of one model."""
    run = [sys.executable, __file__, *(["--times"] if timed else []), name]
    return subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


def write(line: str) -> None:
    """Put this row into the page, those of other models as they are."""
    head, rest = PAGE.read_text().split(BEGIN)
    table, tail = rest.split(END)
    rows = {each.split("|")[1].strip(): each for each in [*table.splitlines()[2:], line]}
    ordered = [rows[each] for each in MODELS if each in rows]
    PAGE.write_text(head + BEGIN + "\n".join([*TITLES, *ordered, END]) + tail)


TITLES = [_line(["model", *SHAPES, "plan, ms", "bind, ms"]), "|---" * (len(SHAPES) + 3) + "|"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", help="all, without any")
    parser.add_argument("--times", action="store_true", help="those of plan and bind, too")
    parser.add_argument("--write", action="store_true", help="into docs/models.md, with times")
    parser.add_argument("--stages", type=int, help="of one model with all layers: so many stages to one, and back")
    options = parser.parse_args()
    as_on_gpus()
    torch.set_num_threads(1)  # tensors are small, and threads wait for one another
    if options.stages:
        (name,), shapes = options.models, (Shape(8, pp=options.stages), Shape(8))
        heads.watch()
        many, one = (Engine(name, shape, whole=True) for shape in shapes)
        print(_line([name, outcome(many, one), outcome(one, many)]))
        return
    if len(options.models) == 1 and not options.write:
        (name,) = options.models
        print(_line([name, *row(name), *(times(name) if options.times else [])]))
        return
    for name in options.models or MODELS:
        line = row_of(name, timed=options.times or options.write)
        print(line, flush=True)
        if options.write:
            write(line)


if __name__ == "__main__":
    main()
