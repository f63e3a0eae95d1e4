"""The roster of an engine as one of its ranks knows it: the daemons of all ranks, and the key that they show."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time

from kvferry.errors import Unavailable
from kvferry.protocol.roster_events import Members
from kvferry.protocol.session_events import Rank


class Membership:
    """Kept by `kvferryd.peers.roster`."""

    def __init__(self, rank: Rank, members: Members) -> None:
        """members: those that are known from the start, this rank's own daemon among them."""
        self.rank, self.members = rank, members
        self.others = tuple(other for other in range(rank.world_size) if other != rank.rank)
        """Its other ranks, whether they have joined or not."""
        self.draining: tuple[int, ...] = ()
        """Other ranks whose daemons take no new transfers."""
        self.key = secrets.token_bytes(32)
        """Known to the daemons of its ranks only: to this one alone until it has joined."""
        self.unseeded = ""
        """Why the seed of the roster does not answer; empty while it does."""
        self.gone: dict[int, str] = {}
        """The address of each rank that has left, and until when it was there, in words."""
        self._changed = asyncio.Event()

    def know(self, members: Members) -> None:
        left = {rank: member for rank, member in self.members.items() if rank not in members}
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self.gone = {rank: was for rank, was in self.gone.items() if rank not in members}
        self.gone |= {rank: f"{member.address} until {now}" for rank, member in left.items()}
        self.members, self.unseeded = members, ""
        self.draining = tuple(rank for rank in self.others if rank in members and members[rank].draining)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return [rank for rank in range(self.rank.world_size) if rank not in self.members]

    @property
    def addresses(self) -> dict[int, str]:
        """The daemon of each rank that has joined."""
        return {rank: member.address for rank, member in self.members.items()}

    @property
    def other_addresses(self) -> dict[int, str]:
        """The daemon of each other rank that has joined."""
        return {rank: self.members[rank].address for rank in self.others if rank in self.members}

    def address(self, rank: int) -> str | None:
        """The daemon of a rank; None where it has not joined."""
        return self.members[rank].address if rank in self.members else None

    def instance(self, rank: int) -> str | None:
        """The start of a rank's daemon; None where it has not joined."""
        return self.members[rank].instance if rank in self.members else None

    async def until_whole(self, timeout_s: float) -> None:
        """Wait until all ranks are known. Raises KvferryError (`roster_incomplete`)."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.missing:
                    await self._changed.wait()
        except TimeoutError:
            name = self.rank.engine_id
            raise Unavailable(
                "roster_incomplete", f"ranks {self.missing} of engine {name} have not joined", field="engine_id",
                value=name, remedy="start their daemons with the same roster",
            ) from None  # fmt: skip

    def has(self, key: bytes) -> bool:
        """Whether `key` is this roster's: a message that shows it is from another rank."""
        return hmac.compare_digest(self.key, key)
