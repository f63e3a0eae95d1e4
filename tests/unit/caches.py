"""Small manifests in few words, for tests that want to be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oracle import Run, verify

from kvferry.manifest import BLOCK, ITEMSIZE, SLOT, Manifest
from kvferry.tables import BlockTable
from kvferryd.plan import Bound, bind, plan

NHD, HND = "block slot head dim", "block head slot dim"


def array(
    name: str = "k", layer: int = 0, *, group: str = "full", order: str = NHD, dtype: str = "bfloat16",
    region: int = 0, offset: int | None = None, pad: int = 0, shard: tuple[str, int, int] | None = None,
    encoding: str | None = None, whole: Sequence[str] = (), **extents: int | tuple[int, ...],
) -> dict[str, Any]:  # fmt: skip
    """A component. `order`: its axes as they lie in memory, outermost first, with `pad` bytes between positions; a name
    that occurs twice takes its extents, outer first, from a tuple. `offset` None: after the one before."""
    rest = {name: list(e) if isinstance(e, tuple) else [e] for name, e in extents.items()}
    axes = [{"name": axis, "extent": rest[axis].pop(0), "stride": 0} for axis in order.split()]
    span = ITEMSIZE[dtype]
    for axis in reversed(axes):
        axis["stride"], span = span + pad, span + pad + (axis["extent"] - 1) * (span + pad)
    return {
        "group": group, "layer": layer, "name": name, "dtype": dtype, "region": region, "offset": offset, "axes": axes,
        "shard": shard and dict(zip(("axis", "start", "total"), shard, strict=True)),
        "encoding": encoding, "whole": tuple(whole),
    }  # fmt: skip


def cache(
    *arrays: dict[str, Any], engine: str = "prefill", rank: int = 0, of: int = 1, fingerprint: str = "f",
    windows: dict[str, int] | None = None, token_shard: tuple[int, int, int] | None = None,
) -> Manifest:  # fmt: skip
    """One rank. Groups and region sizes follow from the arrays; `token_shard`: (rank, size, interleave)."""
    ends: dict[int, int] = {}
    groups: dict[str, dict[str, Any]] = {}
    components = []
    for entry in arrays:
        span = sum((axis["extent"] - 1) * axis["stride"] for axis in entry["axes"]) + ITEMSIZE[entry["dtype"]]
        offset = ends.get(entry["region"], 0) if entry["offset"] is None else entry["offset"]
        ends[entry["region"]] = max(ends.get(entry["region"], 0), offset + span)
        components.append(entry | {"offset": offset})
        names = {axis["name"] for axis in entry["axes"]}
        group = groups.setdefault(
            entry["group"], {"name": entry["group"], "kind": "paged" if SLOT in names else "state"}
        )
        group["num_blocks"], group["block_size"] = _extent(entry, BLOCK), _extent(entry, SLOT)
        group["window"] = (windows or {}).get(entry["group"])
        if token_shard and SLOT in names:
            group["token_shard"] = dict(zip(("rank", "size", "interleave"), token_shard, strict=True))
    return Manifest.from_dict({
        "engine_id": engine, "epoch": f"{engine}-1", "model": {"name": "m", "fingerprint": fingerprint}, "rank": rank,
        "world_size": of, "regions": [{"id": i, "kind": "host", "nbytes": end} for i, end in ends.items()],
        "groups": list(groups.values()), "components": components,
    })  # fmt: skip


def _extent(entry: dict[str, Any], name: str) -> int:
    product = 1
    for axis in entry["axes"]:
        product *= axis["extent"] if axis["name"] == name else 1
    return product


def attention(
    heads: int = 2, *, layers: Sequence[int] = (0,), start: int = 0, total: int | None = None, slot: int = 4,
    dim: int = 2, block: int = 8, **more: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """K and V of `layers` with heads [start, start + heads) of `total`."""
    shard = ("head", start, total or heads)
    return [
        array(name, layer, shard=shard, block=block, slot=slot, head=heads, dim=dim, **more)
        for layer in layers
        for name in ("k", "v")
    ]


def table(*block_ids: int, first_token: int = 0) -> BlockTable:
    return BlockTable.of(block_ids, first_token)


def as_tuples(bound: Bound) -> list[Run]:
    return [
        (runs.source_rank, runs.source_region, source, runs.destination_region, destination, nbytes)
        for runs in bound.runs()
        for source, destination, nbytes in zip(
            runs.source_offsets.tolist(), runs.destination_offsets.tolist(), runs.nbytes.tolist(), strict=True
        )
    ]


def move(
    sources: Manifest | Sequence[Manifest], source_tables: dict[Any, Any], destination: Manifest,
    destination_tables: dict[str, BlockTable], tokens: tuple[int, int],
) -> list[Run]:  # fmt: skip
    """Plan, bind, and hold the runs against the oracle. `source_tables`: by rank, or by group for all ranks alike."""
    sources = [sources] if isinstance(sources, Manifest) else sources
    by_rank = all(isinstance(key, int) for key in source_tables)
    tables = source_tables if by_rank else {source.rank: source_tables for source in sources}
    bound = bind(plan(sources, destination), tables, destination_tables, tokens)
    runs = as_tuples(bound)
    verify(sources, tables, destination, destination_tables, tokens, runs)
    assert bound.nbytes == sum(run[5] for run in runs)
    assert bound.run_count >= len(runs), "only those of different rows are joined after they were counted"
    return runs
