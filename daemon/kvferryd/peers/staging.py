"""Staging with a peer: the plan is agreed on at the handshake, so that both ends know what a slot carries."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import structlog

from kvferry.errors import KvferryError
from kvferry.v1 import peer_pb2
from kvferry.wire import manifest_to_proto
from kvferryd.peers.channels import asking
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.plan import Plan
from kvferryd.staging.ahead import prepare_scatter
from kvferryd.staging.arena import Arena, Use
from kvferryd.transport import Agent, Read

log = structlog.get_logger()
COMPILE_S = 20.0
"""What a source may take to compile its kernels, beside the usual time to answer."""
TRIAL_NBYTES = 32 << 20


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


async def stage(peer: PeerEngine, agent: Agent, arena: Arena, timeout_s: float) -> None:
    """Make the first staged transfer from this peer as fast as the next. What fails here is tried again by that one."""
    ranks = [peer.ranks[rank] for rank in peer.plan.reads_from]
    await asyncio.gather(*(_stage(rank, peer.plan, agent, arena, timeout_s) for rank in ranks if rank.staging))
    own = {id: region.span.address for id, region in peer.own.regions.items()}
    await prepare_scatter(arena, peer.plan, own)


async def _stage(rank: PeerRank, plan: Plan, agent: Agent, arena: Arena, timeout_s: float) -> None:
    assert rank.staging is not None
    try:
        await pair(rank, plan, timeout_s + COMPILE_S)
        async with asyncio.timeout(timeout_s):
            rank.staging = replace(rank.staging, bytes_per_s=await _rate(rank, agent, arena))
    except (KvferryError, TimeoutError) as error:
        log.info("not staged yet", engine_id=rank.manifest.engine_id, rank=rank.rank, why=str(error) or "too slow")


async def _rate(rank: PeerRank, agent: Agent, arena: Arena) -> float:
    """Bytes per second of a READ from slot to slot: the second, as the first touches both. Raises TransportError."""
    assert rank.staging is not None
    own, far = arena.span, rank.staging.span
    nbytes = min(TRIAL_NBYTES, arena.slot_nbytes, rank.staging.slot_nbytes)
    slot = await arena.take(Use.READ)
    read: Read | None = None
    try:
        for _ in range(2):
            local, remote = (
                np.array([(address, nbytes, span.device)], dtype=np.uint64)
                for address, span in ((slot.address, own), (far.address, far))
            )
            read = agent.read(rank.agent_name, local, remote, own.memory_type, far.memory_type)
            await read.done
        assert read is not None
        return nbytes / max(1e-6, read.seconds)
    finally:
        arena.give_back(slot, read.quiet if read is not None else None)
