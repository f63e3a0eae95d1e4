"""Hypothesis strategies: pairs of engines that hold the same model in any two ways, with tables and a token range.

A model is drawn first (its components as logical arrays), then each engine decides for itself how to spread and
group those arrays over ranks and blocks; `layouts.py` decides where their bytes lie. Everything stays small: what
matters is the combination. `tried` says how often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caches import array, cache
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from layouts import Draw, Group, Part, Span, lay_out

from kvferry.manifest import Manifest
from kvferry.tables import BlockTable

BLOCK_SIZES = (1, 2, 3, 4, 5, 8)
SHAPES = ((1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (3, 2, 1), (1, 2, 1), (1, 1, 2), (1, 1, 3),
          (2, 1, 2), (1, 2, 2), (2, 1, 3))  # fmt: skip
"""Ranks of tensor, pipeline and context parallelism."""


def tried(times: int) -> settings:
    """So many examples, others each time."""
    return settings(
        max_examples=times, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )


@dataclass(frozen=True)
class Case:
    sources: tuple[Manifest, ...]
    source_tables: dict[int, dict[str, BlockTable]]
    destination: Manifest
    destination_tables: dict[str, BlockTable]
    tokens: Span


@dataclass(frozen=True)
class Engine:
    name: str
    tp: int
    pp: int
    cp: int
    interleave: int
    stages: dict[int, int]
    """Pipeline stage by layer."""
    spans: dict[tuple[str, int], list[Span]]
    """The spans that each tensor-parallel rank holds of a global axis, by (name, total)."""
    groups: list[Group]
    regions: int
    overlay: bool
    """Paged groups share their memory and take different blocks of it."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp


@st.composite
def cases(draw: Draw) -> Case:
    last = draw(st.integers(0, 14))
    tokens = (draw(st.integers(0, last)), last)
    parts = draw_model(draw)
    prefill, decode = draw_engine(draw, "prefill", parts), draw_engine(draw, "decode", parts)
    sources = [draw_rank(draw, prefill, rank, tokens, source_table) for rank in range(prefill.world_size)]
    chosen = draw(st.integers(0, decode.world_size - 1))
    destination, destination_tables = draw_rank(draw, decode, chosen, tokens, destination_table)
    return Case(
        tuple(draw(st.permutations([manifest for manifest, _ in sources]))),
        {manifest.rank: tables for manifest, tables in sources},
        destination,
        destination_tables,
        tokens,
    )


HELD = {
    "order": st.sampled_from(["block slot head dim", "block head slot dim", "slot block head dim"]),
    "pad": st.sampled_from([0, 0, 1]),
    "slot": st.sampled_from([1, 2, 4]),
    "block": st.sampled_from([24, 25]),
    "heads": st.sampled_from([[(0, 4)], [(0, 2), (2, 4)], [(0, 3), (1, 4)], [(1, 4), (0, 3)]]),
    "token_ranks": st.sampled_from([1, 1, 2, 3]),
    "interleave": st.sampled_from([1, 2, 4]),
    "encoding": st.sampled_from([None, "nvfp4", "nvfp4", "nvfp4"]),
    "whole": st.sampled_from([("slot",), ("slot",), ("head",), ("dim", "head"), ("dim", "slot"), ()]),
}
"""A component as an engine may hold it."""


