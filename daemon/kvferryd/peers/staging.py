"""Staging with a peer: the plan is agreed on at the handshake, so that both ends know what a slot carries."""

from __future__ import annotations

import asyncio

import structlog

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2
from kvferry.wire import manifest_to_proto
from kvferryd.peers.channels import asking
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.plan import Plan
from kvferryd.staging.arena import Arena
from kvferryd.staging.share import prepare_scatter

log = structlog.get_logger()
COMPILE_S = 20.0
"""What a source may take to compile its kernels, beside the usual time to answer."""


async def pair(rank: PeerRank, plan: Plan, timeout_s: float) -> None:
    """Have the source plan as we did, once; it answers with a name for it. Raises KvferryError."""
    request = peer_pb2.PairRequest(
        engine_id=rank.manifest.engine_id,
        epoch=rank.manifest.epoch,
        sources=[manifest_to_proto(source) for source in plan.sources.values()],
        destination=manifest_to_proto(plan.destination),
    )
    async with asking(rank.address):
        rank.pairing = (await rank.stub.Pair(request, timeout=timeout_s)).pairing


async def stage(peer: PeerEngine, arena: Arena, timeout_s: float) -> None:
    """Make the first staged transfer from this peer as fast as the next. What fails here is tried again by that one."""
    ranks = [peer.ranks[rank] for rank in peer.plan.reads_from]
    await asyncio.gather(*(_stage(rank, peer.plan, timeout_s) for rank in ranks if rank.staging))
    await prepare_scatter(arena, peer.plan, peer.own.addresses)


async def _stage(rank: PeerRank, plan: Plan, timeout_s: float) -> None:
    try:
        await pair(rank, plan, timeout_s + COMPILE_S)
    except KvferryError as error:
        log.info("not staged yet", engine_id=rank.manifest.engine_id, rank=rank.rank, why=str(error))
