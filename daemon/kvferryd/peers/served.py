"""The source's half of a transfer: what its daemons know of the lease, asked when somebody looks at the request."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from kvferry.errors import KvferryError, PeerFailed
from kvferry.schemas import ErrorBody, LeaseRecord, SourceRank
from kvferry.v1 import peer_pb2
from kvferryd.peers.contact import asking
from kvferryd.peers.peer import PeerEngine, PeerRank


async def served(peer: PeerEngine, request_id: str, lease: int, timeout_s: float) -> list[SourceRank]:
    """The answers of all ranks, each of which is waited for `timeout_s` at most."""
    ranks = [peer.ranks[number] for number in sorted(peer.ranks)]
    return await asyncio.gather(*(_served(rank, request_id, lease, timeout_s) for rank in ranks))


async def _served(rank: PeerRank, request_id: str, lease: int, timeout_s: float) -> SourceRank:
    opening = rank.opening
    request = peer_pb2.ServedRequest(
        engine_id=opening.engine_id, epoch=opening.epoch, request_id=request_id, lease=lease, reader=opening.reader
    )
    try:
        async with asking(rank.channel.contact):
            reply = await rank.stub.Served(request, timeout=timeout_s)
        return SourceRank(rank=rank.rank, address=rank.address, lease=_record(reply, rank.address))
    except KvferryError as error:
        return SourceRank(rank=rank.rank, address=rank.address, error=ErrorBody.of(error))


def _record(reply: peer_pb2.ServedReply, address: str) -> LeaseRecord:
    try:
        return LeaseRecord.model_validate_json(reply.record)
    except ValidationError:
        why, remedy = f"{address} answered with what is no record of a lease", "run one version on both sides"
        raise PeerFailed("peer_failed", why, field="address", value=address, remedy=remedy) from None