@st.composite
def whole_cases(draw: Draw) -> Case:
    """A component that may not be divided along some axes. Both engines hold it alike but for a thing or two; most
    token ranges and tables begin and end where blocks do."""
    prefill = {name: draw(held) for name, held in HELD.items()}
    other = draw(
        st.sampled_from([(), (), *((name,) for name in HELD), ("heads", "slot"), ("token_ranks", "interleave")])
    )
    decode = {name: draw(held) if name in other else prefill[name] for name, held in HELD.items()}
    sources, destinations = (
        [raw_rank(held, rank, name) for rank in range(len(held["heads"]) * held["token_ranks"])]
        for held, name in ((prefill, "prefill"), (decode, "decode"))
    )
    destination = draw(st.sampled_from(destinations))
    edges = st.sampled_from([0, 8, 24, draw(st.integers(0, 24))])
    first, last = sorted((draw(edges), draw(edges)))
    firsts = st.sampled_from([0, 0, 0, prefill["slot"], 1])

    def tables(manifest: Manifest, first_token: int) -> dict[str, BlockTable]:
        (group,) = manifest.groups
        held = -(-24 // group.token_shard.size // group.block_size) + group.token_shard.interleave
        return {"full": BlockTable.of(draw(st.permutations(range(24)))[:held], first_token)}

    starts = [draw(firsts)] * len(sources) if draw(st.booleans()) else [0] * len(sources)
    by_rank = {each.rank: tables(each, start) for each, start in zip(sources, starts, strict=True)}
    return Case(tuple(sources), by_rank, destination, tables(destination, draw(firsts)), (first, last))


def raw_rank(held: dict[str, Any], rank: int, engine: str) -> Manifest:
    token_rank, of_heads = divmod(rank, len(held["heads"]))
    start, stop = held["heads"][of_heads]
    component = array(
        order=held["order"], pad=held["pad"], block=held["block"], slot=held["slot"], head=stop - start, dim=2,
        dtype="uint8", shard=("head", start, 4), encoding=held["encoding"], whole=held["whole"],
    )  # fmt: skip
    token_shard = (token_rank, held["token_ranks"], held["interleave"])
    of = len(held["heads"]) * held["token_ranks"]
    return cache(component, engine=engine, rank=rank, of=of, token_shard=token_shard)


def draw_model(draw: Draw) -> list[Part]:
    layers = [*range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        layers.append(100)  # a draft model's layer
    return [part for layer in layers for part in draw_layer(draw, layer)]


def draw_layer(draw: Draw, layer: int) -> list[Part]:
    family = draw(st.sampled_from(["attention", "attention", "attention", "mla", "state"]))
    if family == "mla":
        latent = Part(layer, "kv", "bfloat16", (("dim", draw(st.sampled_from([2, 3]))),))
        return [
            latent,
            *draw(st.sampled_from([[], [Part(layer, "indexer", "float8_e5m2", (("dim", 5),), encoding="fp8_e5m2")]])),
        ]
    if family == "state":
        channels, groups = draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([1, 2]))
        return [
            Part(layer, "conv.x", "bfloat16", (("chan", channels), ("row", 3)), "chan", "state"),
            Part(layer, "conv.b", "bfloat16", (("group", groups), ("state", 2), ("row", 3)), "group", "state"),
            Part(layer, "ssm", "float32", (("chan", channels), ("state", 2)), "chan", "state"),
        ]
    axes = (("head", draw(st.sampled_from([1, 2, 3, 4, 6]))), ("dim", draw(st.sampled_from([1, 2, 4, 8]))))
    window = draw(st.sampled_from([None, None, 1, 3, 4]))
    dtype = draw(st.sampled_from(["bfloat16", "float8_e4m3fn"]))
    encoding = "fp8_e4m3fn" if dtype == "float8_e4m3fn" else None
    parts = [Part(layer, name, dtype, axes, "head", window=window, encoding=encoding) for name in ("k", "v")]
    if dtype == "float8_e4m3fn":
        parts.append(Part(layer, "k_scale", "float32", axes[:1], "head", window=window))
    return parts


def draw_engine(draw: Draw, name: str, parts: list[Part]) -> Engine:
    tp, pp, cp = draw(st.sampled_from(SHAPES))
    layers = sorted({part.layer for part in parts})
    pp = min(pp, len(layers))
    order = draw(st.permutations(layers))
    stages = {layer: i if i < pp else draw(st.integers(0, pp - 1)) for i, layer in enumerate(order)}
    shared = sorted({axis for part in parts for axis in part.axes if axis[0] == part.sharded})
    return Engine(
        name, tp, pp, cp, draw(st.integers(1, 3)), stages,
        {axis: draw_spans(draw, axis[1], tp) for axis in shared},
        draw_groups(draw, parts, cp), draw(st.integers(1, 3)), draw(st.integers(0, 3)) == 0,
    )  # fmt: skip


def draw_spans(draw: Draw, total: int, ranks: int) -> list[Span]:
    """All of a global axis over the ranks, in unequal, coinciding or overlapping ranges."""
    pieces = draw(st.integers(1, min(total, ranks)))
    cuts = draw(st.permutations(range(1, total)))[: pieces - 1]
    edges = [0, *sorted(cuts), total]
    spans = [(edges[i * pieces // ranks], edges[i * pieces // ranks + 1]) for i in range(ranks)]
    if draw(st.integers(0, 3)) == 0:
        spans = [(max(0, a - draw(st.integers(0, 1))), min(total, b + draw(st.integers(0, 1)))) for a, b in spans]
    return spans


def draw_groups(draw: Draw, parts: list[Part], cp: int) -> list[Group]:
    """Components by kind and window, and divided further as the engine likes; not all of them share tokens.

    An engine may also keep everything of its sliding-window layers.
    """
    split, windows = draw(st.integers(1, 2)), draw(st.booleans())
    members: dict[tuple[str, int | None, int], list[Part]] = {}
    for part in parts:
        window = part.window if windows else None
        members.setdefault((part.kind, window, draw(st.integers(0, split - 1))), []).append(part)
    return [
        Group(
            name=f"g{i}",
            kind=kind,
            window=window,
            block_size=1 if kind == "state" else draw(st.sampled_from(BLOCK_SIZES)),
            parts=tuple(draw(st.permutations(found))),
            style=draw(st.sampled_from(["apart", "together", "page"])),
            mixed_radix=draw(st.booleans()),
            token_ranks=cp if kind == "paged" and draw(st.integers(0, 3)) else 1,
            start=draw(st.integers(0, 4)),
        )
        for i, ((kind, window, _), found) in enumerate(draw(st.permutations(list(members.items()))))
    ]


def source_table(draw: Draw, group: Group, owned: list[int], tokens: Span) -> tuple[int, int]:
    """(first_token, blocks): all that may be read, and often more. `owned`: the tokens of this rank, ascending."""
    first, last = tokens
    needed = first if group.window is None else max(first, last - group.window + 1)
    before, held = sum(token < needed for token in owned), sum(token < last for token in owned)
    start = (0, 0, before, before // group.block_size * group.block_size, before // 2)[group.start]
    return start, blocks_of(group, held - start, draw(st.integers(0, 1)))


def destination_table(draw: Draw, group: Group, owned: list[int], tokens: Span) -> tuple[int, int]:
    """(first_token, blocks): none where all is cached, else up to the range's end; it may start anywhere."""
    first, last = tokens
    before, held = sum(token < first for token in owned), sum(token < last for token in owned)
    start = (0, 0, before, before // group.block_size * group.block_size, (before + held) // 2)[group.start]
    cached = draw(st.integers(0, 4)) == 0
    return start, 0 if cached else blocks_of(group, held - start, draw(st.integers(0, 1)))


def blocks_of(group: Group, tokens: int, spare: int) -> int:
    return -(-max(tokens, 0) // group.block_size) + spare


def draw_rank(draw: Draw, engine: Engine, rank: int, tokens: Span, table) -> tuple[Manifest, dict[str, BlockTable]]:
    rest, tp = divmod(rank, engine.tp)
    pp, cp = divmod(rest, engine.cp)
    mine = [group.of(engine.stages, pp) for group in engine.groups]
    groups = [group for group in mine if group.parts]
    shards = {
        g.name: {"rank": cp % g.token_ranks, "size": g.token_ranks, "interleave": engine.interleave} for g in groups
    }
    wanted = {}
    for group in groups:
        shard = shards[group.name]
        owned = [t for t in range(tokens[1]) if (t // shard["interleave"]) % shard["size"] == shard["rank"]]
        state = (0, 1 if table is source_table else draw(st.sampled_from([1, 1, 1, 0])))
        wanted[group.name] = state if group.kind == "state" else table(draw, group, owned, tokens)

    paged = sum(wanted[group.name][1] for group in groups if group.kind == "paged")
    num_blocks = {
        g.name: (paged if engine.overlay and g.kind == "paged" else wanted[g.name][1]) + draw(st.integers(0, 2)) or 1
        for g in groups
    }
    if engine.overlay:
        most = max((num_blocks[group.name] for group in groups if group.kind == "paged"), default=0)
        num_blocks |= {group.name: most for group in groups if group.kind == "paged"}
    spans = {axis: held[tp] for axis, held in engine.spans.items()}
    regions, components = lay_out(draw, groups, num_blocks, spans, engine.regions, engine.overlay)
    manifest = Manifest.from_dict({
        "engine_id": engine.name, "epoch": "1", "model": {"name": "m", "fingerprint": "f"}, "rank": rank,
        "world_size": engine.world_size, "regions": regions, "components": components,
        "groups": [
            {
                "name": g.name, "kind": g.kind, "block_size": g.block_size, "num_blocks": num_blocks[g.name],
                "window": g.window, "token_shard": shards[g.name] if g.kind == "paged" else {},
            }
            for g in groups
        ],
    })  # fmt: skip

    tables, free = {}, {}
    for group in groups:
        together = engine.overlay and group.kind == "paged"
        pool = free.setdefault("overlay" if together else group.name, draw_ids(draw, num_blocks[group.name]))
        first_token, count = wanted[group.name]
        tables[group.name] = BlockTable.of([pool.pop(0) for _ in range(count)], first_token)
    return manifest, tables


def draw_ids(draw: Draw, count: int) -> list[int]:
    """Blocks in the order in which an allocator hands them out: in a row or in any order."""
    return [*range(count)] if draw(st.booleans()) else draw(st.permutations(range(count)))
