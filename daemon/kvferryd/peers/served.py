"""The source's half of a transfer: what its daemons know of the lease, asked when somebody looks at the request."""

from __future__ import annotations

import asyncio

from kvferry.errors import KvferryError, PeerFailed
from kvferry.schemas import ErrorBody, LeaseRecord, SourceRank
from kvferry.v1 import peer_pb2
from kvferryd.peers.contact import asking
from kvferryd.peers.peer import PeerEngine, PeerRank

ANSWER_S = 2.0
"""Somebody looks meanwhile, and a page gives up after 5 s."""
MOST = 1 << 20
"""Bytes of a record: that of a lease with its readers has some thousands."""


async def served(peer: PeerEngine, request_id: str, lease: int, timeout_s: float) -> list[SourceRank]:
    """The answers of all ranks, each of which is waited for `timeout_s` at most, and never longer than ANSWER_S."""
    ranks = [peer.ranks[number] for number in sorted(peer.ranks)]
    return await asyncio.gather(*(_served(rank, request_id, lease, min(timeout_s, ANSWER_S)) for rank in ranks))


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
        if len(reply.record) > MOST:
            raise ValueError
        return LeaseRecord.model_validate_json(reply.record)
    except ValueError:  # pydantic's is one
        why, remedy = f"{address} answered with what is no record of a lease", "run one version on both sides"
        raise PeerFailed("peer_failed", why, field="address", value=address, remedy=remedy) from None
