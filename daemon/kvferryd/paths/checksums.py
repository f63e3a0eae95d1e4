"""Checksums end to end: what lies in the destination's blocks is what lies in the source's, while its lease holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvferry.errors import Conflict, KvferryError
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferryd.aio import together
from kvferryd.copy import cut_by_rank, moves
from kvferryd.engine import Engine
from kvferryd.paths.source import SourceReader, bound_to
from kvferryd.peers.contact import asking
from kvferryd.peers.peer import PeerEngine
from kvferryd.staging.share import wanting


async def compare(
    engine: Engine, peer: PeerEngine, readers: Sequence[SourceReader], own: Tables, tokens: tuple[int, int],
    deadline: float,
) -> None:  # fmt: skip
    """Compare the checksums of all that was read: these tokens and the states. deadline: on the loop's clock.

    Raises KvferryError: `checksum_mismatch`, `no_checksum`, or why the lease no longer holds.
    """
    bound = await bound_to(peer.plan, readers, own, tokens)
    by_rank = await asyncio.to_thread(lambda: cut_by_rank(moves(bound), engine.sums.chunk_nbytes))

    async def of_rank(reader: SourceReader) -> None:
        if not (chunks := by_rank.get(reader.source.rank)):
            return
        wanted = wanting(own, tokens, states=True, chunk_nbytes=engine.sums.chunk_nbytes, chunks=chunks)
        wanted.request_id, wanted.word, wanted.version = reader.read.request_id, reader.lease.word, reader.lease.version
        theirs, ours = await asyncio.gather(
            _theirs(reader, peer, wanted, deadline),
            engine.sums.of(lambda: chunks, lambda chunk, at: chunk.collect(engine.addresses, at)),
        )
        if theirs != ours:
            wrong = sum(one != other for one, other in zip(theirs, ours, strict=False)) or 1
            why = f"{wrong} of {len(ours)} checksums differ from those of source rank {reader.source.rank}"
            remedy = "prefill the request again; if it comes again, look at both hosts' memory and network"
            raise Conflict("checksum_mismatch", why, field="request_id", value=reader.read.request_id, remedy=remedy)

    await together(of_rank(reader) for reader in readers)


async def _theirs(reader: SourceReader, peer: PeerEngine, wanted: peer_pb2.PackOpen, deadline: float) -> list[int]:
    source = reader.source
    loop = asyncio.get_running_loop()
    while True:
        wanted.pairing = await peer.pair(source, max(0.0, deadline - loop.time()), wanted.pairing)
        asked = peer_pb2.SumRequest(engine_id=peer.engine_id, epoch=peer.epoch, wanted=wanted, wide=True)
        try:
            async with asking(source.channel.contact):
                reply = await source.stub.Sum(asked, timeout=max(0.0, deadline - loop.time()))
                if reply.sums:
                    why, remedy = "the source makes CRC-32s, and this reader no more", "upgrade the source's daemon"
                    raise Conflict("no_checksum", why, field="wide", value=source.rank, remedy=remedy)
                return list(reply.wide)
        except KvferryError as error:
            if error.code != "unknown_pairing":
                raise
