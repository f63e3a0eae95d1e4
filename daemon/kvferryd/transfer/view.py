"""A reader's view of one source rank's lease: an open stream, and what it said last."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.errors import KvferryError
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferry.wire import tables_from_proto
from kvferryd.peers.lease_stream import Reading
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.transport import Agent


class LeaseView:
    """Opened with the first `advance`, unless the source has announced the lease; `close` it."""

    def __init__(self, source: PeerRank, request_id: str) -> None:
        self.source, self._request_id = source, request_id
        self.tables: Tables = {}
        self.num_tokens = 0
        self.more = True
        self.metadata = b""
        self.digest = b""
        self.version = 0
        self.sealed = False
        """Something was read from the blocks themselves: only the seal can say that they held."""
        self.packed = False
        """Everything was packed while the lease held, and the source counts us as a reader that is through."""
        self._seal = (0, 0)
        self._reading: Reading | None = None
        self.announced = False
        """It goes by an announcement, which the source has not confirmed."""

    async def advance(self) -> None:
        """The next thing the source says: the first time its lease, later more tokens. The caller bounds the wait."""
        if self._reading is None:
            announced = self.source.leases.announced(self._request_id)
            if announced is not None:
                self.announced = True
                self._apply(announced)
                return
            self._reading = self.source.leases.open(self._request_id)
        self._apply(await self._reading.update())

    async def confirm(self) -> None:
        """Go by the source's own answer, if this goes by an announcement so far. The caller bounds the wait."""
        if self.announced:
            if self._reading is None or not self._reading.updated:
                self.close(complete=False)
                self._reading = self.source.leases.open(self._request_id)
            self._apply(await self._reading.update())
            self.announced = False

    def _apply(self, update: peer_pb2.LeaseUpdate) -> None:
        self.tables, self.num_tokens = tables_from_proto(update.tables, "source tables"), update.num_tokens
        self.more, self.metadata = update.more, update.metadata
        self._seal = (update.seal_address, update.seal)
        self.version = update.version
        self.digest = update.digest

    def check(self, expected: bytes) -> None:
        """Raises KvferryError (`other_prompt`) when the lease is not of what the engine expects."""
        if expected and expected != self.digest:
            raise KvferryError(
                "other_prompt",
                f"request {self._request_id} was published for another prompt",
                field="digest",
                value=self.digest.hex(),
                remedy="send kv_transfer_params with the prompt that was prefilled",
            )

    def packing(self, opening: peer_pb2.PackOpen) -> Reading:
        """Complete the opening of a packing: what is to be packed is the lease as it was told last. An announced lease
        is opened with it; its source answers with an update only if it holds something else by now."""
        opening.seal, opening.version = self._seal[1], self.version
        if self._reading is None:
            self._reading = self.source.leases.open_packed(self._request_id)
            opening.request_id = self._request_id
        return self._reading

    def agreed(self) -> None:
        """The source has answered a packing: an announcement that it has not replaced before is what holds."""
        if self._reading is not None and not self._reading.updated:
            self.announced = False

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

    def close(self, *, complete: bool) -> None:
        """The reading is over; `complete`: nothing is missing, nor was there anything to read where it never began."""
        if self._reading is not None:
            self._reading.close(complete=complete)
        elif complete:
            self.source.leases.through(self._request_id)


def views(peer: PeerEngine, request_id: str) -> tuple[list[LeaseView], list[LeaseView]]:
    """(of the ranks that are read, of the others). At least one is read: it has the metadata and the verdict."""
    read = peer.plan.reads_from or (min(peer.ranks),)
    every = {rank: LeaseView(peer.ranks[rank], request_id) for rank in sorted(peer.ranks)}
    return [every[rank] for rank in read], [view for rank, view in every.items() if rank not in read]


def close_all(every: Iterable[LeaseView]) -> None:
    """All that was wanted has been read."""
    for view in every:
        view.close(complete=True)


def give_up(every: Iterable[LeaseView]) -> None:
    for view in every:
        view.close(complete=False)
