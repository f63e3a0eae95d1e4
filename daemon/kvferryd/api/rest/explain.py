"""/v1/explain and /v1/plan: what a transfer between two caches would do, by the same functions that do it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from kvferry.errors import Full, KvferryError, Malformed
from kvferry.manifest import Manifest
from kvferry.schemas import ExplainRequest, ExplainTables, PlanRecord
from kvferry.tables import Tables, tables_from_json
from kvferryd.api.rest.openapi import problems
from kvferryd.api.rest.routes import Name
from kvferryd.ferry import Ferry
from kvferryd.peers.peer import PeerEngine
from kvferryd.plan import plan

AT_ONCE = 2
"""Explanations in work: they take whole seconds of a core where manifests are large."""
MAX_RUNS = 1 << 18
"""In one explanation with tables: every one is listed, and 2^18 of them are some 20 MB of JSON. So many blocks times
components, too, before runs are counted."""


def routes(ferry: Ferry) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["explain"])
    places = asyncio.Semaphore(AT_ONCE)

    def place() -> asyncio.Semaphore:
        if places.locked():
            raise Full("full", f"{AT_ONCE} explanations are under way", remedy="ask again")
        return places

    @router.post("/explain", response_model=dict[str, Any], responses=problems(413, 415, 429))
    async def explain(body: ExplainRequest) -> Response:
        """A summary of the plan or, with tables, every run. A refused pair answers 422 with `refusals`."""
        async with place():
            return Response(await asyncio.to_thread(_explain, body, ferry.config.way), media_type="application/json")

    @router.get("/plan", responses=problems(404, 429))
    async def planned(engine_id: Name, destination: Name | None = None) -> PlanRecord:
        """The plan between a peer engine and ours (`destination`, where there are several)."""
        peer = ferry.peer(engine_id, destination)
        async with place():
            told = await ferry.peers_known.manifests(peer.own)
            return await asyncio.to_thread(_plan, peer, told)

    return router


def _plan(peer: PeerEngine, told: Mapping[int, Manifest | KvferryError]) -> PlanRecord:
    from kvferryd.explain.parts import reads

    own, plans = peer.own, []
    missing = dict.fromkeys(own.roster.missing, "its daemon has not joined")
    for rank, manifest in told.items():
        try:
            if isinstance(manifest, KvferryError):
                raise manifest
            plans.append(plan(list(peer.plan.sources.values()), manifest))
        except KvferryError as error:
            missing[rank] = str(error)
    return PlanRecord(
        source_engine_id=peer.engine_id, source_epoch=peer.epoch, source_world_size=len(peer.ranks),
        engine_id=own.engine_id, epoch=own.epoch, world_size=own.world_size, reads=reads(plans), missing=missing,
    )  # fmt: skip


def _explain(body: ExplainRequest, way: str) -> bytes:
    from kvferryd.explain import explain_json  # pulls in the planner

    sources = [_manifest(source, f"sources.{i}") for i, source in enumerate(body.sources)]
    destination = _manifest(body.destination, "destination")
    tables = _tables(body.tables, sources, destination) if body.tables else None
    explained = explain_json(sources, destination, tables, MAX_RUNS, way=way)
    # Not json.dumps: that makes 20 MB in one go, and whoever else wants the interpreter waits.
    return "".join(json.JSONEncoder().iterencode(explained)).encode()


def _manifest(data: Mapping[str, Any], place: str) -> Manifest:
    try:
        return Manifest.from_dict(data)
    except KvferryError as error:
        error.field = f"{place}.{error.field}"
        raise


def _tables(
    tables: ExplainTables, sources: list[Manifest], destination: Manifest
) -> tuple[dict[int, Tables], Tables, tuple[int, int]]:
    from kvferryd.explain import source_tables_from_json

    held = source_tables_from_json(tables.source, sources, "tables.source")
    wanted = tables_from_json(tables.destination, "tables.destination")
    blocks = sum(len(table.block_ids) for of_rank in (*held.values(), wanted) for table in of_rank.values())
    if blocks * len(destination.components) > MAX_RUNS:
        raise Malformed(
            "too_many_runs", "these tables make more runs than one answer should hold", field="tables", value=blocks,
            remedy="explain fewer blocks, or use the command kvferry explain",
        )  # fmt: skip
    return held, wanted, tables.tokens
