"""One source rank as one transfer reads it: the lease as the source told it, and the proof that it held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from kvferry.errors import Conflict, KvferryError
from kvferry.tables import Tables
from kvferry.v1 import peer_pb2
from kvferry.wire import problem_from_proto, tables_from_proto
from kvferryd.peers.peer import PeerEngine, PeerRank
from kvferryd.peers.reader_stream import Outbox, ReaderStream
from kvferryd.transport import Agent

OPEN_AFTER_S = 0.02
"""How long a reader goes by an announcement before it opens the lease, so that the lease does not expire under a long
read. A short read is over by then, and costs its source one message."""


class Gathering(Protocol):
    """What the source gathers for this reading at the moment: paths.chunk_stream."""

    def on_reply(self, reply: peer_pb2.PackReply) -> None: ...

    def fail(self, why: KvferryError) -> None: ...


class SourceReader:
    """The lease of one request on one source rank. `advance` opens it; `close` it at the end.

    The source may have announced the lease. Then the first `advance` goes by the announcement at once. The lease is
    opened beside reading, with the first message that there is or after OPEN_AFTER_S; the source answers only if it
    holds something else by now.
    """

    def __init__(self, source: PeerRank, request_id: str, digest: bytes) -> None:
        """digest: what the lease must have been published with; empty is not checked."""
        self.source, self.request_id, self._digest = source, request_id, digest
        self.tables: Tables = {}
        self.num_tokens = 0
        self.more = True
        self.metadata = b""
        self.version = 0
        self.announced = False
        """It goes by an announcement, which the source has not confirmed."""
        self._word = (0, 0)
        self._updates: asyncio.Queue[peer_pb2.LeaseUpdate | KvferryError] = asyncio.Queue()
        self._number = 0
        self._stream: ReaderStream | None = None
        self._opening: asyncio.TimerHandle | None = None
        """The lease goes by an announcement and is not open yet."""
        self._gathering: Gathering | None = None
        self._gatherings = 0

    async def advance(self) -> None:
        """Take the source's next update: the first time its lease, later more tokens. The caller bounds the wait.

        Raises KvferryError: the source's reason, `other_prompt`, `peer_lost`.
        """
        if self._stream is None and self._opening is None:
            update = self.source.stream.announced(self.request_id)
            if update is not None:
                self.announced = True
                self._opening = asyncio.get_running_loop().call_later(OPEN_AFTER_S, self._open_announced)
                self._apply(update)
                return
            self._open(peer_pb2.LeaseOpen())
        self._apply(await self._next())

    async def ask_again(self) -> None:
        """Go by the source's own answer instead of an announcement. The caller bounds the wait."""
        if self.announced:
            self.announced = False
            if self._updates.empty():
                self.close(complete=False)
                self._open(peer_pb2.LeaseOpen())
            self._apply(await self._next())

    def _open_announced(self) -> None:
        self._open(peer_pb2.LeaseOpen(known_word=self._word[1], known_version=self.version))

    def _open(self, opening: peer_pb2.LeaseOpen) -> None:
        stream = self._follow()
        opening.reading, opening.request_id = self._number, self.request_id
        stream.send(peer_pb2.ReadRequest(open=opening))

    def _follow(self) -> ReaderStream:
        """Take a number on the stream: replies come here from now on."""
        self._open_no_more()
        self._stream = self.source.stream
        self._number = self._stream.follow(self)
        return self._stream

    def _open_no_more(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    async def _next(self) -> peer_pb2.LeaseUpdate:
        update = await self._updates.get()
        if isinstance(update, KvferryError):
            raise update
        return update

    def _apply(self, update: peer_pb2.LeaseUpdate) -> None:
        if self._digest and update.digest != self._digest:
            raise Conflict(
                "other_prompt",
                f"request {self.request_id} was published for another prompt than the one it is to be read for"
                if update.digest
                else f"request {self.request_id} was published without a digest of its prompt",
                field="digest",
                value=update.digest.hex(),
                remedy="hand kv_transfer_params on with the prompt that they were made for",
            )
        self.tables, self.num_tokens = tables_from_proto(update.tables, "source tables"), update.num_tokens
        self.more, self.metadata = update.more, update.metadata
        self._word = (update.word_address, update.word)
        self.version = update.version

    # ---- what is gathered for it ----

    def gather(self, gathering: Gathering, opening: peer_pb2.PackOpen) -> int:
        """Replies go to `gathering` from now on, under the number returned. Completes the opening: the lease is to be
        gathered as it was told last. Raises KvferryError when the stream is over."""
        opening.word, opening.version = self._word[1], self.version
        if self._opening is not None:
            self._follow()
            opening.request_id = self.request_id
        assert self._stream is not None
        self._stream.check()
        self._gathering = gathering
        self._gatherings += 1
        return self._gatherings

    @property
    def number(self) -> int:
        """Of this reading on its stream."""
        return self._number

    def send(self, outbox: Outbox) -> None:
        assert self._stream is not None
        self._stream.send(outbox)

    # ---- replies ----

    def on_reply(self, reply: peer_pb2.ReadReply) -> None:
        if reply.HasField("update"):
            self._updates.put_nowait(reply.update)
        elif reply.HasField("problem"):
            self.on_lost(problem_from_proto(reply.problem))
        elif self._gathering is not None:
            if not reply.pack.HasField("problem"):
                self.announced = False  # the source gathers the lease as it was announced
            self._gathering.on_reply(reply.pack)

    def on_lost(self, why: KvferryError) -> None:
        self._updates.put_nowait(why)
        if self._gathering is not None:
            self._gathering.fail(why)

    # ---- the end ----

    async def verify(self, agent: Agent) -> None:
        """The lease held while its blocks were read: its validity word is whole. Raises KvferryError (`torn`)."""
        address, word = self._word
        if await agent.peek(self.source.agent_name, address) != word:
            raise Conflict(
                "torn",
                f"the lease of request {self.request_id} did not hold while it was read",
                field="request_id",
                value=self.request_id,
                remedy="prefill the request again",
            )

    def close(self, *, complete: bool) -> None:
        """The reading is over. complete: all that was wanted has been read, or there was nothing to read."""
        self._open_no_more()
        if self._stream is not None:
            self._stream.close_reading(self.request_id, complete=complete, number=self._number)
        elif complete:
            self.source.stream.close_reading(self.request_id, complete=True, word=self._word[1])


def readers_of(peer: PeerEngine, request_id: str, digest: bytes) -> tuple[list[SourceReader], list[SourceReader]]:
    """(the ranks that are read, the others). At least one is read: it has the metadata and the verdict."""
    read = peer.plan.reads_from or (min(peer.ranks),)
    every = {rank: SourceReader(peer.ranks[rank], request_id, digest) for rank in sorted(peer.ranks)}
    return [every[rank] for rank in read], [reader for rank, reader in every.items() if rank not in read]


def close_all(readers: Iterable[SourceReader], *, complete: bool) -> None:
    for reader in readers:
        reader.close(complete=complete)
