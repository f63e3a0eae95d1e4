"""Callers at the peer port: bounded for each source address, and ended when their proof holds no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import unquote

from kvferry.errors import Full, KvferryError, Unauthorized
from kvferryd.api.answer import Context
from kvferryd.observe import logs
from kvferryd.peers import allow
from kvferryd.peers.certificates import Certificates, Identity

log = logs.get(__name__)
MAX_CALLS = 8192
"""Calls and open streams at once: leases being read, orders followed, roster members. Half of all that gRPC lets in:
probes of the daemon's health keep nobody out."""
MAX_FROM_ONE = MAX_CALLS // 4
"""From one address: a host with eight daemons, each of which hands on 256 orders."""


MAX_WAITING = 16
"""Calls from one address that wait for their turn in what takes long."""


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class Callers:
    """The calls under way."""

    def __init__(self, allowed: tuple[str, ...], proof: Certificates | None) -> None:
        self._allowed, self._proof = allowed, proof
        self._trusted: Identity | None = None
        """Its authorities, or those of now, must vouch for each caller. Until they change, None: TLS has
        checked everybody."""
        self._under_way: dict[Context, asyncio.Task[object]] = {}
        self._from: Counter[str] = Counter()
        self._ended: set[Context] = set()
        self._turns: defaultdict[str, _Turn] = defaultdict(_Turn)

    def enter(self, context: Context) -> None:
        """Raises KvferryError: `address_not_allowed`, `proof_over`, `too_many_calls`."""
        # "ipv4:10.0.0.7:41234" or "ipv6:%5B::1%5D:41234"
        kind, _, address = unquote(context.peer()).partition(":")
        if kind in ("ipv4", "ipv6"):
            allow.check(address, self._allowed)
        if not self._holds(context):
            raise _over()
        host = host_of(context)
        if self._from[host] >= MAX_FROM_ONE:
            raise _too_many(MAX_FROM_ONE, host)
        if len(self._under_way) >= MAX_CALLS:
            raise _too_many(MAX_CALLS, "all addresses")
        task = asyncio.current_task()
        assert task is not None
        self._from[host] += 1
        self._under_way[context] = task
        context.add_done_callback(lambda _: self._leave(context, host))  # type: ignore[arg-type]  # any callable will do

    def _leave(self, context: Context, host: str) -> None:
        del self._under_way[context]
        self._ended.discard(context)
        self._from[host] -= 1
        if not self._from[host]:
            del self._from[host]

    def recheck(self) -> None:
        """From now on callers need a certificate of the present authorities; those without are sent away."""
        assert self._proof is not None
        self._trusted = self._proof.current()
        over = [context for context in self._under_way if not self._holds(context)]
        log.info("what callers have proven was checked again", ended=sorted({each.peer() for each in over}))
        for context in over:
            self._ended.add(context)
            self._under_way[context].cancel()

    @contextlib.asynccontextmanager
    async def turn(self, context: Context) -> AsyncIterator[None]:
        """For what takes long: one call from each address at a time. Raises KvferryError (`too_many_calls`)."""
        host = host_of(context)
        turn = self._turns[host]
        if turn.waiting >= MAX_WAITING:
            raise _too_many(MAX_WAITING, host)
        turn.waiting += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._turns[host]

    def ended(self, context: Context) -> KvferryError | None:
        """Why the call was cancelled, if that was done here."""
        return _over() if context in self._ended else None

    def _holds(self, context: Context) -> bool:
        if self._trusted is None or self._proof is None:
            return True
        told = context.auth_context()
        shown = b"".join((*told.get("x509_pem_cert", ()), *told.get("x509_pem_cert_chain", ())))
        return self._trusted.vouches_for(shown) or self._proof.current().vouches_for(shown)


def host_of(context: Context) -> str:
    return unquote(context.peer()).rpartition(":")[0]


def _too_many(most: int, host: str) -> KvferryError:
    remedy = "end some of them, or call later"
    return Full("too_many_calls", f"{most} calls from {host} are under way", field="address", value=host, remedy=remedy)


def _over() -> KvferryError:
    why = "the certificate or secret that you have proven in this connection holds no more"
    return Unauthorized("proof_over", why, field="peer", remedy="connect again with one that holds")
