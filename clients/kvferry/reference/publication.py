"""One request's lease on every rank, kept up with what has been computed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from kvferry.digest import prompt_digest
from kvferry.engine import Lease
from kvferry.errors import Conflict
from kvferry.reference.config import EngineConfig, ModelConfig
from kvferry.reference.daemons import Daemons
from kvferry.reference.request import Request
from kvferry.tables import BlockTable


def tables_of(
    request: Request, model: ModelConfig, engine: EngineConfig, *, start: int, stop: int, window_first: int
) -> dict[str, BlockTable]:
    """Block tables for tokens [start, stop), sliding layers from `window_first` on. Both begin at a block.

    Empty tables, not absent ones, for no tokens: nothing is wanted, and the lease is closed all the same.
    """
    end = -(-stop // engine.block_size) if stop > start else 0
    tables = {}
    for group, window in model.groups.items():
        first = start if window is None else max(start, window_first)
        tables[group] = BlockTable.of(request.blocks[first // engine.block_size : end], first)
    return tables


def metadata(request: Request) -> bytes:
    """For the reader: the token that follows the published ones."""
    return json.dumps({"first_token": request.generated[-1]}).encode()


def first_token(data: bytes, vocab_size: int) -> int | None:
    """The token in another engine's metadata; None when it is not in our form."""
    try:
        token = json.loads(data)["first_token"]
    except (ValueError, KeyError, TypeError):
        return None
    return token if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size else None


class Publication:
    """`advance` never waits; the newest state is published as soon as the daemons have taken the one before."""

    def __init__(self, request: Request, model: ModelConfig, engine: EngineConfig, daemons: Daemons) -> None:
        self._request = request
        self._model = model
        self._engine = engine
        self._daemons = daemons
        self._leases: Sequence[Lease] = ()
        self._last = False
        self._withdrawn = False
        self._wake = asyncio.Event()

    def advance(self, *, last: bool = False) -> None:
        """More tokens have KV; `last` when no further ones will follow."""
        self._last = last
        self._wake.set()

    def withdraw(self) -> None:
        """The request was cancelled."""
        self._withdrawn = True
        self._wake.set()

    async def complete(self) -> None:
        """Publish until the last state is with every daemon. Raises KvferryError (`aborted` when withdrawn)."""
        last = False
        while not last:
            await self._wake.wait()
            self._wake.clear()
            self._check()
            request, last = self._request, self._last
            tables = tables_of(
                request, self._model, self._engine, start=0, stop=request.computed, window_first=request.window_first
            )
            tokens = request.tokens[: request.computed] if last else request.prompt
            self._leases = await self._daemons.publish(
                request.request_id, tables, request.computed, more=not last, digest=prompt_digest(tokens),
                metadata=metadata(request) if last else b"",
            )  # fmt: skip
        self._check()

    def _check(self) -> None:
        if self._withdrawn:
            raise Conflict("aborted", f"request {self._request.request_id} was aborted")

    async def ended(self) -> None:
        """Until no reader may read any more: read, expired, revoked, or the daemon is gone."""
        await asyncio.gather(*(lease.ended() for lease in self._leases), return_exceptions=True)

    async def revoke(self) -> None:
        await self._daemons.withdraw(self._request.request_id)
        await self.ended()
