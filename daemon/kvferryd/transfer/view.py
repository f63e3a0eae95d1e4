"""A reader's view of one source rank's lease: an open stream, and what it said last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import grpc

from kvferry.errors import KvferryError
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferry.wire import tables_from_proto
from kvferryd.peers.channels import asking
from kvferryd.peers.peers import PeerEngine, PeerRank
from kvferryd.transport import Agent


class LeaseView:
    """Opened with the first `advance`; the open stream keeps the lease alive. Ends with `close` or `cancel`."""

    def __init__(self, source: PeerRank, request_id: str, reader: peer_pb2.Reader) -> None:
        self.source, self._request_id, self._reader = source, request_id, reader
        self.tables: Tables = {}
        self.num_tokens = 0
        self.more = True
        self.metadata = b""
        self.version = 0
        self.sealed = False
        """Something was read from the blocks themselves: only the seal can say that they held."""
        self.packed = False
        """Everything was packed while the lease held, and the source counts us as a reader that is through."""
        self._secret = ""
        self._seal = (0, 0)
        self._stream: grpc.aio.UnaryStreamCall[peer_pb2.OpenRequest, peer_pb2.LeaseUpdate] | None = None

    async def advance(self) -> None:
        """The next thing the source says: the first time its lease, later more tokens. The caller bounds the wait."""
        if self._stream is None:
            manifest = self.source.manifest
            self._stream = self.source.stub.Open(
                peer_pb2.OpenRequest(
                    engine_id=manifest.engine_id, epoch=manifest.epoch, request_id=self._request_id, reader=self._reader
                )
            )
        async with asking(self.source.address):
            update = await self._stream.read()
        if not isinstance(update, peer_pb2.LeaseUpdate):
            raise KvferryError("lease_ended", f"peer {self.source.address} ended the lease of {self._request_id}")
        self.tables, self.num_tokens = tables_from_proto(update.tables, "source tables"), update.num_tokens
        self.more, self.metadata, self._secret = update.more, update.metadata, update.secret
        self._seal = (update.seal_address, update.seal)
        self.version = update.version

    def packing(self) -> peer_pb2.PackOpen:
        """What proves to the source that this reader may have the lease packed, as it was told last."""
        manifest = self.source.manifest
        return peer_pb2.PackOpen(
            engine_id=manifest.engine_id,
            epoch=manifest.epoch,
            request_id=self._request_id,
            reader=self._reader,
            secret=self._secret,
            version=self.version,
        )

    async def verify(self, agent: Agent) -> None:
        """Whether the lease held while it was read: by its seal, or as all was packed. Raises KvferryError (`torn`)."""
        if self.packed and not self.sealed:
            return
        address, seal = self._seal
        if await agent.peek(self.source.agent_name, address) != seal:
            raise KvferryError(
                "torn",
                f"the lease of request {self._request_id} did not hold while it was read",
                field="request_id",
                value=self._request_id,
                remedy="prefill the request again",
            )

    async def close(self, complete: bool, timeout_s: float) -> None:
        """Tell the source that the reading is over, best effort: a source that does not hear has its ttl."""
        manifest = self.source.manifest
        request = peer_pb2.CloseRequest(
            engine_id=manifest.engine_id,
            epoch=manifest.epoch,
            request_id=self._request_id,
            reader=self._reader,
            secret=self._secret,
            complete=complete,
        )
        with contextlib.suppress(KvferryError):
            async with asking(self.source.address):
                await self.source.stub.Close(request, timeout=timeout_s)
        self.cancel()

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


def views(peer: PeerEngine, request_id: str, reader: peer_pb2.Reader) -> tuple[list[LeaseView], list[LeaseView]]:
    """(of the ranks that are read, of the others). At least one is read: it has the metadata and the verdict."""
    read = peer.plan.reads_from or (min(peer.ranks),)
    every = {rank: LeaseView(peer.ranks[rank], request_id, reader) for rank in sorted(peer.ranks)}
    return [every[rank] for rank in read], [view for rank, view in every.items() if rank not in read]


async def close_all(every: Iterable[LeaseView], complete: bool, timeout_s: float) -> None:
    await asyncio.gather(*(view.close(complete, timeout_s) for view in every))
